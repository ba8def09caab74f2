#include "cuda/attention/bwd.cuh"

namespace rlk::cuda::attention {
template cudaError_t start_wide_backward<__nv_bfloat16, false>(const Backward&, const Gathered&,
                                                               cudaStream_t);
}  // namespace rlk::cuda::attention
