// What VDPBF16PS does, as an engine of chains: arithmetic avx512bf16/kb1024.
//
// bf16 numbers come in pairs of 32 bits, even position below. For one sum and one pair of each operand:
//
//   sum = flush(sum + a_odd * b_odd), then sum = flush(sum + a_even * b_even)
//
// each fused, rounded to nearest even as if exponents had no end; a subnormal operand and a result that is then
// below 2^-126 are zeros of their sign. The instruction obeys no mode. Its sums run over K filled with zeros to a
// multiple of 32, in blocks of 1024, where K is at most 1024 of 512, each from +0; later blocks' sums are added to
// the first one's in order, in plain fp32.
//
// To the chain product (chain.hpp) a pair is one element of 32 bits, which it moves about and hands to
// Lanes::fma.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "native/levels.hpp"
#include "native/lm_head/chain.hpp"

namespace rlk::native {

inline constexpr std::int64_t kPairFill = 32;
constexpr std::int64_t pair_depth(std::int64_t depth) {
  return (depth + kPairFill - 1) / kPairFill * kPairFill;
}
// In pairs.
constexpr std::int64_t pair_block(std::int64_t depth) { return depth <= 1024 ? 256 : 512; }

inline float flush(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}
// What is at least this far from zero is rounded up to 2^-126 with 24 bits.
inline constexpr double kLeastNormal = 0x1p-126 - 0x1p-151;
inline float fused(float a, float b, float sum) {
  const float result = std::fma(a, b, sum);
  if (!(std::fabs(result) <= std::numeric_limits<float>::min())) return result;
  const double sign = std::signbit(result) ? -1 : 1;
  return std::fma(sign * double{a}, double{b}, sign * double{sum} - kLeastNormal) < 0
             ? std::copysign(0.f, result)
             : result;
}
inline float pair_step(std::uint32_t a, std::uint32_t b, float sum) {
  const auto high = [](std::uint32_t x) { return flush(std::bit_cast<float>(x & 0xffff0000u)); };
  const auto low = [](std::uint32_t x) { return flush(std::bit_cast<float>(x << 16)); };
  return fused(low(a), low(b), fused(high(a), high(b), flush(sum)));
}

const ChainKernels& pair_kernels_scalar();
const ChainKernels* pair_kernels_avx2();    // null where the build lacks it
const ChainKernels* pair_kernels_avx512();  // likewise
// Why this processor's VDPBF16PS cannot be used: it has none, or its results are not those above. Null: it can.
const char* pairs_refusal();

}  // namespace rlk::native
