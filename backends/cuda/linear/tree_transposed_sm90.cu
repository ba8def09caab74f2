// The tree kernels of linear's gradients: d_x = d_y * weight, where B is row-contiguous, and d_weight = d_y^T * x, where
// both operands are.
#include "cuda/linear/tree_kernel.cuh"

namespace rlk::cuda::linear {
namespace {

template <class T>
cudaError_t start(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  if (!g.a.k_contiguous)
    return start_tree<T, 2, 128, false, false, 2, false, false>(g, 1, multiprocessors, stream);
  return start_cut<T, false, false>(g, cut, multiprocessors, stream);
}

}  // namespace

cudaError_t launch_tree_transposed(const Product& g, const Cut& cut, int multiprocessors,
                                   cudaStream_t stream) {
  return g.b.type == Float::f16 ? start<__half>(g, cut, multiprocessors, stream)
                                : start<__nv_bfloat16>(g, cut, multiprocessors, stream);
}

}  // namespace rlk::cuda::linear
