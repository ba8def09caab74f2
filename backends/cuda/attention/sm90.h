// attention on Hopper: what the op layer and the kernels of *_sm90.cu share. Knows nothing of the registry.
#pragma once

#include <cuda_runtime.h>

#include "arithmetic/attention/problem.hpp"

namespace rlk::cuda::attention {

using attn128::Problem;

inline constexpr int kMostWidth = 128;

std::int64_t workspace_bytes(const Problem& p);
cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream);

}  // namespace rlk::cuda::attention
