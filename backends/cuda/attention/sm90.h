// attention and attention_part on Hopper: what the op layer and the kernels of *_sm90.cu share. Knows nothing of the registry.
#pragma once

#include <cuda_runtime.h>

#include "arithmetic/attention/problem.hpp"

namespace rlk::cuda::attention {

using attn128::Problem;

// Floats in the workspace.
inline constexpr std::int64_t kMostParts = std::int64_t{1} << 27;
// Of them, those that a call of latent heads (576 and 512 channels) needs.
std::int64_t latent_parts(const Problem& p);

std::int64_t workspace_bytes(const Problem& p);
cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream);
// attention_part: sums of all splits, at most kMostSplits, go to p.partials.
inline constexpr std::int64_t kMostSplits = 65535;
cudaError_t launch_part(const Problem& p, cudaStream_t stream);

}  // namespace rlk::cuda::attention
