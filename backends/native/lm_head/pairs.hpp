// What VDPBF16PS does, as an engine of chains: arithmetic avx512bf16/kb1024, and avx512bf16/tree8 of linear.
//
// bf16 numbers come in pairs of 32 bits, even position below. For one sum and one pair of each operand:
//
//   sum = flush(sum + a_odd * b_odd), then sum = flush(sum + a_even * b_even)
//
// each fused, rounded to nearest even as if exponents had no end; a subnormal operand and a result that is then
// below 2^-126 are zeros of their sign. The instruction obeys no mode. A chain begins with +0 and is filled with zeros:
// in kb1024 K to a multiple of 32, which oneDNN does, in tree8 what is odd to whole pairs. Sums of chains are joined in
// plain fp32.
//
// To the chain product (chain.hpp) a pair is one step of two elements and 32 bits, which it moves about and hands to
// Lanes::fma.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "native/levels.hpp"
#include "native/lm_head/chain.hpp"

namespace rlk::native {

inline constexpr std::int64_t kPairFill = 32;
constexpr std::int64_t pair_depth(std::int64_t depth) {
  return (depth + kPairFill - 1) / kPairFill * kPairFill;
}
constexpr std::int64_t pair_block(std::int64_t depth) { return depth <= 1024 ? 512 : 1024; }

// Number i of both members' rows as a pair; without a second, which would be past the end, a zero.
inline float pair_at(const char* even, const char* odd, std::int64_t i) {
  std::uint16_t low, high = 0;
  std::memcpy(&low, even + 2 * i, sizeof low);
  if (odd) std::memcpy(&high, odd + 2 * i, sizeof high);
  return std::bit_cast<float>(std::uint32_t{high} << 16 | low);
}

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
template <Isa I>
const ChainKernels* pair_kernels() {
  if constexpr (I == Isa::avx512) return pair_kernels_avx512();
  if constexpr (I == Isa::avx2) return pair_kernels_avx2();
  return &pair_kernels_scalar();
}
// Why this processor's VDPBF16PS cannot be used: it has none, or its results are not those above. Null: it can.
const char* pairs_refusal();

}  // namespace rlk::native
