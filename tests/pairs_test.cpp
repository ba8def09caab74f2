// labels: conformance
// links: registry
// What VDPBF16PS does with every kind of number, on the processor's own and on its replays, against a model in
// fp64 that uses no fused multiply-add.
#include <doctest/doctest.h>

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

// One block.
float model(const Rows& a, std::int64_t i, const Rows& b, std::int64_t j) {
  float sum = 0;
  for (std::int64_t k = 0; k < (a.depth + 31) / 32 * 32; k += 2)
    for (const std::int64_t at : {k + 1, k}) sum = multiply_add(a.at(i, at), b.at(j, at), sum);
  return std::isnan(sum) ? std::bit_cast<float>(0x7fffffffu) : sum;
}

// Numbers of either sign with `count` exponents from `first` on.
std::function<std::uint16_t()> around(std::mt19937& random, unsigned first, unsigned count) {
  return [&random, first, count] {
    const auto x = static_cast<std::uint32_t>(random());
    return static_cast<std::uint16_t>((x & 0x8000u) | (first + (x >> 16) % count) << 7 | (x & 0x7fu));
  };
}

}  // namespace

TEST_CASE("pairs of bf16: normal, subnormal, huge, infinite, NaN and cancelling numbers") {
  constexpr std::int64_t kM = 24, kV = 96;
  const std::vector<std::string> ids{"native.avx512bf16", "native.replay_avx512bf16.avx2",
                                     "native.replay_avx512bf16.scalar", "onednn.avx512bf16"};
  std::mt19937 random(1);
  std::size_t steps = 0, zeros = 0, nans = 0, infinite = 0;
  for (const std::int64_t k : {2, 5, 31, 32, 64, 100})
    for (int kind = 0; kind < 8; ++kind) {
      const auto next = kind == 0   ? around(random, 124, 4)   // normal
                        : kind == 1 ? around(random, 0, 256)   // anything
                        : kind == 2 ? around(random, 60, 8)    // products about 2^-126
                        : kind == 3 ? around(random, 62, 2)    // the same, closer
                        : kind == 4 ? around(random, 0, 130)   // many zeros
                        : kind == 5 ? around(random, 188, 5)   // overflow
                        : kind == 6 ? around(random, 100, 54)  // far apart
                                    : around(random, 127, 1);  // few values: sums cancel
      Rows hidden(kM, k, next), weight(kV, k, next);
      if (kind == 7)
        for (auto* rows : {&hidden, &weight})
          for (std::uint16_t& x : rows->x) x &= 0xffc0u;
      std::vector<float> expected, got(static_cast<std::size_t>(kM * kV));
      for (std::int64_t i = 0; i < kM; ++i)
        for (std::int64_t j = 0; j < kV; ++j) {
          expected.push_back(model(hidden, i, weight, j));
          zeros += expected.back() == 0, nans += std::isnan(expected.back()),
              infinite += std::isinf(expected.back());
        }
      for (const std::string& id : ids) {
        const Tensor h = hidden.view(), w = weight.view(), y(got.data(), {kM, kV}, DType::f32);
        const rlk::LmHead args{.hidden = h, .weight = w, .out = y};
        if (!rlk::resolve(args, {.backend = id})) continue;
        INFO(id, " K=", k, " kind ", kind);
        REQUIRE(rlk::lm_head(args, {.backend = id}));
        CHECK(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0);
        steps += got.size() * static_cast<std::size_t>(k);
      }
    }
  MESSAGE(steps, " products; ", zeros, " zeros, ", infinite, " infinities, ", nans, " NaNs expected");
  CHECK(steps > 4'000'000);
  CHECK((zeros > 1000 && nans > 1000 && infinite > 1000));
}
