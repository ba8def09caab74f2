// Rotates q, or q and k, in one launch. Portable: HIP, CUDA and host fibers. Arithmetic id "rope32".
//
// Traffic: every element is read once and written once (4 bytes per bf16 element), a table row once per
// block, from L2; the block's other heads find it in L1. A thread owns one slot of one row: 16 bytes of first
// members and 16 bytes of second members (Vec pairs), or 16 bytes of adjacent pairs in each of two heads, or
// 32 bytes of pass-through dims. It issues its loads, those of its factors, turns, stores and is done.
//
// Blocks are small, live briefly and follow the memory: their rows are neighbouring tokens of a few
// neighbouring heads, and the next block is the one whose data comes next (more tokens where tokens lie side
// by side, the next heads where heads do). That keeps what is in flight at any time within a few short
// stretches of memory, which DRAM rewards, and makes every instruction before the first load count: hence no
// division, no loop and one branch on the way there. On an H200 each of these was slower by 1% to 6%: threads
// that walk over heads with their factors in registers, deeper unrolling, the copy engine with a ring in
// shared memory, streaming (evict-first) accesses, fewer blocks at a time.
#pragma once

#include <cstdint>

#include "arithmetic/rope/math.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::rope {

inline constexpr int kThreads = 256;

// How blocks and threads lie over batch, tokens and heads; worked out on the host by shape_of() in
// launch.hpp, so that a thread finds its place without a division. A block's rows (threadIdx.y) are
// 2^token_bits neighbouring tokens of each of its heads.
struct Ground {
  bool tiles_first;  // blockIdx.x counts tiles of tokens and y groups of heads, or the other way round
  std::int32_t token_bits;
  std::uint32_t group_heads;  // rows that a block has of each of its tokens
  std::uint32_t first_batch;
};
struct Spot {
  std::uint32_t batch, token, group, head;  // the head within the group
};
__device__ __forceinline__ Spot spot_of(const Ground& g, unsigned skipped_tiles = 0) {
  const unsigned tile = (g.tiles_first ? blockIdx.x : blockIdx.y) - skipped_tiles;
  const unsigned outer = threadIdx.y >> g.token_bits, inner = threadIdx.y - (outer << g.token_bits);
  return {g.first_batch + blockIdx.z, (tile << g.token_bits) + inner, g.tiles_first ? blockIdx.y : blockIdx.x,
          outer};
}

// The factor of 32 bits saves a multiplication.
__device__ __forceinline__ std::int64_t along(std::uint32_t index, std::int64_t stride) {
  return std::int64_t{index} * stride;
}

// Where a slot's two packs lie, and which pairs they are: first + slot * step, the second `gap` behind.
// Lanes of a wave read and write whole sectors: neighbouring slots hold neighbouring packs, and the second
// pack of an adjacent-to-adjacent slot lies behind all first ones, or in the next head. Only where the places
// change (adjacent to half) is one side read or written in steps of 32 bytes.
struct Steps {
  std::int32_t slots;
  std::int32_t in_step, in_gap, out_step, out_gap, pair_step, pair_gap;
  bool rows_are_tokens;  // table row t belongs to token t, and all are there
};

// How a thread comes to its table entries, from the most frequent case to the most general. Kernels of their
// own, because code costs registers and instruction fetches even where it never runs.
enum class Find {
  tokens,   // row t belongs to token t, the table's type is known, and every dim turns or stays where it is
  rows,     // each token has a row, its own or one found by its position, its sequence or its rank
  entries,  // one entry at a time: M-RoPE, and tables that cannot be read in vectors
};

struct Cut {
  Ground ground;
  Steps steps;
  std::int32_t copy_slots;  // of a row: 32 bytes of pass-through dims each
  std::uint32_t q_groups;   // the groups of the first part; those of the second follow
};

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <class T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <class T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& v) {
  *reinterpret_cast<Pack<T, N>*>(p) = v;
}

// From a table, which every head reads again while data streams past: L2 gives up such lines last. Without
// that a twentieth of the reads of a table of 4 MB goes to memory.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_table(const T* p) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Pack<T, N>) == 16) {
    uint4 v;
    asm("{\n.reg .b64 keep;\n"
        "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n"
        "ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], keep;\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return __builtin_bit_cast(Pack<T, N>, v);
  }
#endif
  return load<T, N>(p);
}

// Factors of some pairs of one token, signed for the direction: ya = fma(a, c1, b * m1), yb = fma(b, c2, a *
// m2), where m2 = -m1 with half-width tables. They come in runs of neighbouring table entries, as long as a
// pack of adjacent pairs has pairs: one run, or two that are `gap` apart.
template <int Pairs, bool Full>
struct Factors {
  float c1[Pairs], m1[Pairs], c2[Full ? Pairs : 1], m2[Full ? Pairs : 1];

  __device__ __forceinline__ rotary::Turn at(int i) const {
    if constexpr (Full) {
      return {c1[i], m1[i], c2[i], m2[i]};
    } else {
      return {c1[i], m1[i], c1[i], -m1[i]};
    }
  }
};

// Entries of cos and sin as the table has them, before signs.
template <int Pairs, bool Full>
struct Entries {
  float c1[Pairs], s1[Pairs], c2[Full ? Pairs : 1], s2[Full ? Pairs : 1];
};

template <class E, int Run, int Pairs>
__device__ __forceinline__ void read_runs(const void* base, std::int64_t first, int gap,
                                          float (&out)[Pairs]) {
#pragma unroll
  for (int i = 0; i < Pairs; i += Run) {
    const auto run = load_table<E, Run>(static_cast<const E*>(base) + first + (i == 0 ? 0 : gap));
#pragma unroll
    for (int j = 0; j < Run; ++j) out[i + j] = to_float(run.v[j]);
  }
}
template <class E, int Run, int Pairs, bool Full>
__device__ __forceinline__ void read_table(const rotary::Table& t, std::int64_t c, std::int64_t s, int gap,
                                           Entries<Pairs, Full>& e) {
  read_runs<E, Run>(t.cos, c, gap, e.c1);
  read_runs<E, Run>(t.sin, s, gap, e.s1);
  if constexpr (Full) {
    read_runs<E, Run>(t.cos, c + t.second, gap, e.c2);
    read_runs<E, Run>(t.sin, s + t.second, gap, e.s2);
  }
}

// Entries of a row that the table does not have: no angle for a negative position where these are allowed,
// else NaN.
template <int Pairs, bool Full>
__device__ __forceinline__ void put_absent(const rotary::Rows& rows, std::int64_t row, int i,
                                           Entries<Pairs, Full>& e) {
  const bool still = row < 0 && rows.negative_stay;
  const float cos = still ? 1.0f : bits_float(0x7fffffffu);
  e.c1[i] = cos, e.s1[i] = 0;
  if constexpr (Full) e.c2[i] = cos, e.s2[i] = 0;
}

// Any table, any positions, one entry at a time.
template <int Run, int Pairs, bool Full>
__device__ __forceinline__ void read_entries(const rotary::Geometry& g, std::int64_t batch,
                                             std::int64_t token, int pair0, int pair1,
                                             Entries<Pairs, Full>& out) {
  const rotary::Table& t = g.table;
  std::int64_t rows[3] = {row_of(g.rows, g.tokens, batch, token), 0, 0};
  if (g.rows.axes > 1) {
    rows[1] = row_of(g.rows, g.tokens, batch, token, 1);
    rows[2] = row_of(g.rows, g.tokens, batch, token, 2);
  }
#pragma unroll
  for (int i = 0; i < Pairs; ++i) {
    const int pair = i < Run ? pair0 + i : pair1 + i - Run,
              axis = g.rows.axes > 1 ? axis_of(g.rows, pair) : 0;
    const std::int64_t row = axis == 0 ? rows[0] : axis == 1 ? rows[1] : rows[2];
    const bool inside = row >= 0 && row < g.rows.count;
    const std::int64_t entry = std::int64_t{pair} * t.step;
    const std::int64_t c = batch * t.cos_batch + (inside ? row : 0) * t.cos_row + entry;
    const std::int64_t s = batch * t.sin_batch + (inside ? row : 0) * t.sin_row + entry;
    out.c1[i] = rotary::table_value(t.cos, t.type, c);
    out.s1[i] = rotary::table_value(t.sin, t.type, s);
    if constexpr (Full) {
      out.c2[i] = rotary::table_value(t.cos, t.type, c + t.second);
      out.s2[i] = rotary::table_value(t.sin, t.type, s + t.second);
    }
    if (!inside) put_absent(g.rows, row, i, out);
  }
}

// Factors of the pairs of a slot. E is the type of the table's entries where it is known.
template <class T, class E, int Vec, Find How, int Pairs, bool Full>
__device__ __forceinline__ void read_factors(const rotary::Geometry& g, const Steps& steps,
                                             std::uint32_t batch, std::uint32_t token, int slot,
                                             Factors<Pairs, Full>& f) {
  constexpr int kRun = Vec > 1 ? Vec / 2 : 1;
  const rotary::Table& t = g.table;
  const int pair = slot * steps.pair_step;
  Entries<Pairs, Full> e;
  if constexpr (How == Find::entries) {
    read_entries<kRun>(g, batch, token, pair, pair + steps.pair_gap, e);
  } else {
    std::int64_t row = token;
    bool inside = true;
    if (How == Find::rows && !steps.rows_are_tokens) {
      row = row_of(g.rows, g.tokens, batch, token);
      inside = row >= 0 && row < g.rows.count;
    }
    const std::int64_t there = inside ? row : 0;
    const std::int64_t c = along(batch, t.cos_batch) + there * t.cos_row + pair,
                       s = along(batch, t.sin_batch) + there * t.sin_row + pair;
    if constexpr (How == Find::tokens) {
      read_table<E, kRun>(t, c, s, steps.pair_gap, e);
    } else if (t.type == Float::f32) {
      read_table<float, kRun>(t, c, s, steps.pair_gap, e);
    } else {  // the data's own type
      read_table<T, kRun>(t, c, s, steps.pair_gap, e);
    }
    if (!inside) {
#pragma unroll
      for (int i = 0; i < Pairs; ++i) put_absent(g.rows, row, i, e);
    }
  }
#pragma unroll
  for (int i = 0; i < Pairs; ++i) {
    f.c1[i] = e.c1[i];
    if constexpr (Full) {
      f.c2[i] = e.c2[i];
      f.m1[i] = g.transpose ? e.s2[i] : -e.s1[i];
      f.m2[i] = g.transpose ? -e.s1[i] : e.s2[i];
    } else {
      f.m1[i] = g.transpose ? e.s1[i] : -e.s1[i];
    }
  }
}

// Vec pairs from two packs: as they lie in memory (adjacent) or already apart (half).
template <class T, int Vec>
__device__ __forceinline__ void pair_up(const Pack<T, Vec> (&in)[2], bool adjacent, int i, float& a,
                                        float& b) {
  if (adjacent) {
    a = to_float(in[2 * i / Vec].v[2 * i % Vec]);
    b = to_float(in[(2 * i + 1) / Vec].v[(2 * i + 1) % Vec]);
  } else {
    a = to_float(in[0].v[i]);
    b = to_float(in[1].v[i]);
  }
}

// Two values into neighbouring elements, rounded by one instruction where there is one.
template <class T, int Vec>
__device__ __forceinline__ void put_two(Pack<T, Vec>& out, int i, float first, float second) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    std::uint32_t both;
    if constexpr (__is_same(T, bf16)) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    }
    out.v[i] = T{static_cast<std::uint16_t>(both)};
    out.v[i + 1] = T{static_cast<std::uint16_t>(both >> 16)};
    return;
  }
#endif
  out.v[i] = from_float<T>(first);
  out.v[i + 1] = from_float<T>(second);
}

// Turns the Vec pairs of `in` into `out`. With factors of half as many pairs, both packs turn by the same.
template <class In, class T, int Vec, bool InAdjacent, bool OutAdjacent, int Pairs, bool Full>
__device__ __forceinline__ void rotate_packs(const Pack<In, Vec> (&in)[2], Pack<T, Vec> (&out)[2],
                                             const Factors<Pairs, Full>& f) {
  float ya[Vec], yb[Vec];
#pragma unroll
  for (int i = 0; i < Vec; ++i) {
    float a, b;
    pair_up<In, Vec>(in, InAdjacent, i, a, b);
    rotate(f.at(i % Pairs), a, b, ya[i], yb[i]);
  }
  if constexpr (Vec == 1) {
    out[0].v[0] = from_float<T>(ya[0]);
    out[1].v[0] = from_float<T>(yb[0]);
  } else if constexpr (OutAdjacent) {
#pragma unroll
    for (int i = 0; i < Vec; ++i) put_two(out[2 * i / Vec], 2 * i % Vec, ya[i], yb[i]);
  } else {
#pragma unroll
    for (int i = 0; i < Vec; i += 2) {
      put_two(out[0], i, ya[i], ya[i + 1]);
      put_two(out[1], i, yb[i], yb[i + 1]);
    }
  }
}

// A pack from x to y, unchanged, and the one at `second` where there is one.
template <class T, int Vec>
__device__ __forceinline__ void copy_packs(const T* x, T* y, int first, int second, bool two) {
  if (!two) second = first;
  const Pack<T, Vec> a = load<T, Vec>(x + first), b = load<T, Vec>(x + second);
  store<T, Vec>(y + first, a);
  store<T, Vec>(y + second, b);
}

// Dims outside the rotary range: pack `slot` of them and the one `slots` behind it.
template <class T, int Vec>
__device__ __forceinline__ void copy_slot(const rotary::Geometry& g, const T* x, T* y, int slot, int slots) {
  int first = slot * Vec, second = (slot + slots) * Vec;
  if (first >= g.offset) first += g.rotary_dim;
  if (second >= g.offset) second += g.rotary_dim;
  copy_packs<T, Vec>(x, y, first, second, second < g.head_dim);
}

// Adjacent pairs that stay where they are lie within one pack, so a thread takes the pack of two neighbouring
// heads: the same factors serve both, and the lanes of a row read it in one go.
template <int Vec, bool InAdjacent, bool OutAdjacent>
inline constexpr int kHeads = (Vec > 1) && (InAdjacent) && (OutAdjacent) ? 2 : 1;

// threadIdx.z: 0 turns the rotary slots, the others copy the pass-through slots, so whole waves do the same.
template <class T, class E, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, Find How>
__global__ void __launch_bounds__(kThreads, Full ? 2 : 4)
    rotate_rows(const rotary::Geometry g, const Cut cut) {
  constexpr int kRowHeads = kHeads<Vec, InAdjacent, OutAdjacent>;
  const Spot spot = spot_of(cut.ground);
  const bool second = spot.group >= cut.q_groups;
  // Member by member: a copy of the chosen Part would go through local memory.
  const auto pick = [second](auto q, auto k) { return second ? k : q; };
  const std::uint32_t group = second ? spot.group - cut.q_groups : spot.group,
                      head = (group * cut.ground.group_heads + spot.head) * kRowHeads,
                      heads = static_cast<std::uint32_t>(pick(g.part[0].heads, g.part[1].heads));
  if (spot.token >= static_cast<std::uint32_t>(g.tokens) || head >= heads) return;
  const std::int64_t x_head = pick(g.part[0].x_head, g.part[1].x_head),
                     y_head = pick(g.part[0].y_head, g.part[1].y_head);
  const T* x = static_cast<const T*>(pick(g.part[0].x, g.part[1].x)) +
               along(spot.batch, pick(g.part[0].x_batch, g.part[1].x_batch)) +
               along(spot.token, pick(g.part[0].x_token, g.part[1].x_token)) + along(head, x_head);
  T* y = static_cast<T*>(pick(g.part[0].y, g.part[1].y)) +
         along(spot.batch, pick(g.part[0].y_batch, g.part[1].y_batch)) +
         along(spot.token, pick(g.part[0].y_token, g.part[1].y_token)) + along(head, y_head);
  const bool both = kRowHeads == 1 || head + 1 < heads;  // the second pack is there
  const Steps& steps = cut.steps;
  const auto lane = static_cast<std::int32_t>(threadIdx.x), lanes = static_cast<std::int32_t>(blockDim.x);
  if (How != Find::tokens && threadIdx.z != 0) {
    const auto role = static_cast<std::int32_t>(threadIdx.z) - 1,
               copiers = static_cast<std::int32_t>(blockDim.z) - 1;
    for (std::int32_t slot = lane + role * lanes; slot < cut.copy_slots; slot += copiers * lanes) {
      copy_slot<T, Vec>(g, x, y, slot, cut.copy_slots);
      if (kRowHeads > 1 && both) copy_slot<T, Vec>(g, x + x_head, y + y_head, slot, cut.copy_slots);
    }
    return;
  }
  for (std::int32_t slot = lane; slot < steps.slots; slot += lanes) {
    const T* from = x + g.offset + slot * steps.in_step;
    T* to = y + g.offset + slot * steps.out_step;
    std::int64_t in_gap = steps.in_gap, out_gap = steps.out_gap;
    if (kRowHeads > 1) in_gap = both ? x_head : 0, out_gap = y_head;
    const Pack<T, Vec> in[2] = {load<T, Vec>(from), load<T, Vec>(from + in_gap)};
    Factors<Vec / kRowHeads, Full> f;  // behind the loads of the data, so that both latencies overlap
    read_factors<T, E, Vec, How>(g, steps, spot.batch, spot.token, slot, f);
    Pack<T, Vec> out[2];
    rotate_packs<T, T, Vec, InAdjacent, OutAdjacent>(in, out, f);
    store<T, Vec>(to, out[0]);
    if (both) store<T, Vec>(to + out_gap, out[1]);
    if constexpr (Vec > 1) break;  // as many lanes as slots
  }
}

}  // namespace rlk::simt::rope
