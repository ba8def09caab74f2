// The kernels of linear for few tokens, as cut.cpp chooses them.
#include "cuda/linear/few_rows.cuh"

namespace rlk::cuda::linear {
namespace {

template <class T>
cudaError_t start_few_cut(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  const auto with = [&](auto start) {
    return start(g, {.blocks = 1, .ahead = 96 * 1024, .hint = kReadOnce}, multiprocessors, stream);
  };
  if (cut.rows == 32) return with(start_few_rows<FewTraits<T, 32, 16, 1, 3>>);
  if (cut.columns == 8) return with(start_few_rows<FewTraits<T, 16, 8, 2, 4>>);
  return with(cut.columns == 16 ? start_few_rows<FewTraits<T, 16, 16, 1, 4>>
                                : start_few_rows<FewTraits<T, 16, 32, 1, 3>>);
}

}  // namespace

cudaError_t launch_few_rows(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  return g.b.type == Float::f16 ? start_few_cut<__half>(g, cut, multiprocessors, stream)
                                : start_few_cut<__nv_bfloat16>(g, cut, multiprocessors, stream);
}

}  // namespace rlk::cuda::linear
