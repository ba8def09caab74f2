// VDPBF16PS by two fused multiply-adds on processors that lack it: what it does whatever the mode, they do in
// the mode that flushes.
#include <algorithm>
#include <cstring>

#include "native/lm_head/pairs.hpp"

#if defined(__x86_64__)
#  include "native/lm_head/avx2.hpp"
#  include "native/lm_head/chain_kernels.hpp"

namespace rlk::native {
namespace {

// Subnormal operands and results are zero.
class Flushing {
 public:
  Flushing() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0u); }
  ~Flushing() { _mm_setcsr(saved_); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
  unsigned saved_;
};

struct PairLanes : Lanes8 {
  using ChainMode = Flushing;
  static constexpr int kRows = 4;
  static constexpr std::int64_t kStep = 2;

  RLK_INLINE Vec odd(Vec pair) {
    return _mm256_and_ps(pair, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  RLK_INLINE Vec even(Vec pair) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pair), 16));
  }
  RLK_INLINE Vec fma(Vec a, Vec b, Vec sum) {
    return _mm256_fmadd_ps(even(a), even(b), _mm256_fmadd_ps(odd(a), odd(b), sum));
  }

  static void pair_run(const char* even, const char* odd, std::int64_t count, float* dst) {
    for (std::int64_t i = 0; i < count; ++i) dst[i] = pair_at(even, odd, i);
  }
  // A step's excess lies where the next step begins.
  RLK_ISA static std::int64_t pack_tile(const char* const* rows, Float, std::int64_t k, std::int64_t count,
                                        float* dst, std::int64_t dst_stride) {
    const std::int64_t pairs = std::min<std::int64_t>((count + 1) / 2, 8);
    for (std::int64_t i = 0; i < pairs; ++i)
      for (int j = 0; j < 8; ++j) {
        const char* even = rows[j] + 2 * (k + 2 * i);
        dst[i * dst_stride + j] = pair_at(even, 2 * i + 1 < count ? even + 2 : nullptr, 0);
      }
    return pairs;
  }
};

}  // namespace

const ChainKernels* pair_kernels_avx2() {
  static constexpr ChainKernels kernels = kernels_of<PairLanes>("avx2", 16);
  return &kernels;
}

}  // namespace rlk::native

#else

namespace rlk::native {
const ChainKernels* pair_kernels_avx2() { return nullptr; }
}  // namespace rlk::native

#endif
