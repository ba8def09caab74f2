// rms_norm and its gradients in fp64, ascending sums, one rounding of every result.
#include <cmath>
#include <vector>

#include "arithmetic/rms_norm/bind.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::rms32;

using Row = std::vector<double>;

double at(const Problem& p, const rows::Tensor& t, std::int64_t row, std::int64_t i) {
  return rows::load(t.type, t.row(p.axes, row), i);
}
void put(const Problem& p, const rows::Tensor& t, std::int64_t row, std::int64_t i, double x) {
  rows::store(t.type, t.row(p.axes, row), i, x);
}
double weight(const Problem& p, std::int64_t i) {
  if (p.weight == nullptr) return 1;
  const double w = rows::load(p.weight_type, p.weight, i);
  return p.offset ? 1 + w : w;
}
// As a tensor of this type would hold it.
double round_to(rows::Type type, double x) {
  std::uint32_t cell = 0;
  rows::store(type, &cell, 0, x);
  return rows::load(type, &cell, 0);
}

double rstd(const Problem& p, const Row& a) {
  double squares = 0;
  for (double x : a) squares = std::fma(x, x, squares);
  return 1 / std::sqrt(squares / static_cast<double>(p.width) + double{p.eps});
}

// What is normalised: x, or its sum with the residual as a tensor would hold it.
double normalised(const Problem& p, std::int64_t row, std::int64_t i) {
  const double x = at(p, p.x, row, i);
  return p.residual ? round_to(p.residual.type, x + at(p, p.residual, row, i)) : x;
}

void forward_row(const Problem& p, std::int64_t row) {
  Row a(static_cast<std::size_t>(p.width));
  for (std::int64_t i = 0; i < p.width; ++i) {
    const double x = normalised(p, row, i);
    if (p.sum) put(p, p.sum, row, i, x);
    a[static_cast<std::size_t>(i)] = x;
  }
  const double r = rstd(p, a);
  if (p.rstd) put(p, p.rstd, row, 0, r);
  for (std::int64_t i = 0; i < p.width; ++i) {
    double y = a[static_cast<std::size_t>(i)] * r;
    if (p.early) y = round_to(p.y.type, y);
    y *= weight(p, i);
    if (p.gate) y *= activation::value<double>(p.act, at(p, p.gate, row, i));
    put(p, p.y, row, i, y);
  }
}

// Adds its share to d_weight.
void backward_row(const Problem& p, std::int64_t row, Row& d_weight) {
  Row normal(static_cast<std::size_t>(p.width)), d = normal;
  for (std::int64_t i = 0; i < p.width; ++i) normal[static_cast<std::size_t>(i)] = normalised(p, row, i);
  const double r = p.rstd ? at(p, p.rstd, row, 0) : rstd(p, normal);
  double dot = 0;
  for (std::int64_t i = 0; i < p.width; ++i) {
    const auto n = static_cast<std::size_t>(i);
    normal[n] *= r;
    d[n] = at(p, p.d_y, row, i);
    if (p.gate) {
      const double z = at(p, p.gate, row, i);
      if (p.d_gate)
        put(p, p.d_gate, row, i, d[n] * (normal[n] * weight(p, i)) * activation::slope<double>(p.act, z));
      d[n] *= activation::value<double>(p.act, z);
    }
    d_weight[n] = std::fma(d[n], normal[n], d_weight[n]);
    d[n] *= weight(p, i);
    dot = std::fma(d[n], normal[n], dot);
  }
  const double mean = dot / static_cast<double>(p.width);
  for (std::int64_t i = 0; i < p.width; ++i) {
    const auto n = static_cast<std::size_t>(i);
    double x = r * std::fma(-normal[n], mean, d[n]);
    if (p.d_sum) x += at(p, p.d_sum, row, i);
    if (p.d_x) put(p, p.d_x, row, i, x);
    if (p.d_residual) put(p, p.d_residual, row, i, x);
  }
}

rlk_code run(const RmsNorm& a, const Call& call) {
  const Problem p = problem_of(a);
  call.parallel_for(p.axes.rows, [&](std::int64_t row) { forward_row(p, row); });
  return RLK_OK;
}

rlk_code run_backward(const RmsNormBwd& a, const Call&) {
  const Problem p = problem_of(a);
  Row d_weight(static_cast<std::size_t>(p.width));
  for (std::int64_t row = 0; row < p.axes.rows; ++row) backward_row(p, row, d_weight);
  for (std::int64_t i = 0; p.d_weight && i < p.width; ++i)
    rows::store(p.d_weight_type, p.d_weight, i, d_weight[static_cast<std::size_t>(i)]);
  return RLK_OK;
}

constexpr Facts kFacts = golden_facts("ascending fp64 sums, one rounding");

}  // namespace

extern const rlk_implementation rms_norm_golden, rms_norm_bwd_golden;
constinit const rlk_implementation rms_norm_golden = implement<RmsNorm, run>(kFacts);
constinit const rlk_implementation rms_norm_bwd_golden = implement<RmsNormBwd, run_backward>(kFacts);

}  // namespace rlk::native
