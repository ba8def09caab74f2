// From a tile's scores to its weights, as a warp holds them: of 16 rows by 128 keys a lane has rows lane / 4
// and that + 8, keys 8 i + 2 (lane % 4) and the next: s[4 i] and s[4 i + 1] of the first row, s[4 i + 2] and
// s[4 i + 3] of the second. A lane's keys of a row are a class of the rule's, which sums them by themselves.
//
// What a warp computes beside the tensor cores' products is what the kernel's time goes to, so a tile has no more than its
// weights: scores are counted from a reference, which is held until one is far above it. That would show in the
// sums, and only then are the scores looked at.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/attention/block.cuh"
#include "cuda/attention/exponential.cuh"

namespace rlk::cuda::attention {

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

// What a thread's two rows see.
struct Rows {
  int first[2], last[2];  // keys
  int whole, wholes;      // tiles that all rows of the warp see the whole of: the first, and how many
  __device__ bool partly(int tile) const {
    return static_cast<unsigned>(tile - whole) >= static_cast<unsigned>(wholes);
  }
};

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
    if (tile >= rows.whole) {  // all rows see from before it on
#pragma unroll
      for (int e = 0; e < 64; ++e)
        if (e / 4 * 8 + e % 2 >= last[e / 2 % 2]) s[e] = -__builtin_inff();
      return;
    }
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int key = e / 4 * 8 + e % 2, h = e / 2 % 2;
      s[e] = key < first[h] || key >= last[h] ? -__builtin_inff() : s[e];
    }
  }
}

// The greatest scores of a thread's two rows, NaN left out: of its own keys, or of all four lanes'.
__device__ __forceinline__ void greatest_of_lane(const float (&s)[64], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float chains[4];
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const float x = s[e / 2 * 4 + e % 2 + 2 * h];
      chains[e % 4] = e < 4 ? x : fmaxf(chains[e % 4], x);
    }
    top[h] = fmaxf(fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3])), -__builtin_inff());
  }
}
__device__ __forceinline__ void greatest(const float (&s)[64], float (&top)[2]) {
  greatest_of_lane(s, top);
#pragma unroll
  for (int step = 1; step <= 2; ++step)
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], step));
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

// Of a split, a thread's two rows: m, what scores are counted from, with its sign turned, and l of the lane's class.
struct Sums {
  float m[2], minus[2], l[2];

  // The split's first tile; a row may see nothing of it.
  __device__ __forceinline__ void start(const float (&top)[2], float c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = __fmul_rn(top[h], c), l[h] = 0, count_from_m(h);
  }
  // m moves where it is none yet, or a score is far above it; `by`: what O is multiplied by.
  __device__ __forceinline__ void move(const float (&top)[2], float c, float (&by)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = m[h];
      if (before == -__builtin_inff() || above(top[h], c, h)) m[h] = fmaxf(before, __fmul_rn(top[h], c));
      count_from_m(h);
      by[h] = m[h] == before ? 1 : exp2_down(__fadd_rn(before, minus[h]));
      l[h] = __fmul_rn(l[h], by[h]);
    }
  }
  __device__ __forceinline__ bool above(float score, float c, int h) const {
    return __fmaf_rn(score, c, minus[h]) > attn128::kHeld;
  }
  // For all lanes of a warp: whether a row of it has no m yet.
  __device__ __forceinline__ bool lack() const {
    return __any_sync(~0u, m[0] == -__builtin_inff() || m[1] == -__builtin_inff());
  }
  // l of the thread's own row: bits 1 and 2 of the index.
  __device__ __forceinline__ float folded() const {
    float all[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      all[h] = __fadd_rn(l[h], __shfl_xor_sync(~0u, l[h], 1));
      all[h] = __fadd_rn(all[h], __shfl_xor_sync(~0u, all[h], 2));
    }
    return own(all);
  }

 private:
  // In place of 0 where m is -inf, from which any difference is -inf as well.
  __device__ __forceinline__ void count_from_m(int h) { minus[h] = -fmaxf(m[h], -FLT_MAX); }
};

// The weights of step K's 16 keys, two rows; `sum`: of a lane's, bits 3 and 0 of the index.
template <int K>
__device__ __forceinline__ void weigh(const float (&s)[64], float c, const float (&minus)[2], float (&p)[8],
                                      float (&sum)[2]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) p[e] = unit_exp2(__fmaf_rn(s[8 * K + e], c, minus[e / 2 % 2]));
#pragma unroll
  for (int h = 0; h < 2; ++h)
    sum[h] = __fadd_rn(__fadd_rn(p[2 * h], p[2 * h + 4]), __fadd_rn(p[2 * h + 1], p[2 * h + 5]));
}

// A step's as the tensor core's operand A, four registers. They may be those of products that were waited for just before, so that
// nothing may move ahead of it.
template <class T>
__device__ __forceinline__ void pack(const float (&p)[8], std::uint32_t (&w)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __half>)
      asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(p[2 * i + 1]), "f"(p[2 * i]));
    else
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[i]) : "f"(p[2 * i + 1]), "f"(p[2 * i]));
  }
}

}  // namespace rlk::cuda::attention
