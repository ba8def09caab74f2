// The chain product on AVX-512: 12 x 32 register tiles in fp32, 12 x 16 in fp64. Up to four rows skip
// packing: 16 x 16 tiles of the weight are transposed in registers and used at once, so that one token costs
// one read of the weight and nothing else (memory bound: 4 elements per cycle against about 3 that memory
// delivers).
#include "lm_head_chain.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>

#  if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own _mm512_undefined_*
#  endif

#  define RLK_ISA __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#  define RLK_INLINE RLK_ISA __attribute__((always_inline)) static inline
#  include "lm_head_chain_kernels.hpp"

namespace rlk::native {
namespace {

RLK_INLINE void transpose_16x16(__m512 (&r)[16]) {
  __m512 t[16];
#  pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#  pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
  }
#  pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#  pragma GCC unroll 4
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
template <Element type>
RLK_INLINE __m512 upcast_16(const void* src, std::int64_t index, __mmask16 mask) {
  if constexpr (type == Element::f32)
    return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(src) + index);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const std::uint16_t*>(src) + index);
  if constexpr (type == Element::f16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

RLK_INLINE __m512 upcast_16(const void* src, Element type, std::int64_t index, std::int64_t count) {
  const __mmask16 mask = first_lanes(count);
  if (type == Element::f32) return upcast_16<Element::f32>(src, index, mask);
  if (type == Element::f16) return upcast_16<Element::f16>(src, index, mask);
  return upcast_16<Element::bf16>(src, index, mask);
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
template <Element type>
struct Tile {
  static constexpr int kPerVector = type == Element::bf16 ? 2 : 1;
  static constexpr int kDepth = 16 * kPerVector;
};

// Row addresses are fetched from memory each time (the barrier): kept in registers they would push out the
// tile.
template <Element type, bool Full>
RLK_INLINE void load_tile(const char* const* rows, std::int64_t k, std::int64_t count, __m512 (&tile)[16]) {
  asm volatile("" ::: "memory");
  if constexpr (type == Element::bf16) {
    const __mmask32 mask = Full || count >= 32 ? 0xffffffffu : (1u << count) - 1;
#  pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const auto* from = reinterpret_cast<const std::uint16_t*>(rows[i]) + k;
      tile[i] = _mm512_castsi512_ps(Full ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(mask, from));
    }
  } else {
    const __mmask16 mask = Full ? __mmask16{0xffff} : first_lanes(count);
#  pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) tile[i] = upcast_16<type>(rows[i], k, mask);
  }
  transpose_16x16(tile);
}

template <Element type>
RLK_INLINE __m512 tile_depth(const __m512 (&tile)[16], int i) {
  if constexpr (type == Element::bf16) return (i & 1) != 0 ? pair_high(tile[i / 2]) : pair_low(tile[i / 2]);
  return tile[i];
}

// Transposes up to one tile's depth into dst and says how much it was.
template <class Lanes, Element type>
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
RLK_INLINE std::int64_t pack_tile_of(const char* const* rows, Element type, std::int64_t k,
                                     std::int64_t count, typename Lanes::Scalar* dst,
                                     std::int64_t dst_stride) {
  switch (type) {
    case Element::f32:
      return pack_typed_tile<Lanes, Element::f32>(rows, k, count, dst, dst_stride);
    case Element::bf16:
      return pack_typed_tile<Lanes, Element::bf16>(rows, k, count, dst, dst_stride);
    default:
      return pack_typed_tile<Lanes, Element::f16>(rows, k, count, dst, dst_stride);
  }
}

RLK_INLINE __m256i round_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(kCanonicalNan16)));
}

RLK_INLINE __m256i round_f16(__m512 x) {
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm256_mask_mov_epi16(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), nan,
                               _mm256_set1_epi16(kCanonicalNan16));
}

RLK_INLINE __m512 round_as_16(__m512 x, Element type) {
  if (type == Element::f32) return x;
  if (type == Element::f16) return _mm512_cvtph_ps(round_f16(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(x)), 16));
}

RLK_INLINE void store_16(void* out, Element type, std::int64_t index, __mmask16 mask, __m512 x) {
  if (type == Element::f32) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512 canon = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kCanonicalNan32)));
    _mm512_mask_storeu_ps(static_cast<float*>(out) + index, mask, _mm512_mask_mov_ps(x, nan, canon));
    return;
  }
  _mm256_mask_storeu_epi16(static_cast<std::uint16_t*>(out) + index, mask,
                           type == Element::f16 ? round_f16(x) : round_bf16(x));
}

struct F32Lanes {
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
  RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  RLK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }

  RLK_ISA static void upcast_run(const void* src, Element type, std::int64_t count, float* dst) {
    for (std::int64_t i = 0; i < count; i += 16)
      _mm512_mask_storeu_ps(dst + i, first_lanes(count - i), upcast_16(src, type, i, count - i));
  }

  template <Element type>
  RLK_INLINE void put(const __m512 (&tile)[16], int i, float* dst, std::int64_t dst_stride) {
    _mm512_storeu_ps(dst + i * dst_stride, tile_depth<type>(tile, i));
  }
  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Element type, std::int64_t k,
                                        std::int64_t count, float* dst, std::int64_t dst_stride) {
    return pack_tile_of<F32Lanes>(rows, type, k, count, dst, dst_stride);
  }

  // The bias is rare and sits next to 16 finished sums, so one masked vector path serves every case with unit
  // strides.
  RLK_ISA static std::int64_t store_row(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                                        const float* sums) {
    if (p.out_col_stride != 1 || (p.bias != nullptr && p.bias_stride != 1)) return 0;
    for (std::int64_t j = 0; j < cols; j += 16) {
      __m512 x = _mm512_loadu_ps(sums + j);
      if (p.bias != nullptr)
        x = _mm512_add_ps(round_as_16(x, p.out_type), upcast_16(p.bias, p.bias_type, col + j, cols - j));
      store_16(out, p.out_type, j, first_lanes(cols - j), x);
    }
    return cols;
  }

  RLK_ISA static void direct(const MatrixView& b, std::int64_t rows, std::int64_t col, std::int64_t cols,
                             std::int64_t k0, std::int64_t depth, const float* a, float* c, bool more);
};

template <int Rows, Element type, bool Full>
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

template <int Rows, Element type>
RLK_ISA void direct_rows(const char* const* columns, std::int64_t depth, const float* a, float* c,
                         bool more) {
  __m512 left[Rows];
  __m512 right[Rows];
#  pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) left[i] = right[i] = _mm512_setzero_ps();
  std::int64_t k = 0;
  for (; k + Tile<type>::kDepth <= depth; k += Tile<type>::kDepth) {
    accumulate_tile<Rows, type, true>(left, columns, k, 0, a + k);
    accumulate_tile<Rows, type, true>(right, columns + 16, k, 0, a + k);
  }
  if (k < depth) {
    accumulate_tile<Rows, type, false>(left, columns, k, depth - k, a + k);
    accumulate_tile<Rows, type, false>(right, columns + 16, k, depth - k, a + k);
  }
#  pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    float* to = c + i * Blocking<F32Lanes>::kColBlock;
    _mm512_storeu_ps(to, more ? _mm512_add_ps(_mm512_loadu_ps(to), left[i]) : left[i]);
    _mm512_storeu_ps(to + 16, more ? _mm512_add_ps(_mm512_loadu_ps(to + 16), right[i]) : right[i]);
  }
}

template <Element type>
RLK_ISA void direct_typed(std::int64_t rows, const char* const* columns, std::int64_t depth, const float* a,
                          float* c, bool more) {
  switch (rows) {
    case 1:
      return direct_rows<1, type>(columns, depth, a, c, more);
    case 2:
      return direct_rows<2, type>(columns, depth, a, c, more);
    case 3:
      return direct_rows<3, type>(columns, depth, a, c, more);
    default:
      return direct_rows<4, type>(columns, depth, a, c, more);
  }
}

RLK_ISA void F32Lanes::direct(const MatrixView& b, std::int64_t rows, std::int64_t col, std::int64_t cols,
                              std::int64_t k0, std::int64_t depth, const float* a, float* c, bool more) {
  const char* columns[32];
  for (int j = 0; j < 32; ++j) columns[j] = element_address(b, k0, col + (j < cols ? j : cols - 1));
  switch (b.type) {
    case Element::f32:
      return direct_typed<Element::f32>(rows, columns, depth, a, c, more);
    case Element::bf16:
      return direct_typed<Element::bf16>(rows, columns, depth, a, c, more);
    default:
      return direct_typed<Element::f16>(rows, columns, depth, a, c, more);
  }
}

struct F64Lanes {
  using Scalar = double;
  using Vec = __m512d;
  static constexpr int kLanes = 8;
  static constexpr int kVecs = 2;
  static constexpr int kRows = 12;
  static constexpr int kTile = 16;
  static constexpr int kDirectRows = 0;

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

  RLK_ISA static void upcast_run(const void* src, Element type, std::int64_t count, double* dst) {
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16) widen(upcast_16(src, type, i, 16), dst + i);
    for (; i < count; ++i) dst[i] = load_element(src, type, i);
  }

  template <Element type>
  RLK_INLINE void put(const __m512 (&tile)[16], int i, double* dst, std::int64_t dst_stride) {
    widen(tile_depth<type>(tile, i), dst + i * dst_stride);
  }
  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Element type, std::int64_t k,
                                        std::int64_t count, double* dst, std::int64_t dst_stride) {
    return pack_tile_of<F64Lanes>(rows, type, k, count, dst, dst_stride);
  }

  static std::int64_t store_row(const ChainProduct&, void*, std::int64_t, std::int64_t, const double*) {
    return 0;
  }
};

bool processor_has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma");
}

}  // namespace

const ChainKernels* chain_kernels_avx512() {
  static constexpr ChainKernels kernels{"avx512", scratch_for<F32Lanes, F64Lanes>(), 32, &run_tile<F32Lanes>,
                                        &run_tile<F64Lanes>};
  static const bool usable = processor_has_avx512();
  return usable ? &kernels : nullptr;
}

}  // namespace rlk::native

#else

namespace rlk::native {
const ChainKernels* chain_kernels_avx512() { return nullptr; }
}  // namespace rlk::native

#endif
