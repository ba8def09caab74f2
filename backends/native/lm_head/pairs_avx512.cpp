// VDPBF16PS itself: 12 x 32 register tiles of pairs. Up to four rows skip packing, as fp32 chains do
// (chain_avx512.cpp): tiles of the weight are transposed in registers and used at once.
#include <algorithm>
#include <cstring>

#include "native/lm_head/pairs.hpp"

#if defined(__x86_64__)
#  define RLK_ISA __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#  include "native/lm_head/avx512.hpp"
#  include "native/lm_head/chain_kernels.hpp"

namespace rlk::native {
namespace {

RLK_INLINE __m512 dot(__m512 a, __m512 b, __m512 sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}

struct PairLanes : Lanes16 {
  static constexpr int kLaneRows = 0;
  static constexpr std::int64_t kStep = 2;

  RLK_INLINE Vec fma(Vec a, Vec b, Vec sum) { return dot(a, b, sum); }

  RLK_ISA static void pair_run(const char* even, const char* odd, std::int64_t count, float* dst) {
    for (std::int64_t i = 0; i < count; i += 16) {
      const __mmask16 mask = first_lanes(count - i);
      const __m256i low = _mm256_maskz_loadu_epi16(mask, even + 2 * i);
      const __m256i high = odd ? _mm256_maskz_loadu_epi16(mask, odd + 2 * i) : _mm256_setzero_si256();
      _mm512_mask_storeu_epi32(
          dst + i, mask,
          _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
    }
  }
  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Float, std::int64_t k, std::int64_t count,
                                        float* dst, std::int64_t dst_stride) {
    __m512 tile[16];
    if (count >= 32) {
      load_tile<Float::bf16, true>(rows, k, 32, tile);
#  pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_ps(dst + i * dst_stride, tile[i]);
      return 16;
    }
    load_tile<Float::bf16, false>(rows, k, count, tile);
    const int pairs = static_cast<int>((count + 1) / 2);
    for (int i = 0; i < pairs; ++i) _mm512_storeu_ps(dst + i * dst_stride, tile[i]);
    return pairs;
  }
  RLK_ISA static void direct(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                             std::int64_t cols, float*, float* sums);
};

RLK_INLINE __m512 pair_of(const char* row, std::int64_t k) {
  std::int32_t pair;
  std::memcpy(&pair, row + 2 * k, sizeof pair);
  return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
}
// The last of an odd depth.
RLK_INLINE __m512 half_of(const char* row, std::int64_t k) {
  std::uint16_t half;
  std::memcpy(&half, row + 2 * k, sizeof half);
  return _mm512_castsi512_ps(_mm512_set1_epi32(half));
}

template <int Rows>
RLK_INLINE void accumulate_end(__m512 (&sum)[Rows], const char* const* columns, std::int64_t k,
                               std::int64_t count, const char* const* a) {
  __m512 tile[16];
  load_tile<Float::bf16, false>(columns, k, count, tile);
  for (int i = 0; i < static_cast<int>(count); i += 2)
#  pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
      sum[r] = dot(i + 1 < count ? pair_of(a[r], k + i) : half_of(a[r], k + i), tile[i / 2], sum[r]);
}

// 16 columns over one block. (Two groups of columns in turn, whose chains would hide each other's latency, are a quarter
// slower: too many streams.)
template <int Rows>
RLK_ISA void direct_rows(const char* const* columns, std::int64_t depth, const char* const* a, float* sums,
                         const Piece& piece) {
  using B = Blocking<PairLanes>;
  __m512 sum[Rows];
#  pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) sum[r] = _mm512_setzero_ps();
  std::int64_t k = 0;
  for (; k + 32 <= depth; k += 32) {
    __m512 tile[16];
    load_tile<Float::bf16, true>(columns, k, 32, tile);
#  pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
#  pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sum[r] = dot(pair_of(a[r], k + 2 * i), tile[i], sum[r]);
  }
  if (k < depth) accumulate_end<Rows>(sum, columns, k, depth - k, a);
#  pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    float* at = sums + r * B::kColBlock;
    _mm512_storeu_ps(at + piece.to * B::kSums, joined<PairLanes>(sum[r], at, piece.meets));
  }
}

RLK_ISA void PairLanes::direct(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                               std::int64_t cols, float*, float* sums) {
  using Run = void (*)(const char* const*, std::int64_t, const char* const*, float*, const Piece&);
  constexpr Run kOf[] = {direct_rows<1>, direct_rows<2>, direct_rows<3>, direct_rows<4>};
  for (std::int64_t j = 0; j < cols; j += 16)
    for_pieces(p, std::max<std::int64_t>(p.block, 1), [&](const Piece& piece) RLK_ISA {
      const char* columns[16];
      for (int c = 0; c < 16; ++c)
        columns[c] = element_address(p.b, piece.first, col + std::min(j + c, cols - 1));
      const char* lines[kDirectRows];
      for (std::int64_t i = 0; i < rows; ++i) lines[i] = element_address(p.a, row + i, piece.first);
      kOf[rows - 1](columns, piece.depth, lines, sums + j, piece);
    });
  for (std::int64_t i = 0; i < rows; ++i)
    finish_row<PairLanes>(p, row + i, col, cols, sums + i * Blocking<PairLanes>::kColBlock);
}

// Pairs and sums of every kind: any bits, sums that cancel, products and sums around 2^-126.
RLK_ISA bool dot_is_pair_step() {
  std::uint32_t state = 1;
  const auto random = [&] {
    state = state * 1664525u + 1013904223u;
    return state ^ state >> 15;
  };
  for (int n = 0; n < 1024; ++n) {
    alignas(64) std::uint32_t a[16], b[16], sum[16], result[16];
    for (int i = 0; i < 16; ++i) {
      a[i] = random(), b[i] = random(), sum[i] = random();
      if (n % 4 != 0) {  // exponents about the middle, or about half of the least
        const std::uint32_t exponent = n % 4 == 1 ? 0x7e : 0x3f;
        for (std::uint32_t* x : {&a[i], &b[i]}) *x = (*x & 0x81ff81ffu) | (exponent << 7 | exponent << 23);
        sum[i] = (sum[i] & 0x81ffffffu) | (n % 4 == 1 ? 0x3f000000u : 0u);
      }
      if (n % 4 == 3) sum[i] = (sum[i] & 0x80000007u) + 0x007ffffcu;
      if (n % 8 == 5) {  // the even product takes the odd one away
        a[i] = a[i] << 16 | (a[i] & 0xffffu);
        b[i] = (b[i] << 16 | (b[i] & 0xffffu)) ^ 0x8000u;
      }
    }
    _mm512_store_ps(reinterpret_cast<float*>(result),
                    dot(_mm512_load_ps(reinterpret_cast<const float*>(a)),
                        _mm512_load_ps(reinterpret_cast<const float*>(b)),
                        _mm512_load_ps(reinterpret_cast<const float*>(sum))));
    for (int i = 0; i < 16; ++i) {
      const float expected = pair_step(a[i], b[i], std::bit_cast<float>(sum[i]));
      const float got = std::bit_cast<float>(result[i]);
      if (std::isnan(expected) ? !std::isnan(got) : std::bit_cast<std::uint32_t>(expected) != result[i])
        return false;
    }
  }
  return true;
}

}  // namespace

const ChainKernels* pair_kernels_avx512() {
  static constexpr ChainKernels kernels = kernels_of<PairLanes>("avx512", 32);
  return &kernels;
}

const char* pairs_refusal() {
  static const char* const refusal = [] {
    if (!__builtin_cpu_supports("avx512bf16")) return "needs AVX512-BF16, which this processor lacks";
    const DefaultFloatMode mode;
    return dot_is_pair_step() ? nullptr
                              : "VDPBF16PS of this processor keeps another rule than avx512bf16/kb1024";
  }();
  return refusal;
}

}  // namespace rlk::native

#else

namespace rlk::native {
const ChainKernels* pair_kernels_avx512() { return nullptr; }
const char* pairs_refusal() { return "this build lacks AVX512-BF16"; }
}  // namespace rlk::native

#endif
