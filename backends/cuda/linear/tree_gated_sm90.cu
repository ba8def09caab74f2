// The tree kernels of linear with swiglu: a tile has the same columns of gate and of up.
#include "cuda/linear/tree_kernel.cuh"

namespace rlk::cuda::linear {

cudaError_t launch_tree_gated(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  return g.b.type == Float::f16 ? start_cut<__half, true, true>(g, cut, multiprocessors, stream)
                                : start_cut<__nv_bfloat16, true, true>(g, cut, multiprocessors, stream);
}

}  // namespace rlk::cuda::linear
