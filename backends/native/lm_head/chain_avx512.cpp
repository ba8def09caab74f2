// The chain product on AVX-512: 12 x 32 register tiles in fp32, 12 x 16 in fp64. Up to four rows skip
// packing: 16 x 16 tiles of the weight are transposed in registers and used at once, so that one token costs
// one read of the weight and nothing else (memory bound: 4 elements per cycle against about 3 that memory
// delivers).
#include <algorithm>

#include "native/lm_head/chain.hpp"

#if defined(__x86_64__)
#  include "native/lm_head/avx512.hpp"
#  include "native/lm_head/chain_kernels.hpp"

namespace rlk::native {
namespace {

// Transposes up to one tile's depth into dst and says how much it was.
template <class Lanes, Float type>
RLK_ISA std::int64_t pack_typed_tile(const char* const* rows, std::int64_t k, std::int64_t count,
                                     typename Lanes::Scalar* dst, std::int64_t dst_stride) {
  __m512 tile[16];
  if (count >= Tile<type>::kDepth) {
    load_tile<type, true>(rows, k, count, tile);
#  pragma GCC unroll 32
    for (int i = 0; i < Tile<type>::kDepth; ++i) Lanes::template put<type>(tile, i, dst, dst_stride);
    return Tile<type>::kDepth;
  }
  load_tile<type, false>(rows, k, count, tile);
  for (int i = 0; i < static_cast<int>(count); ++i) Lanes::template put<type>(tile, i, dst, dst_stride);
  return count;
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

struct F32Lanes : Lanes16 {
  static constexpr int kLaneRows = 64;
  static constexpr int kDirectColumns = 16;

  RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

  RLK_ISA static void upcast_run(const void* src, Float type, std::int64_t count, float* dst) {
    for (std::int64_t i = 0; i < count; i += 16)
      _mm512_mask_storeu_ps(dst + i, first_lanes(count - i), upcast_16(src, type, i, count - i));
  }

  template <Float type>
  RLK_INLINE void put(const __m512 (&tile)[16], int i, float* dst, std::int64_t dst_stride) {
    _mm512_storeu_ps(dst + i * dst_stride, tile_depth<type>(tile, i));
  }
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
  RLK_ISA static void rows_in_lanes(const ChainProduct& p, std::int64_t row, std::int64_t rows,
                                    std::int64_t col, std::int64_t cols, float* packed_a, float* sums);
};

template <int Rows, Float type, bool Full>
RLK_INLINE void accumulate_tile(__m512 (&sum)[Rows], const char* const* columns, std::int64_t k,
                                std::int64_t count, const float* a) {
  __m512 tile[16];
  load_tile<type, Full>(columns, k, count, tile);
  const int depth = Full ? Tile<type>::kDepth : static_cast<int>(count);
#  pragma GCC unroll 32
  for (int i = 0; i < depth; ++i) {
    const __m512 column = tile_depth<type>(tile, i);
#  pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
      sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * Blocking<F32Lanes>::kDepthBlock + i]), column, sum[r]);
  }
}

// 16 columns over one piece: as many streams as the hardware gets ahead of.
template <int Rows, Float type>
RLK_ISA void F32Lanes::direct_rows(const char* const* columns, std::int64_t depth, const float* a,
                                   float* sums, const Piece& piece) {
  using B = Blocking<F32Lanes>;
  __m512 sum[Rows];
#  pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
    sum[i] =
        piece.resumes ? _mm512_loadu_ps(sums + kChain * B::kSums + i * B::kColBlock) : _mm512_setzero_ps();
  std::int64_t k = 0;
  for (; k + Tile<type>::kDepth <= depth; k += Tile<type>::kDepth)
    accumulate_tile<Rows, type, true>(sum, columns, k, 0, a + k);
  if (k < depth) accumulate_tile<Rows, type, false>(sum, columns, k, depth - k, a + k);
#  pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
    _mm512_storeu_ps(sums + piece.to * B::kSums + i * B::kColBlock,
                     joined<F32Lanes>(sum[i], sums + i * B::kColBlock, piece.meets));
}

// ---- 13 to 64 rows of an fp32 weight: rows in the lanes, elements of b broadcast

// Nothing is transposed but a, and b goes from memory through a small buffer (its rows are powers of two apart
// and would share a set of the cache) into the products.

// sums[c][Vecs * 16] over one depth block for Cols columns; `ahead` are the columns that come next.
template <int Vecs, int Cols>
RLK_ISA void lane_tile(const float* const* columns, const float* const* ahead, std::int64_t depth,
                       const float* a, float* totals, bool more) {
  __m512 sum[Cols][Vecs];
#  pragma GCC unroll 24
  for (int c = 0; c < Cols; ++c)
#  pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) sum[c][v] = _mm512_setzero_ps();
  alignas(64) float buffer[2][Cols * 16];
  const auto fill = [&](float* to, int c, std::int64_t k) RLK_ISA {
    _mm512_store_ps(to + c * 16, _mm512_maskz_loadu_ps(first_lanes(depth - k), columns[c] + k));
    __builtin_prefetch(ahead[c] + k, 0, 2);
  };
  const auto step = [&](const float* b, int i) RLK_ISA {
    __m512 rows[Vecs];
#  pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) rows[v] = _mm512_loadu_ps(a + v * 16);
#  pragma GCC unroll 24
    for (int c = 0; c < Cols; ++c) {
      const __m512 value = _mm512_set1_ps(b[c * 16 + i]);
#  pragma GCC unroll 4
      for (int v = 0; v < Vecs; ++v) sum[c][v] = _mm512_fmadd_ps(rows[v], value, sum[c][v]);
    }
    a += Vecs * 16;
  };
  for (int c = 0; c < Cols; ++c) fill(buffer[0], c, 0);
  for (std::int64_t k = 0; k < depth; k += 16) {
    const float* b = buffer[k / 16 % 2];
    float* next = buffer[(k / 16 + 1) % 2];
    if (k + 16 < depth) {
      // One column's next 16 elements per step: all at once they would stall the products.
#  pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
#  pragma GCC unroll 2
        for (int c = i; c < Cols; c += 16) fill(next, c, k + 16);
        step(b, i);
      }
    } else {
      for (int i = 0; i < static_cast<int>(depth - k); ++i) step(b, i);
    }
  }
#  pragma GCC unroll 24
  for (int c = 0; c < Cols; ++c)
#  pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) {
      float* to = totals + (c * Vecs + v) * 16;
      _mm512_storeu_ps(to, more ? _mm512_add_ps(_mm512_loadu_ps(to), sum[c][v]) : sum[c][v]);
    }
}

template <int Vecs>
RLK_ISA void lane_block(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                        std::int64_t cols, float* packed_a, float* totals) {
  constexpr int kCols = 24 / Vecs;
  using B = Blocking<F32Lanes>;
  for (std::int64_t k0 = 0; k0 < p.depth; k0 += B::kDepthBlock) {
    const std::int64_t depth = p.depth - k0 < B::kDepthBlock ? p.depth - k0 : B::kDepthBlock;
    const char* lines[Vecs * 16];
    for (int i = 0; i < Vecs * 16; ++i) lines[i] = element_address(p.a, row + (i < rows ? i : rows - 1), k0);
    for (std::int64_t k = 0; k < depth;) {
      std::int64_t packed = 0;
      for (int v = 0; v < Vecs; ++v)
        packed = F32Lanes::pack_tile(lines + v * 16, p.a.type, k, depth - k, packed_a + (k * Vecs + v) * 16,
                                     Vecs * 16);
      k += packed;
    }
    // Columns past the end repeat the last one: computed, and dropped.
    const auto column = [&](std::int64_t k, std::int64_t j) RLK_ISA {
      return reinterpret_cast<const float*>(element_address(p.b, k, std::min(j, p.cols - 1)));
    };
    const float* columns[2 * kCols];
    for (std::int64_t j = 0; j < cols; j += kCols) {
      // After the last columns of a depth block come the first of the next one.
      const bool last = j + kCols >= cols;
      const bool deeper = last && k0 + B::kDepthBlock < p.depth;
      for (int c = 0; c < kCols; ++c) {
        columns[c] = column(k0, std::min(col + j + c, col + cols - 1));
        columns[kCols + c] =
            deeper ? column(k0 + B::kDepthBlock, col + c) : column(last ? 0 : k0, col + j + kCols + c);
      }
      lane_tile<Vecs, kCols>(columns, columns + kCols, depth, packed_a, totals + j * Vecs * 16, k0 != 0);
    }
  }
}

RLK_ISA void F32Lanes::rows_in_lanes(const ChainProduct& p, std::int64_t row, std::int64_t rows,
                                     std::int64_t col, std::int64_t cols, float* packed_a, float* sums) {
  using B = Blocking<F32Lanes>;
  const std::int64_t vecs = (rows + 15) / 16;
  const std::int64_t pitch = vecs * 16;
  float* totals = sums + kLaneRows * B::kColBlock;  // [column][row]
  static_assert((2 * B::kColBlock + 24) * kLaneRows <= B::kSums);
  switch (vecs) {
    case 1:
      lane_block<1>(p, row, rows, col, cols, packed_a, totals);
      break;
    case 2:
      lane_block<2>(p, row, rows, col, cols, packed_a, totals);
      break;
    case 3:
      lane_block<3>(p, row, rows, col, cols, packed_a, totals);
      break;
    default:
      lane_block<4>(p, row, rows, col, cols, packed_a, totals);
  }
  if (p.depth == 0) std::fill_n(totals, cols * pitch, 0.0f);
  for (std::int64_t j = 0; j < cols; j += 16) {
    const char* lines[16];
    for (int c = 0; c < 16; ++c)
      lines[c] = reinterpret_cast<const char*>(totals + std::min(j + c, cols - 1) * pitch);
    for (std::int64_t i = 0; i < pitch; i += 16)
      pack_tile(lines, Float::f32, i, 16, sums + i * B::kColBlock + j, B::kColBlock);
  }
  for (std::int64_t i = 0; i < rows; ++i)
    finish_row<F32Lanes>(p, row + i, col, cols, sums + i * B::kColBlock);
}

struct F64Lanes {
  using Scalar = double;
  using Vec = __m512d;
  static constexpr int kLanes = 8;
  static constexpr int kVecs = 2;
  static constexpr int kRows = 12;
  static constexpr int kTile = 16;
  static constexpr int kDirectRows = 0;
  static constexpr int kLaneRows = 0;

  RLK_INLINE Vec zero() { return _mm512_setzero_pd(); }
  RLK_INLINE Vec load(const double* p) { return _mm512_loadu_pd(p); }
  RLK_INLINE Vec broadcast(const double* p) { return _mm512_set1_pd(*p); }
  RLK_INLINE void store(double* p, Vec v) { _mm512_storeu_pd(p, v); }
  RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  RLK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_pd(a, b); }

  RLK_INLINE void widen(__m512 x, double* dst) {
    _mm512_storeu_pd(dst, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    _mm512_storeu_pd(dst + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }

  RLK_ISA static void upcast_run(const void* src, Float type, std::int64_t count, double* dst) {
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16) widen(upcast_16(src, type, i, 16), dst + i);
    for (; i < count; ++i) dst[i] = load_element(src, type, i);
  }

  template <Float type>
  RLK_INLINE void put(const __m512 (&tile)[16], int i, double* dst, std::int64_t dst_stride) {
    widen(tile_depth<type>(tile, i), dst + i * dst_stride);
  }
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

const ChainKernels* chain_kernels_avx512() {
  static constexpr ChainKernels kernels = kernels_of<F32Lanes, F64Lanes>("avx512", 32);
  return &kernels;
}

}  // namespace rlk::native

#else

namespace rlk::native {
const ChainKernels* chain_kernels_avx512() { return nullptr; }
}  // namespace rlk::native

#endif
