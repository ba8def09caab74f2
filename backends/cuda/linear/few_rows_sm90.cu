// The kernels of linear for few tokens, as cut.cpp chooses them.
#include "cuda/linear/few_rows.cuh"

namespace rlk::cuda::linear {
namespace {

// Stages that were measured: few and deep ones for few rows of weight, more of them for more.
template <class T>
cudaError_t start_few_cut(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  if (cut.rows == 32) return start_few_rows<FewTraits<T, 32, 16, 1, 3>>(g, multiprocessors, stream);
  if (cut.columns == 8) return start_few_rows<FewTraits<T, 16, 8, 2, 4>>(g, multiprocessors, stream);
  return cut.columns == 16 ? start_few_rows<FewTraits<T, 16, 16, 1, 6>>(g, multiprocessors, stream)
                           : start_few_rows<FewTraits<T, 16, 32, 1, 3>>(g, multiprocessors, stream);
}

}  // namespace

cudaError_t launch_few_rows(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  return g.b.type == Float::f16 ? start_few_cut<__half>(g, cut, multiprocessors, stream)
                                : start_few_cut<__nv_bfloat16>(g, cut, multiprocessors, stream);
}

}  // namespace rlk::cuda::linear
