// bf16 and fp16 for kernels: the project's own 16-bit types and their conversions, one source for g++, nvcc
// and clang.
//
// Every conversion gives the same bits on the host, on NVIDIA and on AMD:
//  - to_float is exact (a NaN stays a NaN; its payload carries no meaning until it is stored);
//  - from_float rounds to nearest even, keeps subnormals, and stores every NaN as the one canonical pattern
//    (0x7fff, 0x7fff, 0x7fffffff): x86 propagates payloads, NVIDIA does not, so a payload could not be
//    promised.
#pragma once

#include <cstdint>

#if defined(__HIP__)
#  include <hip/hip_runtime.h>  // __host__ and its relatives are macros there
#endif

#if defined(__CUDACC__) || defined(__HIP__)
#  define RLK_HD __host__ __device__ __forceinline__
#else
#  define RLK_HD inline __attribute__((always_inline))
#endif

namespace rlk::simt {

struct bf16 {
  std::uint16_t bits;
};

struct fp16 {
  std::uint16_t bits;
};

// e4m3: exponents from -6 to 8, no infinities; all ones are its NaN. fp8.hpp writes it.
struct fp8 {
  std::uint8_t bits;
};

RLK_HD std::uint32_t float_bits(float v) { return __builtin_bit_cast(std::uint32_t, v); }
RLK_HD float bits_float(std::uint32_t v) { return __builtin_bit_cast(float, v); }

RLK_HD float to_float(float v) { return v; }

RLK_HD float to_float(bf16 v) { return bits_float(static_cast<std::uint32_t>(v.bits) << 16); }

RLK_HD float to_float(fp16 v) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v.bits));
  return out;
#elif defined(__HIP_DEVICE_COMPILE__)
  return static_cast<float>(__builtin_bit_cast(_Float16, v.bits));
#else
  constexpr std::uint32_t kExponent = 0x7c00u << 13;
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  std::uint32_t u = static_cast<std::uint32_t>(v.bits & 0x7fffu) << 13;
  const std::uint32_t exponent = u & kExponent;
  u += (127u - 15u) << 23;
  if (exponent == kExponent) {
    u += (128u - 16u) << 23;
  } else if (exponent == 0) {  // subnormal: renormalise by an exact subtraction
    u = float_bits(bits_float(u + (1u << 23)) - bits_float(113u << 23));
  }
  return bits_float(u | sign);
#endif
}

RLK_HD float to_float(fp8 v) {
  const std::uint32_t magnitude = v.bits & 0x7fu, sign = static_cast<std::uint32_t>(v.bits & 0x80u) << 24;
  std::uint32_t u = (magnitude << 20) + (120u << 23);
  if (magnitude < 8) u = float_bits(static_cast<float>(magnitude) * 0x1p-9f);
  if (magnitude == 0x7f) u = 0x7fffffffu;
  return bits_float(u | sign);
}

template <class T>
RLK_HD T from_float(float v);

template <>
RLK_HD float from_float<float>(float v) {
  return v != v ? bits_float(0x7fffffffu) : v;
}

template <>
RLK_HD bf16 from_float<bf16>(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint16_t out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return bf16{out};
#else
  const std::uint32_t u = float_bits(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fff};
  return bf16{static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
#endif
}

template <>
RLK_HD fp16 from_float<fp16>(float v) {
#if defined(__CUDA_ARCH__)
  std::uint16_t out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return fp16{out};
#else
  std::uint32_t u = float_bits(v);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return fp16{0x7fff};
  if (u >= 0x477ff000u) return fp16{static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (u < 0x38800000u) {  // subnormal: adding 0.5 puts the rounded multiple of 2^-24 into the low bits
    u = float_bits(bits_float(u) + 0.5f) - 0x3f000000u;
    return fp16{static_cast<std::uint16_t>(sign | u)};
  }
  u += ((15u - 127u) << 23) + 0xfffu + ((u >> 13) & 1u);
  return fp16{static_cast<std::uint16_t>(sign | (u >> 13))};
#endif
}

}  // namespace rlk::simt
