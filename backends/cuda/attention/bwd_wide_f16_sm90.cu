#include "cuda/attention/bwd.cuh"

namespace rlk::cuda::attention {
template cudaError_t start_wide_backward<__half, false>(const Backward&, const Gathered&, cudaStream_t);
}  // namespace rlk::cuda::attention
