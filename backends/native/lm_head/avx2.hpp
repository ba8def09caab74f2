// AVX2 pieces that the chain products share. Included by one file per kernel; everything carries its own target attribute.
#pragma once

#include <immintrin.h>

#include "native/lm_head/chain.hpp"
#include "native/lm_head/float.hpp"

#define RLK_ISA __attribute__((target("avx2,fma,f16c")))
#define RLK_INLINE RLK_ISA __attribute__((always_inline)) static inline

namespace rlk::native {
namespace {

// Eight neighbours, upcast.
template <Float type>
RLK_INLINE __m256 upcast_8(const void* src, std::int64_t index) {
  if constexpr (type == Float::f32) return _mm256_loadu_ps(static_cast<const float*>(src) + index);
  const __m128i half =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(src) + index));
  if constexpr (type == Float::f16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
RLK_INLINE __m256 upcast_8(const void* src, Float type, std::int64_t index) {
  if (type == Float::f32) return upcast_8<Float::f32>(src, index);
  if (type == Float::f16) return upcast_8<Float::f16>(src, index);
  return upcast_8<Float::bf16>(src, index);
}

RLK_INLINE __m256i nan_lanes(__m256 x) { return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
RLK_INLINE __m128i low_halves(__m256i x) {  // of lanes that are below 2^16
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
RLK_INLINE __m128i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  return low_halves(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(kCanonicalNan16), nan_lanes(x)));
}
RLK_INLINE __m128i round_f16(__m256 x) {
  const __m128i nan = low_halves(_mm256_srli_epi32(nan_lanes(x), 16));
  return _mm_blendv_epi8(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                         _mm_set1_epi16(kCanonicalNan16), nan);
}
template <Float type>
RLK_INLINE __m256 round_as_8(__m256 x) {
  if constexpr (type == Float::f32) return x;
  if constexpr (type == Float::f16) return _mm256_cvtph_ps(round_f16(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(round_bf16(x)), 16));
}
template <Float type>
RLK_INLINE void store_8(void* out, std::int64_t index, __m256 x) {
  if constexpr (type == Float::f32) {
    const __m256 canon = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kCanonicalNan32)));
    _mm256_storeu_ps(static_cast<float*>(out) + index,
                     _mm256_blendv_ps(x, canon, _mm256_castsi256_ps(nan_lanes(x))));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(out) + index),
                     type == Float::f16 ? round_f16(x) : round_bf16(x));
  }
}

// The end of a row of fp32 sums, whole eights of it, unit strides: round, add the bias, round again, and the residual likewise.
template <Float type>
RLK_ISA inline std::int64_t store_sums(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                                       const float* sums, const void* residual) {
  std::int64_t j = 0;
  for (; j + 8 <= cols; j += 8) {
    __m256 x = _mm256_loadu_ps(sums + j);
    if (p.bias != nullptr) x = _mm256_add_ps(round_as_8<type>(x), upcast_8(p.bias, p.bias_type, col + j));
    if (residual != nullptr) x = _mm256_add_ps(round_as_8<type>(x), upcast_8(residual, p.residual_type, j));
    store_8<type>(out, j, x);
  }
  return j;
}

// Eight sums at once in a chain product (chain_kernels.hpp).
struct Lanes8 {
  using Scalar = float;
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kVecs = 2;
  static constexpr int kTile = 8;
  static constexpr int kDirectRows = 0;
  static constexpr int kLaneRows = 0;

  RLK_INLINE Vec zero() { return _mm256_setzero_ps(); }
  RLK_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  RLK_INLINE Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  RLK_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  RLK_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }

  RLK_ISA static std::int64_t store_row(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                                        const float* sums, const void* residual) {
    if (p.out_col_stride != 1 || (p.bias != nullptr && p.bias_stride != 1)) return 0;
    if (p.out_type == Float::f32) return store_sums<Float::f32>(p, out, col, cols, sums, residual);
    if (p.out_type == Float::f16) return store_sums<Float::f16>(p, out, col, cols, sums, residual);
    return store_sums<Float::bf16>(p, out, col, cols, sums, residual);
  }
};

}  // namespace
}  // namespace rlk::native
