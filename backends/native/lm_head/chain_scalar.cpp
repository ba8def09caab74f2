// The chain product without vector instructions: what every other kernel must agree with, and what runs on a
// processor that has none of them.
#define RLK_ISA
#include "native/lm_head/chain_kernels.hpp"
#include "native/lm_head/scalar.hpp"

namespace rlk::native {

const ChainKernels& chain_kernels_scalar() {
  static constexpr ChainKernels kernels = kernels_of<ScalarLanes<float>, ScalarLanes<double>>("scalar", 4);
  return kernels;
}

}  // namespace rlk::native
