// Few rows, of decoding: which calls have them, and the launch of the kernel that takes them, a file for each element type.
#pragma once

#include "cuda/attention/forward.h"
#include "cuda/attention/maps.h"

namespace rlk::cuda::attention {

// Tokens of a box; 0: TMA cannot go there. A sequence's last tile is brought in boxes as well, so they are smaller than tiles.
inline int few_rows_box(const Problem& p) {
  if (p.prefix_of) return 0;
  if (!p.block_table) return 32;
  return p.page_size % 32 == 0 ? 32 : p.page_size % 16 == 0 ? 16 : p.page_size % 8 == 0 ? 8 : 0;
}

// Rows that share the keys of a sequence and head, where they are few enough; else 0. Of packed queries as many as there are
// on average.
inline constexpr std::int64_t kFewRows = 16;
inline std::int64_t few_rows(const Problem& p) {
  if (p.width > kNarrow || p.value_width > kNarrow || few_rows_box(p) == 0) return 0;
  if (p.cu_q && p.queries > p.sequences) return 0;
  const std::int64_t rows = p.cu_q ? p.group : p.queries * p.group;
  return rows <= kFewRows ? rows : 0;
}

// Rows of 256 bytes come whole; of narrower ones, what is behind them would come along. Of few keys they do not gain by it.
inline constexpr std::int64_t kManyKeys = 2048;
inline bool few_rows_beside(const Problem& p) {
  return !p.k.f8 && p.width == kNarrow && p.value_width == kNarrow && p.room >= kManyKeys;
}

// Their box is 0 where the encoder refuses.
inline Maps few_rows_maps(const Problem& p) {
  Maps maps;
  const int box = hopper::encoder() != nullptr ? few_rows_box(p) : 0;
  const std::int64_t outer = p.block_table ? p.pages : p.cu_k ? 1 : p.sequences;
  const std::int64_t tokens = p.block_table ? p.page_size : p.room;
  const bool whole = few_rows_beside(p);
  if (box != 0 && map_tensor(maps.k, p.k, outer, tokens, p.heads, p.width, box, whole) &&
      map_tensor(maps.v, p.v, outer, tokens, p.heads, p.value_width, box, whole))
    maps.box = box;
  return maps;
}

// `blocks` share the splits of a sequence and head; if more than one, their sums go to `parts`, [row, split].
template <class T>
cudaError_t start_few(const Problem& p, const Maps& maps, float* parts, std::int64_t splits,
                      std::int64_t blocks, cudaStream_t stream);

// The same of an fp8 cache.
template <class T>
cudaError_t start_few_f8(const Problem& p, const Maps& maps, float* parts, std::int64_t splits,
                         std::int64_t blocks, cudaStream_t stream);

// A cluster has a split of a sequence and head (few_rows_cluster.cuh). splits > 1: their sums go to `parts`.
// p.split is not 0.
template <class T>
cudaError_t start_clusters(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);

}  // namespace rlk::cuda::attention
