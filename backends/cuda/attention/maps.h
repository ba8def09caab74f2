// Keys and values as TMA walks them: [sequence or page, token, head, channel] in boxes of some tokens by 64 channels, which
// lie in shared memory as lines of 128 bytes, swizzled by that width. Behind the tensor's end it reads zeros; behind a
// sequence's it would go on into the next.
#pragma once

#include "cuda/attention/sm90.h"
#include "cuda/hopper/tensor_map.h"

namespace rlk::cuda::attention {

using attn128::kTile;

inline constexpr int kBoxRows = 8;  // of the smallest boxes: what the swizzle repeats after

struct Maps {
  CUtensorMap k, v, q;
  CUtensorMap v_rows;  // v in boxes of kBoxRows tokens
  int box = 0;         // tokens of a box; 0: TMA cannot go there, threads copy
  int queries = 0;     // likewise, of boxes of 64 rows of them
};

// A tile is one box, or pages that fill it.
inline int box_of(const Problem& p) {
  if (p.k.f8) return 0;  // threads widen it
  if (!p.block_table || p.page_size % kTile == 0) return kTile;
  return p.page_size >= 8 && kTile % p.page_size == 0 ? static_cast<int>(p.page_size) : 0;
}

// [outer, tokens, heads, width] in boxes of `box` tokens by `together` heads by a line of channels (64, of fp8 128); whole: by all
// channels, a multiple of 64, whose lines lie side by side. False where the encoder refuses.
inline bool map_tensor(CUtensorMap& map, const attn128::Tensor& t, std::int64_t outer, std::int64_t tokens,
                       int heads, int width, int box, bool whole = false, int together = 1) {
  const cuuint32_t line = t.f8 ? 128 : 64;
  const cuuint64_t sizes[5] = {64, static_cast<cuuint64_t>(whole ? width / 64 : width),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens),
                               static_cast<cuuint64_t>(outer)};
  const std::int64_t steps[3] = {t.head, t.token, t.sequence};
  cuuint64_t strides[4] = {128};
  for (int i = 0; i < 3; ++i) {
    const std::int64_t step = sizes[i + 2] > 1 ? steps[i] : width;  // a single row may come with any
    if (step <= 0 || sizes[i + 2] < 1 || sizes[i + 2] > INT32_MAX) return false;
    strides[i + 1] = static_cast<cuuint64_t>(step * t.element_size());
  }
  const cuuint32_t lines = whole ? static_cast<cuuint32_t>(width / 64) : line,
                   boxes[5] = {64, lines, static_cast<cuuint32_t>(together), static_cast<cuuint32_t>(box), 1},
                   every[5] = {1, 1, 1, 1, 1};
  const int skip = whole ? 0 : 1;
  // As measured, of what L2 takes at once.
  const auto at_once = whole ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const auto type = t.f8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return hopper::encoder()(&map, type, 5 - skip, t.data, sizes + skip, strides + skip, boxes + skip,
                           every + skip, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, at_once,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline Maps maps_of(const Problem& p) {
  Maps maps;
  const int box = hopper::encoder() != nullptr ? box_of(p) : 0;
  const std::int64_t outer = p.block_table ? p.pages : p.cu_k ? 1 : p.sequences;
  const std::int64_t tokens = p.block_table ? p.page_size : p.room;
  if (box != 0 && map_tensor(maps.k, p.k, outer, tokens, p.heads, p.width, box) &&
      map_tensor(maps.v, p.v, outer, tokens, p.heads, p.value_width, box) &&
      map_tensor(maps.v_rows, p.v, outer, tokens, p.heads, p.value_width, kBoxRows))
    maps.box = box;
  if (hopper::encoder() != nullptr && 64 % p.group == 0 &&
      map_tensor(maps.q, p.q, p.cu_q ? 1 : p.sequences, p.queries, p.heads * p.group, p.width, 64 / p.group,
                 false, p.group))
    maps.queries = 64 / p.group;
  return maps;
}

}  // namespace rlk::cuda::attention
