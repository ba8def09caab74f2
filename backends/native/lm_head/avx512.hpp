// AVX-512 pieces that the chain product and the replay share: 16 x 16 tiles of a row-major matrix with lanes
// over its rows, exact upcasts, and rounding to the 16-bit types. Included by one file per kernel; everything
// carries its own target attribute, so no compiler flag is needed and nothing leaks into other files.
#pragma once

#include <immintrin.h>

#include "native/lm_head/chain.hpp"
#include "native/lm_head/float.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own _mm512_undefined_*
#  pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#ifndef RLK_ISA
#  define RLK_ISA __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#endif
#define RLK_INLINE RLK_ISA __attribute__((always_inline)) static inline

namespace rlk::native {
namespace {

RLK_INLINE void transpose_16x16(__m512 (&r)[16]) {
  __m512 t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

RLK_INLINE __mmask16 first_lanes(std::int64_t count) {
  return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << count) - 1);
}

// `count` >= 1 contiguous elements, 16 at most, upcast; the rest are zero.
template <Float type>
RLK_INLINE __m512 upcast_16(const void* src, std::int64_t index, __mmask16 mask) {
  if constexpr (type == Float::f32)
    return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(src) + index);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(src) + index);
  if constexpr (type == Float::f16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

RLK_INLINE __m512 upcast_16(const void* src, Float type, std::int64_t index, std::int64_t count) {
  const __mmask16 mask = first_lanes(count);
  if (type == Float::f32) return upcast_16<Float::f32>(src, index, mask);
  if (type == Float::f16) return upcast_16<Float::f16>(src, index, mask);
  return upcast_16<Float::bf16>(src, index, mask);
}

RLK_INLINE __m512 pair_low(__m512 pair) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pair), 16));
}
RLK_INLINE __m512 pair_high(__m512 pair) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(pair), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// A tile of the weight with lanes over its 16 rows. fp32 and fp16: tile[i] holds depth k+i. bf16: tile[i]
// holds depths k+2i and k+2i+1 as the halves of each lane, which halves the shuffles per element.
template <Float type>
struct Tile {
  static constexpr int kPerVector = type == Float::bf16 ? 2 : 1;
  static constexpr int kDepth = 16 * kPerVector;
};

// Row addresses are fetched from memory each time (the barrier): kept in registers they would push out the
// tile.
template <Float type, bool Full>
RLK_INLINE void load_tile(const char* const* rows, std::int64_t k, std::int64_t count, __m512 (&tile)[16]) {
  asm volatile("" ::: "memory");
  if constexpr (type == Float::bf16) {
    const __mmask32 mask = Full || count >= 32 ? 0xffffffffu : (1u << count) - 1;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const auto* from = reinterpret_cast<const std::uint16_t*>(rows[i]) + k;
      tile[i] = _mm512_castsi512_ps(Full ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(mask, from));
    }
  } else {
    const __mmask16 mask = Full ? __mmask16{0xffff} : first_lanes(count);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) tile[i] = upcast_16<type>(rows[i], k, mask);
  }
  transpose_16x16(tile);
}

template <Float type>
RLK_INLINE __m512 tile_depth(const __m512 (&tile)[16], int i) {
  if constexpr (type == Float::bf16) return (i & 1) != 0 ? pair_high(tile[i / 2]) : pair_low(tile[i / 2]);
  return tile[i];
}

// Rounded to bf16, in the low halves.
RLK_INLINE __m512i rounded_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(kCanonicalNan16));
}
RLK_INLINE __m256i round_bf16(__m512 x) { return _mm512_cvtepi32_epi16(rounded_bf16(x)); }
// Two vectors at once, for less than twice one.
RLK_INLINE __m512i round_bf16(__m512 low, __m512 high) {
  const __m512i quarters = _mm512_packus_epi32(rounded_bf16(low), rounded_bf16(high));
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), quarters);
}

RLK_INLINE __m256i round_f16(__m512 x) {
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm256_mask_mov_epi16(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), nan,
                               _mm256_set1_epi16(kCanonicalNan16));
}

// `type` of the 16-bit types or of fp32.
template <Float type>
RLK_INLINE __m512 round_as_16(__m512 x) {
  if constexpr (type == Float::f32) return x;
  if constexpr (type == Float::f16) return _mm512_cvtph_ps(round_f16(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(x)), 16));
}

template <Float type>
RLK_INLINE void store_16(void* out, std::int64_t index, __mmask16 mask, __m512 x) {
  if constexpr (type == Float::f32) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512 canon = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kCanonicalNan32)));
    _mm512_mask_storeu_ps(static_cast<float*>(out) + index, mask, _mm512_mask_mov_ps(x, nan, canon));
  } else {
    _mm256_mask_storeu_epi16(static_cast<std::uint16_t*>(out) + index, mask,
                             type == Float::f16 ? round_f16(x) : round_bf16(x));
  }
}

// The end of a row of fp32 sums: round, add the bias, round again, and the residual from `col` on likewise; 16
// lanes, unit strides. The sums go on to a multiple of 16.
template <Float type>
RLK_ISA inline void store_sums(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                               const float* sums, const void* residual) {
  if (p.bias == nullptr && residual == nullptr) {
    std::int64_t j = 0;
    if constexpr (type == Float::bf16)
      for (; j + 32 <= cols; j += 32)
        _mm512_storeu_si512(static_cast<std::uint16_t*>(out) + j,
                            round_bf16(_mm512_loadu_ps(sums + j), _mm512_loadu_ps(sums + j + 16)));
    for (; j + 16 <= cols; j += 16) store_16<type>(out, j, __mmask16{0xffff}, _mm512_loadu_ps(sums + j));
    if (j < cols) store_16<type>(out, j, first_lanes(cols - j), _mm512_loadu_ps(sums + j));
    return;
  }
  for (std::int64_t j = 0; j < cols; j += 16) {
    __m512 x = _mm512_loadu_ps(sums + j);
    if (p.bias != nullptr)
      x = _mm512_add_ps(round_as_16<type>(x), upcast_16(p.bias, p.bias_type, col + j, cols - j));
    if (residual != nullptr)
      x = _mm512_add_ps(round_as_16<type>(x), upcast_16(residual, p.residual_type, j, cols - j));
    store_16<type>(out, j, first_lanes(cols - j), x);
  }
}
RLK_ISA inline void store_sums(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                               const float* sums, const void* residual = nullptr) {
  if (p.out_type == Float::f32) return store_sums<Float::f32>(p, out, col, cols, sums, residual);
  if (p.out_type == Float::f16) return store_sums<Float::f16>(p, out, col, cols, sums, residual);
  store_sums<Float::bf16>(p, out, col, cols, sums, residual);
}

// Sixteen sums at once in a chain product (chain_kernels.hpp), 12 x 32 of them in registers.
struct Lanes16 {
  using Scalar = float;
  using Vec = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kVecs = 2;
  static constexpr int kRows = 12;
  static constexpr int kTile = 16;
  static constexpr int kDirectRows = 4;

  RLK_INLINE Vec zero() { return _mm512_setzero_ps(); }
  RLK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  RLK_INLINE Vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
  RLK_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  RLK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }

  // The bias is rare and sits next to 16 finished sums, so one masked vector path serves every case with unit
  // strides.
  RLK_ISA static std::int64_t store_row(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                                        const float* sums, const void* residual) {
    if (p.out_col_stride != 1 || (p.bias != nullptr && p.bias_stride != 1)) return 0;
    store_sums(p, out, col, cols, sums, residual);
    return cols;
  }
};

}  // namespace
}  // namespace rlk::native
