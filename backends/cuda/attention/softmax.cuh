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

#include <cfloat>
#include <climits>
#include <type_traits>

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

// Which of a thread's two rows is its own: of the four lanes that have both, two each keep what is wanted once a row.
__device__ __forceinline__ bool owns_second() { return threadIdx.x & 2; }
template <class X>
__device__ __forceinline__ X own(const X (&x)[2]) {
  return owns_second() ? x[1] : x[0];
}
// Both rows' from their owners.
template <class X>
__device__ __forceinline__ void both_rows(std::type_identity_t<X> own, X (&to)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) to[h] = __shfl_sync(~0u, own, 2 * h, 4);
}

// Two rows of a thread: what they see, and their sums so far, l of its own one.
struct Rows {
  int first[2], last[2];  // keys seen
  int whole, wholes;      // tiles that all rows of the warp see the whole of: the first, and how many
  float m[2], l;
  __device__ bool partly(int tile) const {
    return static_cast<unsigned>(tile - whole) >= static_cast<unsigned>(wholes);
  }
  __device__ void restart() {
    m[0] = m[1] = -__builtin_inff();
    l = 0;
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
  constexpr int kChains = Unit ? 2 : 1;
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
    if constexpr (Unit) most[h] = max(most[h], mosts[h][1]);
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

// A tile's scores: capped, and -inf where a row does not see the key.
template <bool Capped>
__device__ __forceinline__ void mask(const Problem& p, float (&s)[64], const Rows& rows, int tile,
                                     bool partly) {
  if constexpr (Capped) {
    if (p.cap != 0) {
#pragma unroll
      for (float& x : s) x = attn128::capped(p, x);
    }
  }
  if (partly) [[unlikely]] {
    const int j = tile * kTile + static_cast<int>(threadIdx.x) % 4 * 2;
    const int first[2] = {rows.first[0] - j, rows.first[1] - j};
    const int last[2] = {rows.last[0] - j, rows.last[1] - j};
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int key = e / 4 * 8 + e % 2, h = e / 2 % 2;
      s[e] = key < first[h] || key >= last[h] ? -__builtin_inff() : s[e];
    }
  }
}

// m moves on from `before`, or starts anew. True where it did for any row of the warp; else all sums so far would be multiplied
// by 1. Kept: m is wanted even where there is NaN.
template <bool Unit, bool Kept>
__device__ __forceinline__ bool look(const Problem& p, const float (&s)[64], Rows& rows, bool anew,
                                     float (&before)[2], Bases& bases) {
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
    const float scaled = __fmul_rn(most[h], p.c);
    // A zero's sign is lost where m does not leave the kernel.
    const float m = Kept ? (scaled > from ? scaled : from) : fmaxf(scaled, from);
    // In place of 0 where m is -inf, from which any difference is -inf as well.
    const float base = fmaxf(m, -FLT_MAX);
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
// simt::exp2 of x up to 0, but for NaN, where the row is NaN anyway. 2^32 times the result is no subnormal number, so that 2^n
// is added to its exponent, and the one rounding is that of the product with 2^-32.
__device__ __forceinline__ float exp2_down(float x) {
  using C = simt::ExpConstants<float>;
  constexpr float kShift = C::kShift + 32;
  x = x < C::kLow2 ? C::kLow2 : x;
  const float shifted = __fadd_rn(x, kShift);
  const float r = __fmul_rn(__fsub_rn(x, __fsub_rn(shifted, kShift)), C::kLn2);
  const float p = __fadd_rn(__fmaf_rn(__fmul_rn(simt::exp_tail(r), r), r, r), 1.0f);
  return __fmul_rn(__uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23)), 0x1p-32f);
}
// What the sums so far of a thread's own row are multiplied by.
__device__ __forceinline__ float factor(const float (&before)[2], const Bases& bases) {
  return exp2_down(__fadd_rn(own(before), own(bases.minus)));
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
// The sum of all of the weights of a thread's own row: bits 1, 2, 4 and 5 of the index. Lanes share the work: of two that
// differ by 1 each has half of the four sums, of two that differ by 2 each has a row.
__device__ __forceinline__ float tree(const float (&sums)[2][4]) {
  const bool odd = threadIdx.x & 1;
  float v[2][2], w[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const float kept = odd ? sums[h][2 + g] : sums[h][g], sent = odd ? sums[h][g] : sums[h][2 + g];
      v[h][g] = __fadd_rn(kept, __shfl_xor_sync(~0u, sent, 1));
    }
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    const float kept = owns_second() ? v[1][g] : v[0][g], sent = owns_second() ? v[0][g] : v[1][g];
    w[g] = __fadd_rn(kept, __shfl_xor_sync(~0u, sent, 2));
  }
  const float half = __fadd_rn(w[0], w[1]);
  return __fadd_rn(half, __shfl_xor_sync(~0u, half, 1));
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
