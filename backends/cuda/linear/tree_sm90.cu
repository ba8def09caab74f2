// The tree kernels of linear: both operands k-contiguous, y = x * weight^T.
#include "cuda/linear/tree_kernel.cuh"

namespace rlk::cuda::linear {

cudaError_t launch_tree_transposed(const Product&, const Cut&, int multiprocessors, cudaStream_t);
cudaError_t launch_few_rows(const Product&, const Cut&, int multiprocessors, cudaStream_t);
cudaError_t launch_tree_gated(const Product&, const Cut&, int multiprocessors, cudaStream_t);

bool tree_available() { return encoder() != nullptr; }

cudaError_t launch_tree(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  if (cut.rows <= kFewRows) return launch_few_rows(g, cut, multiprocessors, stream);
  if (g.up > 0) return launch_tree_gated(g, cut, multiprocessors, stream);
  if (!g.b.k_contiguous) return launch_tree_transposed(g, cut, multiprocessors, stream);
  return g.b.type == Float::f16 ? start_cut<__half, true, false>(g, cut, multiprocessors, stream)
                                : start_cut<__nv_bfloat16, true, false>(g, cut, multiprocessors, stream);
}

}  // namespace rlk::cuda::linear
