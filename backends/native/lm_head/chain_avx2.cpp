// The chain product on AVX2 + FMA: 6 x 16 register tiles in fp32, 6 x 8 in fp64.
#include "native/lm_head/chain.hpp"

#if defined(__x86_64__)
#  include "native/lm_head/avx2.hpp"
#  include "native/lm_head/chain_kernels.hpp"

namespace rlk::native {
namespace {

RLK_INLINE void transpose_8x8(__m256 (&r)[8]) {
  __m256 t[8];
#  pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#  pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#  pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
#  pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

RLK_INLINE __m256 upcast_8(const void* src, Float type, std::int64_t index) {
  if (type == Float::f32) return _mm256_loadu_ps(static_cast<const float*>(src) + index);
  const __m128i half =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(src) + index));
  if (type == Float::f16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

RLK_INLINE void load_tile(const char* const* rows, Float type, std::int64_t k, __m256 (&tile)[8]) {
#  pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    tile[i] = upcast_8(rows[i], type, k);
  }
  transpose_8x8(tile);
}

struct F32Lanes : Lanes8 {
  static constexpr int kRows = 6;

  RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

  RLK_ISA static void upcast_run(const void* src, Float type, std::int64_t count, float* dst) {
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(dst + i, upcast_8(src, type, i));
    for (; i < count; ++i) dst[i] = load_element(src, type, i);
  }

  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Float type, std::int64_t k,
                                        std::int64_t count, float* dst, std::int64_t dst_stride) {
    if (count < 8) {
      for (std::int64_t i = 0; i < count; ++i)
        for (int j = 0; j < 8; ++j) dst[i * dst_stride + j] = load_element(rows[j], type, k + i);
      return count;
    }
    __m256 tile[8];
    load_tile(rows, type, k, tile);
#  pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(dst + i * dst_stride, tile[i]);
    return 8;
  }

  // fp32 without a bias is the common case; the rest is scalar and costs one output in K fused multiply-adds.
  RLK_ISA static std::int64_t store_row(const ChainProduct& p, void* out, std::int64_t, std::int64_t cols,
                                        const float* sums, const void* residual) {
    if (p.out_col_stride != 1 || p.bias != nullptr || residual != nullptr || p.out_type != Float::f32)
      return 0;
    const __m256 canon = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kCanonicalNan32)));
    std::int64_t j = 0;
    for (; j + 8 <= cols; j += 8) {
      const __m256 x = _mm256_loadu_ps(sums + j);
      _mm256_storeu_ps(static_cast<float*>(out) + j,
                       _mm256_blendv_ps(x, canon, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    }
    return j;
  }
};

struct F64Lanes {
  using Scalar = double;
  using Vec = __m256d;
  static constexpr int kLanes = 4;
  static constexpr int kVecs = 2;
  static constexpr int kRows = 6;
  static constexpr int kTile = 8;
  static constexpr int kDirectRows = 0;
  static constexpr int kLaneRows = 0;

  RLK_INLINE Vec zero() { return _mm256_setzero_pd(); }
  RLK_INLINE Vec load(const double* p) { return _mm256_loadu_pd(p); }
  RLK_INLINE Vec broadcast(const double* p) { return _mm256_broadcast_sd(p); }
  RLK_INLINE void store(double* p, Vec v) { _mm256_storeu_pd(p, v); }
  RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  RLK_INLINE Vec add(Vec a, Vec b) { return _mm256_add_pd(a, b); }

  RLK_INLINE void widen(__m256 x, double* dst) {
    _mm256_storeu_pd(dst, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    _mm256_storeu_pd(dst + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }

  RLK_ISA static void upcast_run(const void* src, Float type, std::int64_t count, double* dst) {
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) widen(upcast_8(src, type, i), dst + i);
    for (; i < count; ++i) dst[i] = load_element(src, type, i);
  }

  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Float type, std::int64_t k,
                                        std::int64_t count, double* dst, std::int64_t dst_stride) {
    if (count < 8) {
      for (std::int64_t i = 0; i < count; ++i)
        for (int j = 0; j < 8; ++j) dst[i * dst_stride + j] = load_element(rows[j], type, k + i);
      return count;
    }
    __m256 tile[8];
    load_tile(rows, type, k, tile);
#  pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) widen(tile[i], dst + i * dst_stride);
    return 8;
  }

  static std::int64_t store_row(const ChainProduct&, void*, std::int64_t, std::int64_t, const double*,
                                const void*) {
    return 0;
  }
};

}  // namespace

const ChainKernels* chain_kernels_avx2() {
  static constexpr ChainKernels kernels = kernels_of<F32Lanes, F64Lanes>("avx2", 16);
  return &kernels;
}

}  // namespace rlk::native

#else

namespace rlk::native {
const ChainKernels* chain_kernels_avx2() { return nullptr; }
}  // namespace rlk::native

#endif
