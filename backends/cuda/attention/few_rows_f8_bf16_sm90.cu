#include "cuda/attention/few_rows.cuh"

namespace rlk::cuda::attention {
template cudaError_t start_few_f8<__nv_bfloat16>(const Problem&, const Maps&, float*, std::int64_t,
                                                 std::int64_t, cudaStream_t);
}  // namespace rlk::cuda::attention
