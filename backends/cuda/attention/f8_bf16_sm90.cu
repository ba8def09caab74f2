#include "cuda/attention/forward.cuh"

namespace rlk::cuda::attention {
template cudaError_t start_f8<__nv_bfloat16>(const Problem&, float*, std::int64_t, cudaStream_t);
}  // namespace rlk::cuda::attention
