// Host side of the portable rope kernel: cuts the work into blocks and picks the instantiation.
#pragma once

#include <algorithm>

#include "rope_kernel.hpp"

namespace rlk::simt::rope_kernel {

// 16-byte vectors need every address that a thread forms to be a multiple of 16 bytes.
inline bool on_16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
inline bool on_16(std::int64_t stride, std::int64_t element_bytes, std::int64_t extent) {
  return extent <= 1 || stride * element_bytes % 16 == 0;
}

inline bool data_vectors(const rotary::Geometry& g) {
  const std::int64_t size = g.bytes_per_element(), vec = 16 / size;
  if (g.offset % vec != 0 || g.rotary_dim % (2 * vec) != 0 || g.head_dim % vec != 0) return false;
  for (int i = 0; i < g.parts; ++i) {
    const rotary::Part& p = g.part[i];
    if (!on_16(p.x) || !on_16(p.y)) return false;
    if (!on_16(p.x_batch, size, g.batch) || !on_16(p.y_batch, size, g.batch)) return false;
    if (!on_16(p.x_token, size, g.tokens) || !on_16(p.y_token, size, g.tokens)) return false;
    if (!on_16(p.x_head, size, p.heads) || !on_16(p.y_head, size, p.heads)) return false;
  }
  return true;
}

inline bool table_vectors(const rotary::Geometry& g) {
  const rotary::Table& t = g.table;
  const std::int64_t size = t.type == rotary::Float::f32 ? 4 : 2;
  return g.rows.axes == 1 && t.step == 1 && on_16(t.cos) && on_16(t.sin) && on_16(t.cos_row, size, 2) &&
         on_16(t.sin_row, size, 2) && on_16(t.cos_batch, size, 2) && on_16(t.sin_batch, size, 2) &&
         on_16(t.second, size, 2);
}

inline constexpr int kUnroll = 2;

inline Cut cut(const rotary::Geometry& g, bool vectors, int unroll, int passes) {
  const int vec = vectors ? static_cast<int>(16 / g.bytes_per_element()) : 1;
  Cut c{};
  c.rotary_slots = g.rotary_dim / 2 / vec;
  c.slots = c.rotary_slots + (g.in_place ? 0 : (g.head_dim - g.rotary_dim + 2 * vec - 1) / (2 * vec));
  c.lanes = std::min(c.slots, kThreads);
  c.lanes_inverse = inverse_of(c.lanes);
  c.table_vectors = vectors && table_vectors(g);

  const int rows = kThreads / c.lanes;
  const rotary::Part& q = g.part[0];
  const auto heads = static_cast<int>(std::min<std::int64_t>(std::max(q.heads, g.part[1].heads), rows));
  c.token_first = g.tokens > 1 && (q.heads <= 1 || q.x_token <= q.x_head);
  if (c.token_first) {
    c.block_tokens = static_cast<int>(std::min<std::int64_t>(rows, g.tokens));
    c.block_heads = std::clamp(rows / c.block_tokens, 1, heads);
  } else {  // two warps of neighbouring heads, then the next token
    c.block_heads = std::clamp((64 + c.lanes - 1) / c.lanes, 1, heads);
    c.block_tokens =
        static_cast<int>(std::min<std::int64_t>(rows / c.block_heads, std::max<std::int64_t>(g.tokens, 1)));
  }
  c.token_blocks = static_cast<std::int32_t>((g.tokens + c.block_tokens - 1) / c.block_tokens);
  c.inner_inverse = inverse_of(c.token_first ? c.block_tokens : c.block_heads);
  c.flat = c.token_blocks > 65535 || g.batch > 65535;
  for (int i = 0; i < g.parts; ++i) {
    c.heads_per_block[i] = c.block_heads * unroll * passes;
    c.head_groups[i] =
        static_cast<std::int32_t>((g.part[i].heads + c.heads_per_block[i] - 1) / c.heads_per_block[i]);
  }
  c.blocks = g.batch * std::int64_t{c.token_blocks} * (c.head_groups[0] + c.head_groups[1]);
  return c;
}

// A thread walks over as many heads as it can, so that a table row is read once for all of them, as long as
// there are blocks enough for two on every multiprocessor of the largest GPUs.
inline Cut cut(const rotary::Geometry& g, bool vectors, int unroll) {
  constexpr std::int64_t kEnough = 256;
  Cut c = cut(g, vectors, unroll, 16);
  for (int passes = 8; passes > 0 && c.blocks < kEnough; passes /= 2) c = cut(g, vectors, unroll, passes);
  return c;
}

inline dim3 grid_of(const rotary::Geometry& g, const Cut& c) {
  const auto groups = static_cast<unsigned>(c.head_groups[0] + c.head_groups[1]);
  return c.flat ? dim3(static_cast<unsigned>(c.blocks))
                : dim3(groups, static_cast<unsigned>(c.token_blocks), static_cast<unsigned>(g.batch));
}

template <class T>
hipError_t launch(const rotary::Geometry& g, hipStream_t stream) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  const bool vectors = data_vectors(g);
  const int unroll = vectors && table_vectors(g) ? kUnroll : 1;
  const Cut c = cut(g, vectors, unroll);
  if (c.blocks == 0) return hipSuccess;
  const auto go = [&](auto kernel) {
    hipLaunchKernelGGL(kernel, grid_of(g, c), dim3(kThreads), 0, stream, g, c);
    return hipGetLastError();
  };
  // Where entries are read one at a time, one form serves both widths: the second entry of a pair is the
  // first when the table is half. With one element at a time all forms are one.
  const int form = (g.in_adjacent ? 2 : 0) + (g.out_adjacent ? 1 : 0);
  if (!vectors) return go(&rotate_rows<T, 1, false, false, true, true, 1>);
  if (!c.table_vectors) {
    return form == 0   ? go(&rotate_rows<T, kVec, false, false, true, true, 1>)
           : form == 1 ? go(&rotate_rows<T, kVec, false, true, true, true, 1>)
           : form == 2 ? go(&rotate_rows<T, kVec, true, false, true, true, 1>)
                       : go(&rotate_rows<T, kVec, true, true, true, true, 1>);
  }
  if (g.table.full) {
    return form == 0   ? go(&rotate_rows<T, kVec, false, false, true, false, kUnroll>)
           : form == 1 ? go(&rotate_rows<T, kVec, false, true, true, false, kUnroll>)
           : form == 2 ? go(&rotate_rows<T, kVec, true, false, true, false, kUnroll>)
                       : go(&rotate_rows<T, kVec, true, true, true, false, kUnroll>);
  }
  return form == 0   ? go(&rotate_rows<T, kVec, false, false, false, false, kUnroll>)
         : form == 1 ? go(&rotate_rows<T, kVec, false, true, false, false, kUnroll>)
         : form == 2 ? go(&rotate_rows<T, kVec, true, false, false, false, kUnroll>)
                     : go(&rotate_rows<T, kVec, true, true, false, false, kUnroll>);
}

inline hipError_t launch(const rotary::Geometry& g, hipStream_t stream) {
  switch (g.type) {
    case rotary::Float::f32:
      return launch<float>(g, stream);
    case rotary::Float::bf16:
      return launch<bf16>(g, stream);
    default:
      return launch<fp16>(g, stream);
  }
}

}  // namespace rlk::simt::rope_kernel
