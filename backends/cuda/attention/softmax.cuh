// From a tile's scores to its weights, as a warp holds them: of 16 rows by 128 keys a lane has rows lane / 4
// and that + 8, keys 8 i + 2 (lane % 4) and the next: s[4 i] and s[4 i + 1] of the first row, s[4 i + 2] and
// s[4 i + 3] of the second.
//
// exp2 is what the kernel spends its time on: 12 operations of the FMA pipes for every weight, beside 4 D of
// the tensor cores'. Where all of a warp's exponents are in range, as nearly always, its clamps are left out
// and 2^n is added to the exponent at once: the same bits. Its steps are written eight chains abreast, which
// is what ptxas needs to keep a warp busy: 491 cycles for 476 instructions, where a chain after another took
// twice as long.
#pragma once

#include <climits>

#include "cuda/attention/block.cuh"

namespace rlk::cuda::attention {

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
// Whose: the library's own where all of a warp's are in range, or anywhere; or the units'.
enum class Exponential { inside, anywhere, unit };

// Two rows of a thread: what they see, and their sums so far.
struct Rows {
  int first[2], last[2];  // keys seen
  int begin, end;         // tiles that all rows of the warp see the whole of
  float m[2], l[2];
  __device__ void restart() {
    m[0] = m[1] = -__builtin_inff();
    l[0] = l[1] = 0;
  }
};

// What a tile's exponents are counted from, and whether all of a warp's are in range.
struct Bases {
  float minus[2];
  bool inside;
};

// Of a thread's two rows: the greatest score of the row, and a number that none of this thread's is below:
// the least, or 0 where none is negative. Three numbers at once by integer maxima, where floats take two: as
// integers, those that are not negative are in the order of floats, and negative ones in the opposite order.
// NaN, which tensor cores give without a sign, comes out as the greatest.
// Unit: the number is not wanted.
template <bool Unit>
__device__ __forceinline__ void extremes(const float (&s)[64], float (&top)[2], float (&least)[2]) {
  // Chains abreast: as many as keep a warp busy.
  constexpr int kChains = Unit ? 4 : 1;
  int mosts[2][kChains], most[2];
  unsigned far[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int a = __float_as_int(s[4 * i + 2 * h]), b = __float_as_int(s[4 * i + 2 * h + 1]);
      int& chain = mosts[h][i % kChains];
      chain = i < kChains ? max(a, b) : __vimax3_s32(chain, a, b);
      if constexpr (!Unit) far[h] = __vimax3_u32(far[h], a, b);
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    most[h] = mosts[h][0];
    if constexpr (Unit) most[h] = max(__vimax3_s32(most[h], mosts[h][1], mosts[h][2]), mosts[h][3]);
  }
#pragma unroll
  for (int step = 1; step <= 2; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h) most[h] = max(most[h], __shfl_xor_sync(~0u, most[h], step));
  if (__any_sync(~0u, most[0] < 0 || most[1] < 0)) [[unlikely]] {  // a row of negative ones
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int small = INT_MAX;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        small = __vimin3_s32(small, __float_as_int(s[4 * i + 2 * h]), __float_as_int(s[4 * i + 2 * h + 1]));
      small = min(small, __shfl_xor_sync(~0u, small, 1));
      small = min(small, __shfl_xor_sync(~0u, small, 2));
      if (most[h] < 0) most[h] = small;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    top[h] = __int_as_float(most[h]), least[h] = __int_as_float(min(static_cast<int>(far[h]), 0));
}

// The greatest scores, NaN left out. It makes the row NaN whatever they are, so that only who leaves them in memory asks.
__device__ __forceinline__ void leave_out_nan(const float (&s)[64], float (&top)[2]) {
  top[0] = top[1] = -__builtin_inff();
#pragma unroll
  for (int e = 0; e < 64; ++e) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], s[e]);
#pragma unroll
  for (int step = 1; step <= 2; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], step));
}

// Masks scores of the tile from key `at` on; m moves on from `before`, or starts anew. True where it did for any row of the
// warp; else all sums so far would be multiplied by 1. Kept: m is wanted even where there is NaN.
template <bool Capped, bool Unit, bool Kept>
__device__ __forceinline__ bool look(const Problem& p, float (&s)[64], Rows& rows, int at, bool anew,
                                     float (&before)[2], Bases& bases) {
  if constexpr (Capped) {
    if (p.cap != 0) {
#pragma unroll
      for (float& x : s) x = attn128::capped(p, x);
    }
  }
  if (at < rows.begin * kTile || at >= rows.end * kTile) [[unlikely]] {
    const int j = at + static_cast<int>(threadIdx.x) % 4 * 2;
    const int first[2] = {rows.first[0] - j, rows.first[1] - j};
    const int last[2] = {rows.last[0] - j, rows.last[1] - j};
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int key = e / 4 * 8 + e % 2, h = e / 2 % 2;
      s[e] = key < first[h] || key >= last[h] ? -__builtin_inff() : s[e];
    }
  }
  bool inside = true, changed = false;
  float top[2], least[2];
  extremes<Unit>(s, top, least);
  float most[2] = {top[0], top[1]};
  if constexpr (Kept) {
    if (__any_sync(~0u, isnan(top[0]) || isnan(top[1]))) [[unlikely]]
      leave_out_nan(s, most);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    before[h] = rows.m[h];
    const float from = anew ? -__builtin_inff() : before[h];
    const float scaled = __fmul_rn(most[h], p.c), m = scaled > from ? scaled : from;
    const float base = attn128::base_of(m);
    bases.minus[h] = -base;
    if constexpr (!Unit)
      inside = inside && __fmaf_rn(least[h], p.c, -base) >= kLeastExponent &&
               __fmaf_rn(top[h], p.c, -base) <= kMostExponent;
    changed = changed || m != from;
    rows.m[h] = m;
  }
  if constexpr (!Unit) bases.inside = __all_sync(~0u, inside);
  return __any_sync(~0u, changed);
}
// What the sums so far are multiplied by.
__device__ __forceinline__ void factors(const float (&before)[2], const Bases& bases, float (&a)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) a[h] = simt::exp2(__fadd_rn(before[h], bases.minus[h]));
}

// Of row H, keys 16 G .. 16 G + 15 and those 64 further on: weights in place of scores. What this thread has
// of them is returned as a sum, bits 6, 3 and 0 of the index folded in this order.
template <int G, int H, Exponential By>
__device__ __forceinline__ float weigh_sixteen(float c, float (&s)[64], float minus_base) {
  constexpr int kAt[4] = {8 * G + 2 * H, 8 * G + 4 + 2 * H, 8 * G + 32 + 2 * H, 8 * G + 36 + 2 * H};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fmaf_rn(s[kAt[i / 2] + i % 2], c, minus_base);
  if constexpr (By == Exponential::inside) {
    exp2_inside(x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = By == Exponential::unit ? unit_exp2(x[i]) : simt::exp2(x[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) s[kAt[i / 2] + i % 2] = x[i];
  return __fadd_rn(__fadd_rn(__fadd_rn(x[0], x[4]), __fadd_rn(x[2], x[6])),
                   __fadd_rn(__fadd_rn(x[1], x[5]), __fadd_rn(x[3], x[7])));
}
template <Exponential By, int... G>
__device__ __forceinline__ void weigh_some(float c, float (&s)[64], const Bases& bases, float (&sums)[2][4]) {
  ((sums[0][G] = weigh_sixteen<G, 0, By>(c, s, bases.minus[0]),
    sums[1][G] = weigh_sixteen<G, 1, By>(c, s, bases.minus[1])),
   ...);
}
// The weights of keys 16 G .. for these G, of both rows.
template <bool Unit, int... G>
__device__ __forceinline__ void weigh(float c, float (&s)[64], const Bases& bases, float (&sums)[2][4]) {
  if constexpr (Unit)
    weigh_some<Exponential::unit, G...>(c, s, bases, sums);
  else if (bases.inside)
    weigh_some<Exponential::inside, G...>(c, s, bases, sums);
  else
    weigh_some<Exponential::anywhere, G...>(c, s, bases, sums);
}
// The sum of all of a row's weights, for each of its lanes: bits 1, 2, 4 and 5 of the index.
__device__ __forceinline__ void tree(const float (&sums)[2][4], float (&sum)[2]) {
  float v[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int g = 0; g < 4; ++g) v[h][g] = __fadd_rn(sums[h][g], __shfl_xor_sync(~0u, sums[h][g], 1));
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int g = 0; g < 4; ++g) v[h][g] = __fadd_rn(v[h][g], __shfl_xor_sync(~0u, v[h][g], 2));
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = __fadd_rn(__fadd_rn(v[h][0], v[h][1]), __fadd_rn(v[h][2], v[h][3]));
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
