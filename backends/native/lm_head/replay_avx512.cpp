// The replay on AVX-512, 32 weight rows at a time.
//
// Products of two bf16 or fp16 numbers are exact in fp32, cutting at 25 bits below emax is a scaling by a
// power of two followed by a truncating conversion to int32, and truncation to 24 bits is the conversion back
// with rounding towards zero. Per k and 16 outputs that is two multiplications, a conversion and an addition;
// exponents are added and compared as 16-bit integers, 32 outputs at once.
//
// The fast path holds while emax is in [-98, 100] and the int32 sum does not overflow: then nothing leaves
// fp32's range except products that would be cut to zero anyway (results are flushed, inputs are not). Any
// other lane of any other group, infinities and NaNs included, is redone in integers by replay_group.
#include "native/lm_head/replay.hpp"

#if defined(__x86_64__)
#  include "native/lm_head/avx512.hpp"

namespace rlk::native {
namespace {

constexpr int kColumns = 32;           // two vectors of outputs, one vector of 16-bit exponents
constexpr std::int64_t kChunk = 128;   // depth of a packed panel: 24 KiB, stays in L1
constexpr std::int64_t kDepth = 1024;  // depth for which rows of hidden are prepared at once
constexpr std::int64_t kRowBlock = 64;
constexpr std::int64_t kColBlock = 256;  // columns that share prepared rows
constexpr std::int16_t kZero =
    -8000;  // exponent of a zero: loses every comparison, even against an infinity's
constexpr std::int16_t kSpecial =
    16000;  // of an infinity or NaN: forces the slow path whatever it multiplies
constexpr int kLowest = -98;
constexpr int kHighest = 100;

struct Scratch {
  alignas(64) float value[kChunk][kColumns];
  alignas(64) std::uint32_t exponent[kChunk][kColumns / 2];  // lane j: column j below, column j + 16 above
  alignas(64) float row_value[kRowBlock][kDepth];
  alignas(64) std::uint32_t row_exponent[kRowBlock][kDepth];  // the same exponent in both halves
  alignas(64) float acc[kRowBlock][kColBlock];
};

// The exponents of 16 upcast values, unnormalised as the rule wants: subnormals count with the type's
// smallest.
RLK_INLINE __m512i exponents_of(__m512 x, int smallest) {
  const __m512i magnitude = _mm512_slli_epi32(_mm512_castps_si512(x), 1);
  const __m512i field = _mm512_srli_epi32(magnitude, 24);
  __m512i e = _mm512_max_epi32(_mm512_sub_epi32(field, _mm512_set1_epi32(127)), _mm512_set1_epi32(smallest));
  e = _mm512_mask_mov_epi32(e, _mm512_cmpeq_epi32_mask(field, _mm512_set1_epi32(255)),
                            _mm512_set1_epi32(kSpecial));
  return _mm512_mask_mov_epi32(e, _mm512_testn_epi32_mask(magnitude, magnitude), _mm512_set1_epi32(kZero));
}

RLK_INLINE __m512i join_halves(__m512i low, __m512i high) {
  return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(high, 16));
}

template <Float type>
RLK_ISA void prepare_rows(const ReplayProduct& p, std::int64_t row, std::int64_t rows, std::int64_t k0,
                          std::int64_t depth, Scratch& s) {
  constexpr int kSmallest = type == Float::bf16 ? -126 : -14;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::uint16_t* from = p.hidden_row(row + i) + k0;
    for (std::int64_t k = 0; k < (depth + 15) / 16 * 16; k += 16) {
      const __m512 x = upcast_16<type>(from, k, first_lanes(depth - k));
      const __m512i e = exponents_of(x, kSmallest);
      _mm512_store_ps(&s.row_value[i][k], x);
      _mm512_store_si512(&s.row_exponent[i][k], join_halves(e, e));
    }
  }
}

// 32 weight rows, transposed; a depth that is no multiple of 16 is filled with zeros.
template <Float type>
RLK_ISA void prepare_panel(const char* const* columns, std::int64_t depth, Scratch& s) {
  constexpr int kSmallest = type == Float::bf16 ? -126 : -14;
  for (std::int64_t k = 0; k < depth; k += Tile<type>::kDepth) {
    __m512 left[16];
    __m512 right[16];
    if (depth - k >= Tile<type>::kDepth) {
      load_tile<type, true>(columns, k, 0, left);
      load_tile<type, true>(columns + 16, k, 0, right);
    } else {
      load_tile<type, false>(columns, k, depth - k, left);
      load_tile<type, false>(columns + 16, k, depth - k, right);
    }
#  pragma GCC unroll 32
    for (int i = 0; i < Tile<type>::kDepth; ++i) {
      const __m512 x = tile_depth<type>(left, i);
      const __m512 y = tile_depth<type>(right, i);
      _mm512_store_ps(&s.value[k + i][0], x);
      _mm512_store_ps(&s.value[k + i][16], y);
      _mm512_store_si512(&s.exponent[k + i][0],
                         join_halves(exponents_of(x, kSmallest), exponents_of(y, kSmallest)));
    }
  }
}

// What the fast path needs to know about 16 outputs before it may cut their products.
struct Scaling {
  __m512 to_units, from_units;
  __mmask16 slow, idle;  // redo in integers; no product is non-zero, the accumulator stays
};

RLK_INLINE Scaling scaling_of(__m512i largest_product, __m512 acc) {
  const __m512i field = _mm512_srli_epi32(_mm512_slli_epi32(_mm512_castps_si512(acc), 1), 24);
  const __m512i largest = _mm512_max_epi32(largest_product, _mm512_sub_epi32(field, _mm512_set1_epi32(127)));
  const __m512i above = _mm512_sub_epi32(largest, _mm512_set1_epi32(kLowest));
  Scaling s;
  s.idle = _mm512_cmplt_epi32_mask(largest_product, _mm512_set1_epi32(kZero / 2));
  s.slow = _mm512_mask_cmpgt_epu32_mask(static_cast<__mmask16>(~s.idle), above,
                                        _mm512_set1_epi32(kHighest - kLowest));
  s.to_units =
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127 + 25), largest), 23));
  s.from_units =
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(largest, _mm512_set1_epi32(127 - 25)), 23));
  return s;
}

RLK_INLINE __m512i cut_term(float a, __m512 b, __m512 to_units) {
  return _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(a), b), to_units));
}

// One group of 16 for 16 outputs. Two halves of the terms are summed apart, so that only their sum can
// overflow.
RLK_INLINE __m512 add_group(__m512 acc, const float* a, const float (*b)[kColumns], int lane,
                            const Scaling& s, __mmask16& slow) {
  __m512i first = _mm512_cvttps_epi32(_mm512_mul_ps(acc, s.to_units));
  __m512i second = cut_term(a[8], _mm512_load_ps(b[8] + lane), s.to_units);
#  pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    first = _mm512_add_epi32(first, cut_term(a[k], _mm512_load_ps(b[k] + lane), s.to_units));
    if (k > 0)
      second = _mm512_add_epi32(second, cut_term(a[k + 8], _mm512_load_ps(b[k + 8] + lane), s.to_units));
  }
  const __m512i sum = _mm512_add_epi32(first, second);
  // Overflow: both halves have the sign that the sum lacks.
  const __m512i overflow = _mm512_and_si512(_mm512_xor_si512(first, sum), _mm512_xor_si512(second, sum));
  slow = static_cast<__mmask16>(s.slow | (_mm512_movepi32_mask(overflow) & static_cast<__mmask16>(~s.idle)));
  const __m512 result =
      _mm512_mul_ps(_mm512_cvt_roundepi32_ps(sum, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC), s.from_units);
  return _mm512_mask_mov_ps(result, s.idle, acc);
}

// The lanes the fast path may not decide, from the original bits.
RLK_ISA __m512 redo(__m512 before, __m512 after, __mmask16 lanes, const std::uint16_t* a,
                    const char* const* columns, std::int64_t k, int count, Float type) {
  alignas(64) std::uint32_t from[16];
  alignas(64) std::uint32_t to[16];
  _mm512_store_ps(reinterpret_cast<float*>(from), before);
  _mm512_store_ps(reinterpret_cast<float*>(to), after);
  for (int lane = 0; lane < 16; ++lane)
    if ((lanes >> lane & 1) != 0)
      to[lane] =
          replay_group(from[lane], a, reinterpret_cast<const std::uint16_t*>(columns[lane]) + k, count, type);
  return _mm512_load_ps(reinterpret_cast<const float*>(to));
}

// One row of hidden against one prepared chunk of 32 weight rows; row_k is the chunk's place in the prepared
// row.
RLK_ISA void run_row(const Scratch& s, std::int64_t row, std::int64_t row_k, std::int64_t depth,
                     const std::uint16_t* hidden, const char* const* columns, Float type, float* acc) {
  __m512 left = _mm512_loadu_ps(acc);
  __m512 right = _mm512_loadu_ps(acc + 16);
  for (std::int64_t k = 0; k < depth; k += 16) {
    const std::uint32_t* exponent = &s.row_exponent[row][row_k + k];
    __m512i largest =
        _mm512_add_epi16(_mm512_load_si512(s.exponent[k]), _mm512_set1_epi32(static_cast<int>(exponent[0])));
#  pragma GCC unroll 16
    for (int i = 1; i < 16; ++i)
      largest = _mm512_max_epi16(largest, _mm512_add_epi16(_mm512_load_si512(s.exponent[k + i]),
                                                           _mm512_set1_epi32(static_cast<int>(exponent[i]))));
    const float* a = &s.row_value[row][row_k + k];
    const Scaling scale_left = scaling_of(_mm512_srai_epi32(_mm512_slli_epi32(largest, 16), 16), left);
    const Scaling scale_right = scaling_of(_mm512_srai_epi32(largest, 16), right);
    __mmask16 slow_left;
    __mmask16 slow_right;
    __m512 next_left = add_group(left, a, &s.value[k], 0, scale_left, slow_left);
    __m512 next_right = add_group(right, a, &s.value[k], 16, scale_right, slow_right);
    if ((slow_left | slow_right) != 0) [[unlikely]] {
      const int count = static_cast<int>(depth - k < 16 ? depth - k : 16);
      next_left = redo(left, next_left, slow_left, hidden + k, columns, k, count, type);
      next_right = redo(right, next_right, slow_right, hidden + k, columns + 16, k, count, type);
    }
    left = next_left;
    right = next_right;
  }
  _mm512_storeu_ps(acc, left);
  _mm512_storeu_ps(acc + 16, right);
}

template <Float type>
RLK_ISA void run_block(const ReplayProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                       std::int64_t cols, Scratch& s) {
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < kColBlock; ++j) s.acc[i][j] = j < cols ? p.initial_at(row + i, col + j) : 0;
  for (std::int64_t k0 = 0; k0 < p.depth; k0 += kDepth) {
    const std::int64_t depth = p.depth - k0 < kDepth ? p.depth - k0 : kDepth;
    prepare_rows<type>(p, row, rows, k0, depth, s);
    for (std::int64_t j = 0; j < cols; j += kColumns)
      for (std::int64_t k = 0; k < depth; k += kChunk) {
        const std::int64_t chunk = depth - k < kChunk ? depth - k : kChunk;
        const char* columns[kColumns];
        for (int c = 0; c < kColumns; ++c) {
          const std::int64_t from = p.weight_row(col + (j + c < cols ? j + c : cols - 1));
          columns[c] = reinterpret_cast<const char*>(p.weight + from * p.weight_stride + k0 + k);
        }
        prepare_panel<type>(columns, chunk, s);
        for (std::int64_t i = 0; i < rows; ++i)
          run_row(s, i, k, chunk, p.hidden_row(row + i) + k0 + k, columns, type, &s.acc[i][j]);
      }
  }
}

void finish_block(const ReplayProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                  std::int64_t cols, const Scratch& s) {
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j)
      finish_element(p.out, p.out_type, (row + i) * p.out_stride + col + j, s.acc[i][j], p.bias, p.bias_type,
                     p.weight_row(col + j));
}

void run_avx512(const ReplayProduct& p, const ChainTile& tile, void* scratch) {
  Scratch& s = *static_cast<Scratch*>(scratch);
  for (std::int64_t col = tile.col_begin; col < tile.col_end; col += kColBlock)
    for (std::int64_t row = tile.row_begin; row < tile.row_end; row += kRowBlock) {
      const std::int64_t cols = tile.col_end - col < kColBlock ? tile.col_end - col : kColBlock;
      const std::int64_t rows = tile.row_end - row < kRowBlock ? tile.row_end - row : kRowBlock;
      {
        const DefaultFloatMode flushing(true);
        if (p.type == Float::bf16)
          run_block<Float::bf16>(p, row, rows, col, cols, s);
        else
          run_block<Float::f16>(p, row, rows, col, cols, s);
      }
      const DefaultFloatMode mode;
      finish_block(p, row, rows, col, cols, s);
    }
}

}  // namespace

const ReplayKernels* replay_kernels_avx512() {
  static constexpr ReplayKernels kernels{"avx512", sizeof(Scratch), &run_avx512};
  return &kernels;
}

}  // namespace rlk::native

#else

namespace rlk::native {
const ReplayKernels* replay_kernels_avx512() { return nullptr; }
}  // namespace rlk::native

#endif
