// qk_norm_rope in fp64: ascending sums, a head rounded between its norm and its turn, one rounding of every result.
#include <array>
#include <cmath>
#include <cstring>

#include "arithmetic/qk_norm_rope/bind.hpp"
#include "native/levels.hpp"
#include "native/qk_norm_rope/positions.hpp"

namespace rlk::native {
namespace {

using rlk::rms32_rope32::kMostDims;
using rlk::rms32_rope32::Part;
using rlk::rms32_rope32::Problem;
using rlk::rms32_rope32::problem_of;

using Head = std::array<double, kMostDims>;

// As a tensor of this type holds it.
double round_to(rows::Type type, double x) {
  std::uint32_t cell = 0;
  rows::store(type, &cell, 0, x);
  return rows::load(type, &cell, 0);
}

double weight(const Problem& p, const Part& part, int i) {
  const double w = rows::load(p.weight_type, part.weight, i);
  return p.offset ? 1 + w : w;
}

void normalise(const Problem& p, const Part& part, Head& x) {
  double squares = 0;
  for (int i = 0; i < p.dims; ++i) squares = std::fma(x[i], x[i], squares);
  const double r = 1 / std::sqrt(squares / p.dims + double{p.eps});
  for (int i = 0; i < p.dims; ++i) {
    double y = x[i] * r;
    if (p.early) y = round_to(p.type, y);
    x[i] = round_to(p.type, y * weight(p, part, i));
  }
}

void turn(const Problem& p, std::int64_t token, Head& x) {
  const std::int64_t row = p.position(token);
  for (int pair = 0; pair < p.turned / 2; ++pair) {
    const double c = rows::load(p.table_type, p.cos, row * p.cos_row + pair),
                 s = rows::load(p.table_type, p.sin, row * p.sin_row + pair);
    const int first = p.adjacent ? 2 * pair : pair, second = p.adjacent ? first + 1 : pair + p.turned / 2;
    const double a = x[first], b = x[second];
    x[first] = std::fma(a, c, -(b * s));
    x[second] = std::fma(b, c, a * s);
  }
}

// Dims that neither turn nor are normalised are copied bit for bit.
void put(const Problem& p, const Head& y, const void* x, void* to) {
  const int copied = p.normed() ? p.dims : p.turned;
  for (int i = 0; i < copied; ++i) rows::store(p.type, to, i, y[i]);
  const auto skip = static_cast<std::size_t>(copied * rows::size_of(p.type));
  std::memcpy(static_cast<char*>(to) + skip, static_cast<const char*>(x) + skip,
              static_cast<std::size_t>((p.dims - copied) * rows::size_of(p.type)));
}

// Numbers of q's dtype into an fp8 cache: by steps in fp32, as any arithmetic has them.
void keep(const Problem& p, const double* x, int n, float factor, void* to) {
  const float r = 1 / factor;
  for (int i = 0; i < n; ++i)
    static_cast<simt::fp8*>(to)[i] =
        simt::from_float<simt::fp8>(static_cast<float>(round_to(p.type, x[i])) * r);
}

void head(const Problem& p, const Part& part, std::int64_t token, std::int64_t slot, std::int64_t h) {
  const void* from = part.x.row(p.type, token, h);
  Head x{};
  for (int i = 0; i < p.dims; ++i) x[i] = rows::load(p.type, from, i);
  if (p.normed()) normalise(p, part, x);
  turn(p, token, x);
  if (part.y) put(p, x, from, part.y.row(p.type, token, h));
  if (!part.cache || slot < 0) return;
  if (p.f8)
    keep(p, x.data(), p.dims, part.factors.of(h), p.cached(part, slot, h));
  else
    put(p, x, from, p.cached(part, slot, h));
}

void value(const Problem& p, std::int64_t token, std::int64_t slot, std::int64_t h) {
  const void* from = p.v.x.row(p.type, token, h);
  void* to = p.cached(p.v, slot, h);
  if (!p.f8) {
    std::memcpy(to, from, static_cast<std::size_t>(p.v_dims * rows::size_of(p.type)));
  } else {
    Head x{};
    for (int i = 0; i < p.v_dims; ++i) x[i] = rows::load(p.type, from, i);
    keep(p, x.data(), p.v_dims, p.v.factors.of(h), to);
  }
}

rlk_code run(const QkNormRope& a, const Call& call) {
  const Problem p = problem_of(a);
  if (p.heads() == 0) return RLK_OK;
  if (const auto error = qk_norm_rope::check_positions(p); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  call.parallel_for(p.tokens, [&](std::int64_t token) {
    const std::int64_t slot = p.slot(token);
    for (const Part* part : {&p.q, &p.k})
      for (std::int64_t h = 0; h < part->heads; ++h) head(p, *part, token, slot, h);
    for (std::int64_t h = 0; slot >= 0 && p.v_dims > 0 && h < p.v.heads; ++h) value(p, token, slot, h);
  });
  return RLK_OK;
}

}  // namespace

extern const rlk_implementation qk_norm_rope_golden;
constinit const rlk_implementation qk_norm_rope_golden = implement<QkNormRope, run>(
    golden_facts("fp64, rounded where norm and turn are called one after the other"));

}  // namespace rlk::native
