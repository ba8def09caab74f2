// The launches of the attention kernel: a file for each element type, so that they compile side by side.
#pragma once

#include "cuda/attention/sm90.h"

namespace rlk::cuda::attention {

// Blocks of `height` rows, more than there are where sequences are packed.
inline std::int64_t tiles_at_most(const Problem& p, std::int64_t height) {
  const std::int64_t rows = p.queries * p.group, tiles = (rows + height - 1) / height;
  return p.cu_q ? tiles + p.sequences : tiles * p.sequences;
}

inline constexpr int kNarrow = 128;

// 576 and 512 channels: sums of splits always go to memory, even of a single one.
inline bool is_latent(const Problem& p) { return p.width > 256; }

// Whether v is the first channels of k.
inline bool values_in_keys(const Problem& p) {
  const bool many = p.block_table ? p.pages > 1 : p.sequences > 1;
  return p.k.data == p.v.data && p.value_width <= p.width && p.k.token == p.v.token &&
         (p.heads == 1 || p.k.head == p.v.head) && (!many || p.k.sequence == p.v.sequence);
}

// splits > 1: a block has one, and its sums go to `parts`.
template <class T>
cudaError_t start_forward(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);
template <class T>
cudaError_t start_wide(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);

}  // namespace rlk::cuda::attention
