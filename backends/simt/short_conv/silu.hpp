// silu and its gradient for the GPU kernels of short_conv: the bits of conv32 by fewer instructions where that is possible.
// Away from the edges of exp's range and of fp32's none of the special cases of the rule can matter; and of a silu that is
// rounded to bf16, fp32's last bits matter only where it lies close to the middle between two bf16 numbers.
#pragma once

#include "arithmetic/short_conv/conv.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::short_conv {

template <int Count>
struct Numbers {
  float at[Count];
};

template <int Count>
RLK_DEVICE_CALL Numbers<Count> silu_anywhere(Numbers<Count> z) {
  for (int k = 0; k < Count; ++k) z.at[k] = conv32::silu(z.at[k]);
  return z;
}
template <int Count>
RLK_DEVICE_CALL Numbers<Count> d_silu_anywhere(Numbers<Count> d_y, Numbers<Count> z) {
  for (int k = 0; k < Count; ++k) d_y.at[k] = conv32::d_silu(d_y.at[k], z.at[k]);
  return d_y;
}

#if defined(__CUDA_ARCH__)
// The library's exp(-z) for |z| <= 64: the argument needs no limits, and the power of two goes into the exponent's bits.
__device__ __forceinline__ float exp_of_minus(float z) {
  using C = ExpConstants<float>;
  const float shifted = fused(z, -C::kLog2e, C::kShift), n = shifted - C::kShift;
  float r = fused(n, -C::kLn2High, -z);
  r = fused(n, -C::kLn2Low, r);
  const float p = add_rn(fused(mul_rn(exp_tail(r), r), r, r), 1);
  return bits_float((float_bits(shifted) << C::kMantissa) + float_bits(p));
}
__device__ __forceinline__ float about_exp2(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}
__device__ __forceinline__ float about_inverse(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}
// RN(1 / d) for d = e + 1 of such an exp.
__device__ __forceinline__ float inverse_of(float d) {
  const float inverse = about_inverse(d);
  return fused(fused(-d, inverse, 1), inverse, inverse);
}

// silu where |z| is from 2^-60 to 64, or z is +0: the quotient is what the compiler's own division does between its checks.
__device__ __forceinline__ float silu_inside(float z) {
  const float d = add_rn(exp_of_minus(z), 1), inverse = inverse_of(d);
  float q = mul_rn(z, inverse);
  q = fused(inverse, fused(-d, q, z), q);
  return fused(inverse, fused(-d, q, z), q);
}
// d_silu where |z| is at most 64.
__device__ __forceinline__ float d_silu_inside(float d_y, float z) {
  const float e = exp_of_minus(z), s = inverse_of(add_rn(e, 1));
  return mul_rn(mul_rn(d_y, s), fused(z, mul_rn(e, s), 1));
}

// About silu, for z from kLeast on: within kReach units of fp32's last place of the rule's. By the approximations' own bounds and
// roundings, in units of 2^-24: 8 for the product with log2 e, 4 exp2, 1 the sum, 2 the inverse, 1 the product, and 4 of the
// rule's, or 20 of a last place at most; of all z none was farther than 10 on an H100.
inline constexpr float kLeast = -11.0f;
inline constexpr std::uint32_t kReach = 20;
__device__ __forceinline__ float about_silu(float z) {
  const float e = about_exp2(mul_rn(z, -ExpConstants<float>::kLog2e));
  return mul_rn(z, about_inverse(add_rn(e, 1)));
}
// Whether a number within kReach of this one may round to another bf16 one.
__device__ __forceinline__ bool near_middle(float q) {
  return (float_bits(q) << 16) - ((0x8000u - kReach) << 16) <= 2 * kReach << 16;
}
#endif

template <int Count>
__device__ __forceinline__ void silu_of(Numbers<Count>& z) {
#if defined(__CUDA_ARCH__)
  bool inside = true;
#  pragma unroll
  for (int k = 0; k < Count; ++k) {
    const float size = fabsf(z.at[k]);
    inside = inside && ((size >= 0x1p-60f && size <= 64.0f) || float_bits(z.at[k]) == 0);
  }
  if (inside) {
#  pragma unroll
    for (int k = 0; k < Count; ++k) z.at[k] = silu_inside(z.at[k]);
    return;
  }
#endif
  z = silu_anywhere(z);
}

// What rounds to the bf16 numbers that the silu of z rounds to.
template <int Count>
__device__ __forceinline__ void silu_for_bf16(Numbers<Count>& z) {
#if defined(__CUDA_ARCH__)
  bool unsure = false;
  Numbers<Count> about;
#  pragma unroll
  for (int k = 0; k < Count; ++k) {
    about.at[k] = about_silu(z.at[k]);
    unsure = unsure || z.at[k] < kLeast || near_middle(about.at[k]);
  }
  if (!unsure) {
    z = about;
    return;
  }
#endif
  silu_of(z);
}

// d_y becomes the gradient of z.
template <int Count>
__device__ __forceinline__ void d_silu_of(Numbers<Count>& d_y, const Numbers<Count>& z) {
#if defined(__CUDA_ARCH__)
  bool inside = true;
#  pragma unroll
  for (int k = 0; k < Count; ++k) inside = inside && fabsf(z.at[k]) <= 64.0f;
  if (inside) {
#  pragma unroll
    for (int k = 0; k < Count; ++k) d_y.at[k] = d_silu_inside(d_y.at[k], z.at[k]);
    return;
  }
#endif
  d_y = d_silu_anywhere(d_y, z);
}

}  // namespace rlk::simt::short_conv
