#include "cuda/attention/few_rows_cluster.cuh"

namespace rlk::cuda::attention {
template cudaError_t start_clusters<__nv_bfloat16>(const Problem&, float*, std::int64_t, cudaStream_t);
}  // namespace rlk::cuda::attention
