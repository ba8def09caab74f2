// What kernels write to an fp8 cache (e4m3) and read beside one: the rounding of a float, one source for g++, nvcc and clang, with
// the same bits on the host, on NVIDIA and on AMD; and the factors of its heads.
#pragma once

#include "arithmetic/half.hpp"

namespace rlk::simt {

// Rounds to nearest even. What is beyond 448 becomes 448 with its sign, infinities too; every NaN is 0x7f.
template <>
RLK_HD fp8 from_float<fp8>(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return fp8{static_cast<std::uint8_t>(pair)};
#else
  const std::uint32_t u = float_bits(v), sign = u >> 24 & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return fp8{0x7f};
  std::uint32_t e = (magnitude + ((7u - 127u) << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  if (magnitude < 0x3c800000u)  // subnormal: adding 2^14 puts the rounded multiple of 2^-9 into the low bits
    e = float_bits(bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  return fp8{static_cast<std::uint8_t>(sign | (e < 0x7eu ? e : 0x7eu))};
#endif
}

// Two elements as they lie in memory.
RLK_HD std::uint32_t fp8_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return from_float<fp8>(low).bits | static_cast<std::uint32_t>(from_float<fp8>(high).bits) << 8;
#endif
}

}  // namespace rlk::simt

namespace rlk::rows {

// Factors of fp8 elements, of each head or of all (a stride of 0); 1 where data is null.
struct Factors {
  const float* data = nullptr;
  std::int64_t stride = 0;

  RLK_HD float of(std::int64_t head) const { return data == nullptr ? 1.0f : data[head * stride]; }
};

}  // namespace rlk::rows
