// Host side of the portable rope kernel: cuts the work into blocks and picks the instantiation.
#pragma once

#include <algorithm>

#include "simt/rope/kernel.hpp"

namespace rlk::simt::rope {

inline constexpr int kMostLanes = kThreads / 2;
inline constexpr int kMostRoles = 64;  // a block's third axis

// 16-byte vectors need every address that a thread forms to be a multiple of 16 bytes.
inline bool on_16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
inline bool on_16(std::int64_t stride, std::int64_t element_bytes, std::int64_t extent) {
  return extent <= 1 || stride * element_bytes % 16 == 0;
}

inline bool data_vectors(const rotary::Geometry& g) {
  const std::int64_t size = g.bytes_per_element(), vec = 16 / size;
  if (g.offset % vec != 0 || g.rotary_dim % (2 * vec) != 0 || g.head_dim % vec != 0) return false;
  if (g.rotary_dim / vec > kMostLanes) return false;
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
  const std::int64_t size = t.type == Float::f32 ? 4 : 2;
  const bool own = t.type == Float::f32 || t.type == g.type;  // what kernels read in vectors
  return own && g.rows.axes == 1 && t.step == 1 && on_16(t.cos) && on_16(t.sin) &&
         on_16(t.cos_row, size, 2) && on_16(t.sin_row, size, 2) && on_16(t.cos_batch, size, 2) &&
         on_16(t.sin_batch, size, 2) && on_16(t.second, size, 2);
}

inline constexpr int kBlock = 128;       // threads that a block should have, at most
inline constexpr int kShare = 2;         // heads of a block, which share their tokens' table rows through L1
inline constexpr int kGridAxis = 65535;  // blocks along the second and third axis of a grid

struct Shape {
  dim3 grid, block;  // without the batches, which launch_batches() adds
  Ground ground;
};

// `roles` groups of `lanes` threads for a row. Blocks follow the memory: where neighbouring tokens are closer
// than neighbouring heads, all tokens come before the next heads.
inline Shape shape_of(const rotary::Geometry& g, int lanes, int roles, std::int64_t q_heads,
                      std::int64_t k_heads, bool tokens_close, int block = kBlock) {
  const auto over = [](std::int64_t n, std::int64_t by) { return (n + by - 1) / by; };
  const auto grow = [&](int& n, int limit, std::int64_t most, int other) {
    while (n < limit && n < most && 2 * n * other * lanes * roles <= block) n *= 2;
  };
  const std::int64_t most_heads = std::max(q_heads, k_heads);
  int tokens = 1, heads = 1;
  grow(heads, kShare, most_heads, tokens);
  grow(tokens, block, g.tokens, heads);
  grow(heads, block, most_heads, tokens);  // few tokens leave room
  Shape s{};
  s.block =
      dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(tokens * heads), static_cast<unsigned>(roles));
  while (1 << s.ground.token_bits < tokens) ++s.ground.token_bits;
  s.ground.group_heads = static_cast<std::uint32_t>(heads);
  const std::int64_t tiles = over(g.tokens, tokens), groups = over(q_heads, heads) + over(k_heads, heads);
  s.ground.tiles_first = tokens_close || 2 * tiles > kGridAxis;  // a split has sum tiles too
  s.grid = s.ground.tiles_first ? dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(groups))
                                : dim3(static_cast<unsigned>(groups), static_cast<unsigned>(tiles));
  return s;
}

// One launch for as many batches as a grid's third axis holds.
template <class Go>
hipError_t launch_batches(const rotary::Geometry& g, Shape& s, const Go& go) {
  if (s.grid.x == 0 || s.grid.y == 0) return hipSuccess;
  if (s.grid.y > kGridAxis || g.tokens >= INT32_MAX || g.batch >= INT32_MAX) return hipErrorInvalidValue;
  const auto batches = static_cast<std::uint32_t>(g.batch);
  hipError_t error = hipSuccess;
  for (s.ground.first_batch = 0; s.ground.first_batch < batches && error == hipSuccess;
       s.ground.first_batch += kGridAxis) {
    s.grid.z = std::min<unsigned>(batches - s.ground.first_batch, kGridAxis);
    error = go();
  }
  return error;
}

// `heads` of a row's thread: the second pack of adjacent pairs that stay is the next head's, or lies behind
// all first ones.
inline Steps steps_of(const rotary::Geometry& g, int vec, int heads) {
  const int half = g.rotary_dim / 2;
  Steps s{};
  s.slots = half / vec * heads;
  const bool apart = vec > 1 && g.in_adjacent && g.out_adjacent;  // packs of adjacent pairs, not neighbours
  s.pair_step = apart ? vec / 2 : vec;
  s.pair_gap = apart ? half / 2 : vec / 2;
  const auto place = [&](bool adjacent, std::int32_t& step, std::int32_t& gap) {
    step = adjacent && !apart ? 2 * vec : vec;
    gap = adjacent && !apart ? vec : half;
  };
  place(g.in_adjacent, s.in_step, s.in_gap);
  place(g.out_adjacent, s.out_step, s.out_gap);
  const rotary::Rows& r = g.rows;
  s.rows_are_tokens = r.positions.data == nullptr && r.starts.data == nullptr &&
                      r.cu_seqlens.data == nullptr && r.cp_size == 1 && r.count >= g.tokens;
  return s;
}

inline int copy_slots(const rotary::Geometry& g, int vec) {
  return g.in_place ? 0 : (g.head_dim - g.rotary_dim + 2 * vec - 1) / (2 * vec);
}

template <class T, class E, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, Find How>
hipError_t launch_rows(const rotary::Geometry& g, hipStream_t stream) {
  constexpr int kRowHeads = kHeads<Vec, InAdjacent, OutAdjacent>;
  const auto rows = [](std::int64_t heads) { return (heads + kRowHeads - 1) / kRowHeads; };
  const rotary::Part &q = g.part[0], &k = g.part[1];
  Cut c{};
  c.steps = steps_of(g, Vec, kRowHeads);
  c.copy_slots = copy_slots(g, Vec);
  const int lanes = std::min(c.steps.slots, kMostLanes);
  const int copiers =
      std::min((c.copy_slots + lanes - 1) / lanes, std::min(kThreads / lanes, kMostRoles) - 1);
  Shape shape =
      shape_of(g, lanes, 1 + copiers, rows(q.heads), rows(k.heads), q.heads <= 1 || q.x_token <= q.x_head);
  c.q_groups =
      static_cast<std::uint32_t>((rows(q.heads) + shape.ground.group_heads - 1) / shape.ground.group_heads);
  return launch_batches(g, shape, [&] {
    c.ground = shape.ground;
    hipLaunchKernelGGL((rotate_rows<T, E, Vec, InAdjacent, OutAdjacent, Full, How>), shape.grid, shape.block,
                       0, stream, g, c);
    return hipGetLastError();
  });
}

template <class T, class E, bool Full, Find How>
hipError_t launch_pairing(const rotary::Geometry& g, hipStream_t stream) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  if (g.in_adjacent) {
    return g.out_adjacent ? launch_rows<T, E, kVec, true, true, Full, How>(g, stream)
                          : launch_rows<T, E, kVec, true, false, Full, How>(g, stream);
  }
  return g.out_adjacent ? launch_rows<T, E, kVec, false, true, Full, How>(g, stream)
                        : launch_rows<T, E, kVec, false, false, Full, How>(g, stream);
}

template <class T, class E, Find How>
hipError_t launch_width(const rotary::Geometry& g, hipStream_t stream) {
  return g.table.full ? launch_pairing<T, E, true, How>(g, stream)
                      : launch_pairing<T, E, false, How>(g, stream);
}

// Where entries are read one at a time, one form serves both widths: the second entry of a pair is the first
// when the table is half. With one element at a time all pairings are one.
template <class T>
hipError_t launch(const rotary::Geometry& g, hipStream_t stream) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  if (!data_vectors(g)) return launch_rows<T, void, 1, false, false, true, Find::entries>(g, stream);
  if (!table_vectors(g)) return launch_pairing<T, void, true, Find::entries>(g, stream);
  if (copy_slots(g, kVec) > 0 || !steps_of(g, kVec, 1).rows_are_tokens) {
    return launch_width<T, void, Find::rows>(g, stream);
  }
  return g.table.type == Float::f32 ? launch_width<T, float, Find::tokens>(g, stream)
                                    : launch_width<T, T, Find::tokens>(g, stream);
}

inline hipError_t launch(const rotary::Geometry& g, hipStream_t stream) {
  switch (g.type) {
    case Float::f32:
      return launch<float>(g, stream);
    case Float::bf16:
      return launch<bf16>(g, stream);
    default:
      return launch<fp16>(g, stream);
  }
}

}  // namespace rlk::simt::rope
