// VDPBF16PS in plain numbers: what its other forms must agree with.
#define RLK_ISA
#include "native/lm_head/chain_kernels.hpp"
#include "native/lm_head/pairs.hpp"
#include "native/lm_head/scalar.hpp"

namespace rlk::native {
namespace {

struct PairLanes : ScalarLanes<float> {
  static constexpr std::int64_t kStep = 2;
  static void pair_run(const char* even, const char* odd, std::int64_t count, float* dst) {
    for (std::int64_t i = 0; i < count; ++i) dst[i] = pair_at(even, odd, i);
  }
  static std::int64_t pack_tile(const char* const* rows, Float, std::int64_t k, std::int64_t count,
                                float* dst, std::int64_t dst_stride) {
    const std::int64_t pairs = (count + 1) / 2;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const char* even = rows[0] + 2 * (k + 2 * i);
      dst[i * dst_stride] = pair_at(even, 2 * i + 1 < count ? even + 2 : nullptr, 0);
    }
    return pairs;
  }
  static Vec fma(Vec a, Vec b, Vec c) {
    return pair_step(std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b), c);
  }
};

}  // namespace

const ChainKernels& pair_kernels_scalar() {
  static constexpr ChainKernels kernels = kernels_of<PairLanes>("scalar", 4);
  return kernels;
}

}  // namespace rlk::native
