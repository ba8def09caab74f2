// The launches of the attention kernel: a file for each element type, so that they compile side by side.
#pragma once

#include <algorithm>

#include "cuda/attention/sm90.h"

namespace rlk::cuda::attention {

// Blocks of `height` rows, more than there are where sequences are packed.
inline std::int64_t tiles_at_most(const Problem& p, std::int64_t height) {
  const std::int64_t rows = p.queries * p.group, tiles = (rows + height - 1) / height;
  return p.cu_q ? tiles + p.sequences : tiles * p.sequences;
}

// Pairs of a sequence and key head; of packed sequences heads alone.
inline int all_pairs(const Problem& p) { return static_cast<int>(p.heads * (p.cu_q ? 1 : p.sequences)); }
// Of them as many at a time as the L2 cache has room for the keys and values of; few, so that it holds them while every
// block of theirs passes. Packed sequences by their average length.
inline int pairs_abreast(const Problem& p) {
  constexpr std::int64_t kCache = 16 << 20;
  const std::int64_t keys = p.cu_k && p.sequences > 0 ? p.room / p.sequences : p.room;
  const std::int64_t bytes = std::max<std::int64_t>(1, 2 * keys * (p.width + p.value_width));
  const std::int64_t all = all_pairs(p), most = std::max<std::int64_t>(1, kCache / bytes);
  const std::int64_t turns = std::max<std::int64_t>(1, (all + most - 1) / most);
  return static_cast<int>((all + turns - 1) / turns);
}

// 576 and 512 channels: sums of splits always go to memory, even of a single one.
inline bool is_latent(const Problem& p) { return p.width > 256; }

// Whether v is the first channels of k.
inline bool values_in_keys(const Problem& p) {
  const bool many = p.block_table ? p.pages > 1 : p.sequences > 1;
  return p.k.data == p.v.data && p.value_width <= p.width && p.k.token == p.v.token &&
         (p.heads == 1 || p.k.head == p.v.head) && (!many || p.k.sequence == p.v.sequence) &&
         p.k_scale.data == p.v_scale.data && p.k_scale.stride == p.v_scale.stride;
}

inline std::int64_t row_count(const Problem& p) {
  return p.queries * (p.cu_q ? 1 : p.sequences) * p.heads * p.group;
}
inline std::int64_t splits_of(const Problem& p) {
  return p.split == 0 || p.room <= p.split ? 1 : (p.room + p.split - 1) / p.split;
}

// Blocks that take whole rows of wide heads keep the sums of other splits in memory: as many floats.
inline std::int64_t totals_of(const Problem& p) {
  if (std::max(p.width, p.value_width) <= kNarrow || splits_of(p) == 1) return 0;
  const bool middle = !p.k.f8 && p.width <= 192 && p.value_width <= 128;
  return std::min<std::int64_t>(tiles_at_most(p, 128) * p.heads, kMostBlocks) * 128 * (middle ? 128 : 256);
}
// Whether blocks leave sums of splits, whose number is given; those of latent heads do so even of one.
inline bool has_parts(const Problem& p, std::int64_t splits) { return splits > 1 || is_latent(p); }
// What the workspace has room for: such sums or totals, and behind them the number of items that blocks have taken where sequences
// have different lengths.
inline std::int64_t floats_of(const Problem& p, std::int64_t splits) {
  return has_parts(p, splits) ? row_count(p) * splits * (p.value_width + 2) : totals_of(p);
}
inline bool counts_items(const Problem& p) {
  return (p.cu_q || p.cu_k || p.kv_len) && p.sequences > 1 && p.partials == nullptr;
}
cudaError_t clear(unsigned* taken, cudaStream_t stream);

// Splits of an item where these leave their sums; 0: an item has all of a row's, and joins them. What takes the least time where
// an SM has an item, counted in the time of a tile of 128 rows; packed keys by their average length.
inline constexpr std::int64_t kMultiprocessors = 132;
inline std::int64_t splits_each(const Problem& p) {
  constexpr std::int64_t kStart = 3,
                         kFloats = std::int64_t{1} << 19;  // of an item or a launch; sums that pass meanwhile
  const auto ceil = [](std::int64_t x, std::int64_t y) { return (x + y - 1) / y; };
  const std::int64_t keys = p.cu_k && p.sequences > 0 ? p.room / p.sequences : p.room,
                     splits = p.split == 0 ? 1 : ceil(keys, p.split),
                     floats = row_count(p) * splits_of(p) * p.value_width;
  if (p.prefix_of || splits < 2 || floats > kMostParts) return 0;
  const std::int64_t items = tiles_at_most(p, 128) * p.heads, all = ceil(keys, attn128::kTile),
                     tiles = p.split / attn128::kTile,
                     most = std::min(splits, 1 + 8 * kMultiprocessors / std::max<std::int64_t>(items, 1)),
                     floats_of_tile = kFloats * std::max<std::int64_t>(1, (p.width + p.value_width) / 256);
  // Equal items leave SMs idle in their last round; of others one may be the longest, of a sequence with more keys than the average.
  const auto time = [&](std::int64_t runs, std::int64_t longest) {
    return counts_items(p) ? std::max(items * (all + runs * kStart) / kMultiprocessors, longest + kStart)
                           : ceil(items * runs, kMultiprocessors) * (longest + kStart);
  };
  std::int64_t best = 0, least = time(1, counts_items(p) ? 2 * all : all);
  for (std::int64_t runs = 2; runs <= most; ++runs)
    if (const std::int64_t each = ceil(splits, runs),
        total = time(runs, each * tiles) + 2 * kStart + floats / floats_of_tile;
        total < least)
      best = each, least = total;
  return best;
}

// splits > 1, or attention_part: an item has some, or one, and their sums go to `parts`; else wide heads' sums of other splits
// wait there.
template <class T>
cudaError_t start_forward(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);
template <class T>
cudaError_t start_wide(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);
// Of an fp8 cache, any widths; prefix_of is not there.
template <class T>
cudaError_t start_f8(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream);

}  // namespace rlk::cuda::attention
