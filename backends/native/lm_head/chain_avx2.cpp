// The chain product on AVX2 + FMA: 6 x 16 register tiles in fp32, 6 x 8 in fp64. Up to four rows skip packing: 16 columns by 8
// of the depth are transposed in registers and used at once.
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

template <Float type>
RLK_INLINE void load_tile(const char* const* rows, std::int64_t k, __m256 (&tile)[8]) {
#  pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) tile[i] = upcast_8<type>(rows[i], k);
  transpose_8x8(tile);
}

// Transposes up to 8 of the depth into dst and says how many.
template <class Lanes, Float type>
RLK_ISA std::int64_t pack_typed_tile(const char* const* rows, std::int64_t k, std::int64_t count,
                                     typename Lanes::Scalar* dst, std::int64_t dst_stride) {
  if (count < 8) {
    for (std::int64_t i = 0; i < count; ++i)
      for (int j = 0; j < 8; ++j) dst[i * dst_stride + j] = load_element(rows[j], type, k + i);
    return count;
  }
  __m256 tile[8];
  load_tile<type>(rows, k, tile);
#  pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) Lanes::put(tile[i], dst + i * dst_stride);
  return 8;
}
template <class Lanes>
RLK_INLINE std::int64_t pack_tile_of(const char* const* rows, Float type, std::int64_t k, std::int64_t count,
                                     typename Lanes::Scalar* dst, std::int64_t dst_stride) {
  switch (type) {
    case Float::f32:
      return pack_typed_tile<Lanes, Float::f32>(rows, k, count, dst, dst_stride);
    case Float::bf16:
      return pack_typed_tile<Lanes, Float::bf16>(rows, k, count, dst, dst_stride);
    default:
      return pack_typed_tile<Lanes, Float::f16>(rows, k, count, dst, dst_stride);
  }
}

struct F32Lanes : Lanes8 {
  static constexpr int kRows = 6;
  static constexpr int kDirectRows = 4;
  static constexpr int kDirectColumns = 16;

  RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

  RLK_ISA static void upcast_run(const void* src, Float type, std::int64_t count, float* dst) {
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(dst + i, upcast_8(src, type, i));
    for (; i < count; ++i) dst[i] = load_element(src, type, i);
  }

  RLK_INLINE void put(__m256 x, float* dst) { _mm256_storeu_ps(dst, x); }
  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Float type, std::int64_t k,
                                        std::int64_t count, float* dst, std::int64_t dst_stride) {
    return pack_tile_of<F32Lanes>(rows, type, k, count, dst, dst_stride);
  }

  template <int Rows, Float type>
  RLK_ISA static void direct_rows(const char* const* columns, std::int64_t depth, const float* a, float* sums,
                                  const Piece& piece);
  RLK_ISA static void direct(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                             std::int64_t cols, float* upcast, float* sums) {
    run_direct<F32Lanes>(p, row, rows, col, cols, upcast, sums);
  }
};

// ---- few rows

// Eight columns of 16 bits, and eight more in the upper halves, by eight of the depth: those of each depth side by side.
RLK_INLINE void load_halves(const char* const* columns, std::int64_t k, __m256i (&x)[8]) {
  const auto at = [&](int i) RLK_ISA { return reinterpret_cast<const __m128i*>(columns[i] + 2 * k); };
  __m256i t[8];
#  pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(at(i))), _mm_loadu_si128(at(i + 8)),
                                   1);
#  pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
    t[i + 4] = _mm256_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
  }
#  pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_unpacklo_epi32(t[i], t[i + 1]);
    x[i + 1] = _mm256_unpackhi_epi32(t[i], t[i + 1]);
    x[i + 2] = _mm256_unpacklo_epi32(t[i + 2], t[i + 3]);
    x[i + 3] = _mm256_unpackhi_epi32(t[i + 2], t[i + 3]);
  }
#  pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#  pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      t[i + 2 * j] = _mm256_unpacklo_epi64(x[i + j], x[i + j + 2]);
      t[i + 2 * j + 1] = _mm256_unpackhi_epi64(x[i + j], x[i + j + 2]);
    }
#  pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = t[i];
}

// bf16 widens within halves: columns 0 to 3 and 8 to 11, and the others. So do sums lie meanwhile.
RLK_INLINE void change_quarters(__m256 (&x)[2]) {
  const __m256 low = _mm256_permute2f128_ps(x[0], x[1], 0x20);
  x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31), x[0] = low;
}

template <int Rows>
RLK_INLINE void add_column(__m256 (&sum)[Rows][2], int half, __m256 column, const float* a) {
#  pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
    sum[r][half] =
        _mm256_fmadd_ps(_mm256_broadcast_ss(a + r * Blocking<F32Lanes>::kDepthBlock), column, sum[r][half]);
}
template <int Rows, Float type>
RLK_INLINE void add_tile(__m256 (&sum)[Rows][2], const char* const* columns, std::int64_t k, const float* a) {
  if constexpr (type == Float::f32) {
#  pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256 tile[8];
      load_tile<type>(columns + 8 * half, k, tile);
#  pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) add_column<Rows>(sum, half, tile[i], a + i);
    }
  } else {
    __m256i tile[8];
    load_halves(columns, k, tile);
#  pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      __m256 wide[2];
      if constexpr (type == Float::f16) {
        wide[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(tile[i]));
        wide[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(tile[i], 1));
      } else {
        wide[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), tile[i]));
        wide[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), tile[i]));
      }
      add_column<Rows>(sum, 0, wide[0], a + i);
      add_column<Rows>(sum, 1, wide[1], a + i);
    }
  }
}

// 16 columns over one piece.
template <int Rows, Float type>
RLK_ISA void F32Lanes::direct_rows(const char* const* columns, std::int64_t depth, const float* a,
                                   float* sums, const Piece& piece) {
  using B = Blocking<F32Lanes>;
  __m256 sum[Rows][2];
#  pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#  pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      sum[r][half] = piece.resumes ? _mm256_loadu_ps(sums + kChain * B::kSums + r * B::kColBlock + 8 * half)
                                   : _mm256_setzero_ps();
  const auto change = [&]() RLK_ISA {
    if constexpr (type == Float::bf16)
#  pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) change_quarters(sum[r]);
  };
  std::int64_t k = 0;
  change();
  for (; k + 8 <= depth; k += 8) add_tile<Rows, type>(sum, columns, k, a + k);
  change();
  for (; k < depth; ++k) {
    alignas(32) float column[16];
    for (int c = 0; c < 16; ++c) column[c] = load_element(columns[c], type, k);
    for (int half = 0; half < 2; ++half)
      add_column<Rows>(sum, half, _mm256_load_ps(column + 8 * half), a + k);
  }
#  pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#  pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* at = sums + r * B::kColBlock + 8 * half;
      _mm256_storeu_ps(at + piece.to * B::kSums, joined<F32Lanes>(sum[r][half], at, piece.meets));
    }
}
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

  RLK_INLINE void put(__m256 x, double* dst) { widen(x, dst); }
  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Float type, std::int64_t k,
                                        std::int64_t count, double* dst, std::int64_t dst_stride) {
    return pack_tile_of<F64Lanes>(rows, type, k, count, dst, dst_stride);
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
