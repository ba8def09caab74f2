// attention and attention_part on Hopper: what the op layer and the kernels of *_sm90.cu share. Knows nothing of the registry.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "arithmetic/attention/problem.hpp"
#include "cuda/hopper/launch.h"

namespace rlk::cuda::attention {

using attn128::Problem;

inline constexpr int kNarrow = 128;  // more channels have kernels of their own

// Floats in the workspace.
inline constexpr std::int64_t kMostParts = std::int64_t{1} << 27;
// Of them, those that a call of latent heads (576 and 512 channels) needs.
std::int64_t latent_parts(const Problem& p);

std::int64_t workspace_bytes(const Problem& p);
cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream);
// attention_part: sums of all splits, at most kMostSplits, go to p.partials.
inline constexpr std::int64_t kMostSplits = 65535;
cudaError_t launch_part(const Problem& p, cudaStream_t stream);

// Kernels whose blocks take one item after another have a block an SM: of a whole GH100.
inline constexpr int kMostBlocks = 144;
inline cudaError_t blocks_for(std::int64_t items, int& blocks) {
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  blocks = static_cast<int>(std::min<std::int64_t>({items, processors, kMostBlocks}));
  return e;
}

using hopper::launch_early;

}  // namespace rlk::cuda::attention
