// From a tile's scores to its weights, as a warp holds them: of 16 rows by 128 keys a lane has rows lane / 4 and that + 8,
// keys 8 i + 2 (lane % 4) and the next: s[4 i] and s[4 i + 1] of the first row, s[4 i + 2] and s[4 i + 3] of the second.
//
// exp2 is what the kernel spends its time on: 12 operations of the FMA pipes for every weight, beside 4 D of the tensor
// cores'. Where all of a warp's exponents are in range, as nearly always, its clamps are left out and 2^n is added to the
// exponent at once: the same bits.
#pragma once

#include "cuda/attention/block.cuh"

namespace rlk::cuda::attention {

__device__ __forceinline__ float least_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// simt::exp2 of x in [-125, 1].
inline constexpr float kLeastExponent = -125, kMostExponent = 1;
__device__ __forceinline__ float exp2_inside(float x) {
  using C = simt::ExpConstants<float>;
  const float shifted = __fadd_rn(x, C::kShift);
  const float r = __fmul_rn(__fsub_rn(x, __fsub_rn(shifted, C::kShift)), C::kLn2);
  const float y = __fadd_rn(__fmaf_rn(__fmul_rn(simt::exp_tail(r), r), r, r), 1.0f);
  return __uint_as_float(__float_as_uint(y) + (__float_as_uint(shifted) << 23));
}

// Bits of the index are folded in the order 6, 3, 0, 1, 2, 4, 5; every lane of a row gets the sum.
__device__ __forceinline__ float tree(const float (&p)[64], int h) {
  float v[2][2];
#pragma unroll
  for (int b5 = 0; b5 < 2; ++b5)
#pragma unroll
    for (int b4 = 0; b4 < 2; ++b4) {
      float e[2];
#pragma unroll
      for (int b0 = 0; b0 < 2; ++b0) {
        const int i = 4 * b5 + 2 * b4, at = 2 * h + b0;
        e[b0] = __fadd_rn(__fadd_rn(p[4 * i + at], p[4 * (i + 8) + at]),
                          __fadd_rn(p[4 * (i + 1) + at], p[4 * (i + 9) + at]));
      }
      float x = __fadd_rn(e[0], e[1]);
      x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
      v[b5][b4] = __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
    }
  return __fadd_rn(__fadd_rn(v[0][0], v[0][1]), __fadd_rn(v[1][0], v[1][1]));
}

// Two rows of a thread: what they see, and their sums so far.
struct Rows {
  int first[2], last[2];  // keys seen
  float m[2], l[2];
  __device__ void restart() {
    m[0] = m[1] = -__builtin_inff();
    l[0] = l[1] = 0;
  }
};

// Scores of the tile from key `at` on become weights; m and l move on. True where O has to be multiplied by `a`, else
// it is 1 for the whole warp.
template <bool Capped>
__device__ __forceinline__ bool weigh(const Problem& p, float (&s)[64], Rows& rows, int at, float (&a)[2]) {
  if constexpr (Capped) {
    if (p.cap != 0) {
#pragma unroll
      for (float& x : s) x = attn128::capped(p, x);
    }
  }
  bool whole = true;
#pragma unroll
  for (int h = 0; h < 2; ++h) whole = whole && rows.first[h] <= at && rows.last[h] >= at + kTile;
  if (!__all_sync(~0u, whole)) {
    const int j = at + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int key = j + e / 4 * 8 + e % 2, h = e / 2 % 2;
      if (key < rows.first[h] || key >= rows.last[h]) s[e] = -__builtin_inff();
    }
  }
  float minus_base[2];
  bool inside = true, changed = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = s[2 * h], least = s[2 * h];
#pragma unroll
    for (int e = 0; e < 64; ++e)
      if (e / 2 % 2 == h && e != 2 * h) top = fmaxf(top, s[e]), least = least_or_nan(least, s[e]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float scaled = __fmul_rn(top, p.c), m = scaled > rows.m[h] ? scaled : rows.m[h];
    const float base = attn128::base_of(m);
    minus_base[h] = -base;
    inside = inside && __fmaf_rn(least, p.c, -base) >= kLeastExponent &&
             __fmaf_rn(top, p.c, -base) <= kMostExponent;
    changed = changed || m != rows.m[h];
    a[h] = rows.m[h], rows.m[h] = m;
  }
  if (__all_sync(~0u, inside)) {
#pragma unroll
    for (int e = 0; e < 64; ++e) s[e] = exp2_inside(__fmaf_rn(s[e], p.c, minus_base[e / 2 % 2]));
  } else {
#pragma unroll
    for (int e = 0; e < 64; ++e) s[e] = attn128::weight(s[e], p.c, minus_base[e / 2 % 2]);
  }
  changed = __any_sync(~0u, changed);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    a[h] = changed ? simt::exp2(__fadd_rn(a[h], minus_base[h])) : 1.0f;
    rows.l[h] = __fmaf_rn(rows.l[h], a[h], tree(s, h));
  }
  return changed;
}

// Weights as the tensor core's operand A, four registers for every 16 keys.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t both;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <class T>
__device__ __forceinline__ void pack(const float (&s)[64], std::uint32_t (&w)[8][4]) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) w[k][i] = pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

}  // namespace rlk::cuda::attention
