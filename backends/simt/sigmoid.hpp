// Sigmoids by fewer instructions than the library's own rule takes, with its bits: away from the edges of exp's range and of
// fp32's none of the special cases can matter; and of what is rounded to bf16, fp32's last bits matter only where it lies close
// to the middle between two bf16 numbers.
#pragma once

#include "arithmetic/math.hpp"
#include "simt/simt.hpp"

namespace rlk::simt {

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

// RN(z / d) where |z| is from 2^-60 to 64, or z is +0: what the compiler's own division does between its checks.
__device__ __forceinline__ float quotient_inside(float z, float d, float inverse) {
  float q = mul_rn(z, inverse);
  q = fused(inverse, fused(-d, q, z), q);
  return fused(inverse, fused(-d, q, z), q);
}
__device__ __forceinline__ float silu_inside(float z) {
  const float d = add_rn(exp_of_minus(z), 1);
  return quotient_inside(z, d, inverse_of(d));
}
// 1 / (1 + exp(-z)) for z from kLeastAbout on, within 19 units of 2^-24 of the rule's: 8 for the product with log2 e, 4 exp2, 1 the
// sum, 2 the inverse, and 4 of the rule's.
inline constexpr float kLeastAbout = -11.0f;
__device__ __forceinline__ float about_sigmoid(float z) {
  const float e = about_exp2(mul_rn(z, -ExpConstants<float>::kLog2e));
  return about_inverse(add_rn(e, 1));
}
// Whether a number within Reach last places of this one may round to another bf16 one.
template <std::uint32_t Reach>
__device__ __forceinline__ bool near_middle(float q) {
  return (float_bits(q) << 16) - ((0x8000u - Reach) << 16) <= 2 * Reach << 16;
}
// v times a gate's silu or sigmoid, or what a bf16 result rounds to the same number: within 22 last places of the rule's. False,
// and v is as it was, where one of them lies so close to a middle that it may round to another.
template <int N>
__device__ __forceinline__ bool multiply_for_bf16(bool silu, const float (&gate)[N], float (&v)[N]) {
  constexpr std::uint32_t kReach = 24;
  bool unsure = false;
  float about[N];
#  pragma unroll
  for (int k = 0; k < N; ++k) {
    const float s = about_sigmoid(gate[k]);
    about[k] = v[k] * (silu ? gate[k] * s : s);
    // A silu may be subnormal, where last places are few.
    unsure = unsure | (gate[k] < kLeastAbout) | (silu & (fabsf(gate[k]) < 0x1p-60f)) |
             near_middle<kReach>(about[k]);
  }
  if (unsure) return false;
#  pragma unroll
  for (int k = 0; k < N; ++k) v[k] = about[k];
  return true;
}
#endif

}  // namespace rlk::simt
