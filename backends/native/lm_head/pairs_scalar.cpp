// VDPBF16PS in plain numbers: what its other forms must agree with.
#define RLK_ISA
#include "native/lm_head/chain_kernels.hpp"
#include "native/lm_head/pairs.hpp"
#include "native/lm_head/scalar.hpp"

namespace rlk::native {
namespace {

struct PairLanes : ScalarLanes<float> {
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
