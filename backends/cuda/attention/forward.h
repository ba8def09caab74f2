// The launches of the attention kernel: a file for each element type, so that they compile side by side.
#pragma once

#include "cuda/attention/sm90.h"

namespace rlk::cuda::attention {

// Blocks of `height` rows, more than there are where sequences are packed.
inline std::int64_t tiles_at_most(const Problem& p, std::int64_t height) {
  const std::int64_t rows = p.queries * p.group, tiles = (rows + height - 1) / height;
  return p.cu_q ? tiles + p.sequences : tiles * p.sequences;
}

// splits > 1: a block has one, and its sums go to `parts`.
template <class T>
cudaError_t start_forward(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);

}  // namespace rlk::cuda::attention
