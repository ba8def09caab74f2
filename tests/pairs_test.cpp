// labels: conformance
// links: registry
// What VDPBF16PS does with every kind of number, on the processor's own and on its replays, against a model in
// fp64 that uses no fused multiply-add: lm_head, linear and its gradients.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

float upper(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }
bool subnormal(float x) { return x != 0 && std::fabs(x) < 0x1p-126f; }
float flushed(float x) { return subnormal(x) ? std::copysign(0.f, x) : x; }

// a * b + c rounded once, with 24 bits and no least exponent; then zero where it is below 2^-126.
float multiply_add(float a, float b, float c) {
  const double product = double{flushed(a)} * double{flushed(b)}, addend = flushed(c);
  double sum = product + addend;
  if (std::isfinite(sum)) {
    // What the sum in fp64 lost makes it odd, so that the next rounding is the only one that counts.
    const double part = sum - product;
    const double lost = (product - (sum - part)) + (addend - part);
    if (lost != 0 && (std::bit_cast<std::uint64_t>(sum) & 1) == 0)
      sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
  }
  if (std::fabs(sum) < 0x1p-100)  // in a place where fp32 is not subnormal
    return std::fabs(static_cast<float>(sum * 0x1p60)) < 0x1p-66f
               ? std::copysign(0.f, static_cast<float>(sum * 0x1p60))
               : static_cast<float>(sum);
  return static_cast<float>(sum);
}

struct Rows {
  std::int64_t rows, depth;
  std::vector<std::uint16_t> x;
  Rows(std::int64_t r, std::int64_t k, const std::function<std::uint16_t()>& next)
      : rows(r), depth(k), x(static_cast<std::size_t>(r * k)) {
    for (std::uint16_t& e : x) e = next();
  }
  float at(std::int64_t i, std::int64_t k) const {
    return k < depth ? upper(x[static_cast<std::size_t>(i * depth + k)]) : 0;
  }
  Tensor view() const { return Tensor(const_cast<std::uint16_t*>(x.data()), {rows, depth}, DType::bf16); }
};

// A chain of elements from `begin` to `end`, filled with zeros to a multiple of `fill`.
float chain(const Rows& a, std::int64_t i, const Rows& b, std::int64_t j, std::int64_t begin,
            std::int64_t end, std::int64_t fill) {
  float sum = 0;
  for (std::int64_t k = begin; k < begin + (end - begin + fill - 1) / fill * fill; k += 2)
    for (const std::int64_t at : {k + 1, k}) sum = multiply_add(a.at(i, at), b.at(j, at), sum);
  return sum;
}
// Eight leaves of 16: depths of up to 128.
float tree(const Rows& a, std::int64_t i, const Rows& b, std::int64_t j) {
  float sums[8];
  for (std::int64_t n = 0; n < 8; ++n)
    sums[n] = chain(a, i, b, j, std::min(a.depth, 16 * n), std::min(a.depth, 16 * n + 16), 2);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}
float canonical(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7fffffffu) : x; }

// What each result of a call is of rows `a` and `b`.
struct Expected {
  std::vector<float> blocks, leaves, tokens;
  Expected(const Rows& a, const Rows& b) {
    for (std::int64_t i = 0; i < a.rows; ++i)
      for (std::int64_t j = 0; j < b.rows; ++j) {
        blocks.push_back(canonical(chain(a, i, b, j, 0, a.depth, 32)));
        leaves.push_back(canonical(tree(a, i, b, j)));
        tokens.push_back(canonical(chain(a, i, b, j, 0, a.depth, 2)));
      }
  }
};
Rows transposed(const Rows& a) {
  Rows t(a.depth, a.rows, [] { return std::uint16_t{0}; });
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t k = 0; k < a.depth; ++k)
      t.x[static_cast<std::size_t>(k * a.rows + i)] = a.x[static_cast<std::size_t>(i * a.depth + k)];
  return t;
}

// Numbers of either sign with `count` exponents from `first` on.
std::function<std::uint16_t()> around(std::mt19937& random, unsigned first, unsigned count) {
  return [&random, first, count] {
    const auto x = static_cast<std::uint32_t>(random());
    return static_cast<std::uint16_t>((x & 0x8000u) | (first + (x >> 16) % count) << 7 | (x & 0x7fu));
  };
}

}  // namespace

namespace {

constexpr std::int64_t kM = 24, kV = 96;

// Products of all kinds of numbers, which a call must have made, and how many results of each sort were expected.
struct Seen {
  std::size_t products = 0, zeros = 0, nans = 0, infinite = 0;

  void expect(const std::vector<float>& results) {
    for (const float x : results) zeros += x == 0, nans += std::isnan(x), infinite += std::isinf(x);
  }
  // False where the implementation is not there.
  template <class Args>
  void check(rlk::Status (*op)(const Args&, const rlk::Options&), const Args& args, const std::string& id,
             const std::vector<float>& got, const std::vector<float>& expected, std::int64_t depth) {
    if (!rlk::resolve(args, {.backend = id})) return;
    INFO(id, " K=", depth);
    REQUIRE(op(args, {.backend = id}));
    CHECK(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0);
    products += got.size() * static_cast<std::size_t>(depth);
  }
};

Rows rows_of_kind(int kind, std::int64_t rows, std::int64_t k, std::mt19937& random) {
  const auto next = kind == 0   ? around(random, 124, 4)   // normal
                    : kind == 1 ? around(random, 0, 256)   // anything
                    : kind == 2 ? around(random, 60, 8)    // products about 2^-126
                    : kind == 3 ? around(random, 62, 2)    // the same, closer
                    : kind == 4 ? around(random, 0, 130)   // many zeros
                    : kind == 5 ? around(random, 188, 5)   // overflow
                    : kind == 6 ? around(random, 100, 54)  // far apart
                                : around(random, 127, 1);  // few values: sums cancel
  Rows result(rows, k, next);
  if (kind == 7)
    for (std::uint16_t& x : result.x) x &= 0xffc0u;
  return result;
}

}  // namespace

TEST_CASE("pairs of bf16: normal, subnormal, huge, infinite, NaN and cancelling numbers") {
  std::mt19937 random(1);
  Seen seen;
  for (const std::int64_t k : {2, 5, 31, 32, 64, 100})
    for (int kind = 0; kind < 8; ++kind) {
      const Rows a = rows_of_kind(kind, kM, k, random), b = rows_of_kind(kind, kV, k, random);
      const Rows across_a = transposed(a), across_b = transposed(b), unread = rows_of_kind(0, kM, kV, random);
      const Expected expected(a, b);
      seen.expect(expected.blocks), seen.expect(expected.leaves);
      std::vector<float> got(static_cast<std::size_t>(kM * kV));
      const Tensor h = a.view(), w = b.view(), ah = across_a.view(), aw = across_b.view(), u = unread.view(),
                   y(got.data(), {kM, kV}, DType::f32);
      INFO("kind ", kind);
      for (const char* id : {"native.avx512bf16", "native.replay_avx512bf16.avx2",
                             "native.replay_avx512bf16.scalar", "onednn.avx512bf16"}) {
        seen.check<rlk::LmHead>(rlk::lm_head, {.hidden = h, .weight = w, .out = y}, id, got, expected.blocks,
                                k);
        if (id == std::string("onednn.avx512bf16")) continue;
        seen.check<rlk::Linear>(rlk::linear, {.x = h, .weight = w, .y = y}, id, got, expected.leaves, k);
        // Sums over what lies across: N for d_x, tokens for d_weight.
        seen.check<rlk::LinearBwd>(rlk::linear_bwd, {.d_y = h, .x = u, .weight = aw, .d_x = y}, id, got,
                                   expected.leaves, k);
        seen.check<rlk::LinearBwd>(rlk::linear_bwd, {.d_y = ah, .x = aw, .weight = u, .d_weight = y}, id, got,
                                   expected.tokens, k);
      }
    }
  MESSAGE(seen.products, " products; ", seen.zeros, " zeros, ", seen.infinite, " infinities, ", seen.nans,
          " NaNs expected");
  CHECK(seen.products > 16'000'000);
  CHECK((seen.zeros > 2000 && seen.nans > 2000 && seen.infinite > 2000));
}
