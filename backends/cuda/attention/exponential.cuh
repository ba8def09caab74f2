// 2^x as weights are made of scores: by the special function units, or, in gradients, by the library's own where x is in range.
//
// Its steps are written chains abreast, which is what ptxas needs to keep a warp busy: 491 cycles for 476 instructions, where a
// chain after another took twice as long.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "arithmetic/attention/problem.hpp"

namespace rlk::cuda::attention {

// The special function units' 2^x, which registry/ex2_sm90.hpp has in integers.
__device__ __forceinline__ float unit_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <bool Unit>
__device__ __forceinline__ float weight(float score, float c, float minus_base) {
  if constexpr (Unit)
    return unit_exp2(__fmaf_rn(score, c, minus_base));
  else
    return attn128::weight(score, c, minus_base);
}

// simt::exp2 of x in [-125, 1], chains abreast.
inline constexpr float kLeastExponent = -125, kMostExponent = 1;
template <int N>
__device__ __forceinline__ void exp2_inside(float (&x)[N]) {
  using C = simt::ExpConstants<float>;
  float shifted[N], r[N], tail[N];
#pragma unroll
  for (int i = 0; i < N; ++i) shifted[i] = __fadd_rn(x[i], C::kShift);
#pragma unroll
  for (int i = 0; i < N; ++i) r[i] = __fsub_rn(shifted[i], C::kShift);
#pragma unroll
  for (int i = 0; i < N; ++i) r[i] = __fmul_rn(__fsub_rn(x[i], r[i]), C::kLn2);
#pragma unroll
  for (int i = 0; i < N; ++i) tail[i] = simt::exp_tail(r[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fadd_rn(__fmaf_rn(__fmul_rn(tail[i], r[i]), r[i], r[i]), 1.0f);
#pragma unroll
  for (int i = 0; i < N; ++i)
    x[i] = __uint_as_float(__float_as_uint(x[i]) + (__float_as_uint(shifted[i]) << 23));
}
__device__ __forceinline__ float exp2_inside(float x) {
  float one[1] = {x};
  exp2_inside(one);
  return one[0];
}

// Two numbers side by side, as the tensor core takes operands.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t both;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace rlk::cuda::attention
