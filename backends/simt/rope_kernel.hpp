// Rotates q, or q and k, in one launch. Portable: HIP, CUDA and host fibers. Arithmetic id "rope32".
//
// Traffic: every element is read once and written once (4 bytes per bf16 element), a table row once per
// block, from L2; the block's other heads find it in L1. A thread owns one slot of one row: 16 bytes of first
// members and 16 bytes of second members (Vec pairs), or 32 bytes of pass-through dims. It issues its loads,
// those of its factors, turns, stores and is done.
//
// Blocks are small, live briefly and follow the memory: their rows are neighbouring tokens of a few
// neighbouring heads, and the next block is the one whose data comes next (more tokens where tokens lie side
// by side, the next heads where heads do). That keeps what is in flight at any time within a few short
// stretches of memory, which DRAM rewards, and makes every instruction before the first load count: hence no
// division, no loop and one branch on the way there. On an H200 each of these was slower by 1% to 6%: threads
// that walk over heads with their factors in registers, deeper unrolling, the copy engine with a ring in
// shared memory, streaming (evict-first) accesses.
#pragma once

#include <cstdint>

#include "rope_math.hpp"
#include "simt.hpp"

namespace rlk::simt::rope_kernel {

inline constexpr int kThreads = 256;

// How blocks and threads lie over batch, tokens and heads; worked out on the host by shape_of() in
// rope_launch.hpp, so that a thread finds its place without a division. A block's rows (threadIdx.y) are
// 2^token_bits neighbouring tokens of each of its heads.
struct Ground {
  bool tiles_first;  // blockIdx.x counts tiles of tokens and y groups of heads, or the other way round
  std::int32_t token_bits;
  std::int32_t group_heads;  // heads of a block
  std::int64_t first_batch;
};
struct Spot {
  std::int64_t batch, token;
  std::int32_t group, head;  // the head within the group
};
__device__ __forceinline__ Spot spot_of(const Ground& g, unsigned skipped_tiles = 0) {
  const unsigned tile = (g.tiles_first ? blockIdx.x : blockIdx.y) - skipped_tiles;
  const unsigned outer = threadIdx.y >> g.token_bits, inner = threadIdx.y - (outer << g.token_bits);
  return {g.first_batch + blockIdx.z, std::int64_t{(tile << g.token_bits) + inner},
          static_cast<std::int32_t>(g.tiles_first ? blockIdx.y : blockIdx.x),
          static_cast<std::int32_t>(outer)};
}

// Where a slot's two packs lie, and which pairs they are: first + slot * step, the second `gap` behind.
// Lanes of a wave read and write whole sectors: neighbouring slots hold neighbouring packs, and the second
// pack of an adjacent-to-adjacent slot lies behind all first ones. Only where the places change (adjacent to
// half) is one side read or written in steps of 32 bytes.
struct Steps {
  std::int32_t slots;
  std::int32_t in_step, in_gap, out_step, out_gap, pair_step, pair_gap;
  bool rows_are_tokens;  // table row t belongs to token t, and all are there
};

struct Cut {
  Ground ground;
  Steps steps;
  std::int32_t copy_slots;  // of a row: 32 bytes of pass-through dims each
  std::int32_t q_groups;    // the groups of the first part; those of the second follow
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

// Factors of Vec pairs of one token, signed for the direction: ya = fma(a, c1, b * m1), yb = fma(b, c2, a *
// m2), where m2 = -m1 with half-width tables. The first half of the pairs is one run of table entries, the
// second another.
template <int Vec, bool Full>
struct Factors {
  float c1[Vec], m1[Vec], c2[Full ? Vec : 1], m2[Full ? Vec : 1];

  __device__ __forceinline__ Turn at(int i) const {
    if constexpr (Full) {
      return {c1[i], m1[i], c2[i], m2[i]};
    } else {
      return {c1[i], m1[i], c1[i], -m1[i]};
    }
  }
};

// Entries of cos and sin as the table has them, before signs.
template <int Vec, bool Full>
struct Entries {
  float c1[Vec], s1[Vec], c2[Full ? Vec : 1], s2[Full ? Vec : 1];
};

// Neighbouring entries in 16 or 8 bytes: those of the first half of the pairs, and `gap` behind of the
// second.
template <class E, int Vec>
__device__ __forceinline__ void read_runs(const void* base, std::int64_t first, int gap, float (&out)[Vec]) {
  constexpr int kRun = Vec > 1 ? Vec / 2 : 1;
#pragma unroll
  for (int i = 0; i < Vec; i += kRun) {
    const auto run = load<E, kRun>(static_cast<const E*>(base) + first + (i == 0 ? 0 : gap));
#pragma unroll
    for (int j = 0; j < kRun; ++j) out[i + j] = to_float(run.v[j]);
  }
}
template <class E, int Vec, bool Full>
__device__ __forceinline__ void read_table(const rotary::Table& t, std::int64_t c, std::int64_t s, int gap,
                                           Entries<Vec, Full>& e) {
  read_runs<E, Vec>(t.cos, c, gap, e.c1);
  read_runs<E, Vec>(t.sin, s, gap, e.s1);
  if constexpr (Full) {
    read_runs<E, Vec>(t.cos, c + t.second, gap, e.c2);
    read_runs<E, Vec>(t.sin, s + t.second, gap, e.s2);
  }
}

// Any table, any positions, one entry at a time.
template <int Vec, bool Full>
__device__ __forceinline__ void read_entries(const rotary::Geometry& g, std::int64_t batch,
                                             std::int64_t token, int pair0, int pair1,
                                             Entries<Vec, Full>& out) {
  constexpr int kRun = Vec > 1 ? Vec / 2 : 1;
  const rotary::Table& t = g.table;
  std::int64_t rows[3] = {row_of(g.rows, g.tokens, batch, token), 0, 0};
  if (g.rows.axes > 1) {
    rows[1] = row_of(g.rows, g.tokens, batch, token, 1);
    rows[2] = row_of(g.rows, g.tokens, batch, token, 2);
  }
#pragma unroll
  for (int i = 0; i < Vec; ++i) {
    const int pair = i < kRun ? pair0 + i : pair1 + i - kRun,
              axis = g.rows.axes > 1 ? axis_of(g.rows, pair) : 0;
    const std::int64_t row = axis == 0 ? rows[0] : axis == 1 ? rows[1] : rows[2];
    const bool inside = row >= 0 && row < g.rows.count;
    const std::int64_t entry = std::int64_t{pair} * t.step;
    const std::int64_t c = batch * t.cos_batch + (inside ? row : 0) * t.cos_row + entry;
    const std::int64_t s = batch * t.sin_batch + (inside ? row : 0) * t.sin_row + entry;
    out.c1[i] = inside ? table_value(t.cos, t.type, c) : bits_float(0x7fffffffu);
    out.s1[i] = table_value(t.sin, t.type, s);
    if constexpr (Full) {
      out.c2[i] = inside ? table_value(t.cos, t.type, c + t.second) : bits_float(0x7fffffffu);
      out.s2[i] = table_value(t.sin, t.type, s + t.second);
    }
  }
}

// Factors of the pairs of a slot. Any: the table cannot be read in vectors. A kernel of its own, because that
// code sets the register count even where it never runs.
template <class T, int Vec, bool Full, bool Any>
__device__ __forceinline__ void read_factors(const rotary::Geometry& g, const Steps& steps,
                                             std::int64_t batch, std::int64_t token, int slot,
                                             Factors<Vec, Full>& f) {
  const rotary::Table& t = g.table;
  const int pair = slot * steps.pair_step;
  Entries<Vec, Full> e;
  if constexpr (!Any) {
    std::int64_t row = token;
    bool inside = true;
    if (!steps.rows_are_tokens) {
      row = row_of(g.rows, g.tokens, batch, token);
      inside = row >= 0 && row < g.rows.count;
      if (!inside) row = 0;
    }
    const std::int64_t c = batch * t.cos_batch + row * t.cos_row + pair;
    const std::int64_t s = batch * t.sin_batch + row * t.sin_row + pair;
    if (t.type == rotary::Float::f32) {
      read_table<float, Vec, Full>(t, c, s, steps.pair_gap, e);
    } else {  // the data's own type
      read_table<T, Vec, Full>(t, c, s, steps.pair_gap, e);
    }
    if (!inside) {
#pragma unroll
      for (int i = 0; i < Vec; ++i) {
        e.c1[i] = bits_float(0x7fffffffu);
        if constexpr (Full) e.c2[i] = bits_float(0x7fffffffu);
      }
    }
  } else {
    read_entries<Vec, Full>(g, batch, token, pair, pair + steps.pair_gap, e);
  }
#pragma unroll
  for (int i = 0; i < Vec; ++i) {
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

// Turns the Vec pairs of `in` into `out`.
template <class In, class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full>
__device__ __forceinline__ void rotate_packs(const Pack<In, Vec> (&in)[2], Pack<T, Vec> (&out)[2],
                                             const Factors<Vec, Full>& f) {
  float ya[Vec], yb[Vec];
#pragma unroll
  for (int i = 0; i < Vec; ++i) {
    float a, b;
    pair_up<In, Vec>(in, InAdjacent, i, a, b);
    rotate(f.at(i), a, b, ya[i], yb[i]);
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

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, bool Any>
__device__ __forceinline__ void rotate_slot(const rotary::Geometry& g, const Steps& steps, const T* x, T* y,
                                            std::int64_t batch, std::int64_t token, int slot) {
  x += g.offset + slot * steps.in_step;
  y += g.offset + slot * steps.out_step;
  Pack<T, Vec> in[2] = {load<T, Vec>(x), load<T, Vec>(x + steps.in_gap)}, out[2];
  Factors<Vec, Full> f;  // behind the loads of the data, so that both latencies overlap
  read_factors<T, Vec, Full, Any>(g, steps, batch, token, slot, f);
  rotate_packs<T, T, Vec, InAdjacent, OutAdjacent, Full>(in, out, f);
  store<T, Vec>(y, out[0]);
  store<T, Vec>(y + steps.out_gap, out[1]);
}

// threadIdx.z: 0 turns the rotary slots, the others copy the pass-through slots, so whole waves do the same.
template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, bool Any>
__global__ void __launch_bounds__(kThreads, Full ? 2 : 4)
    rotate_rows(const rotary::Geometry g, const Cut cut) {
  const Spot spot = spot_of(cut.ground);
  const bool second = spot.group >= cut.q_groups;
  // Member by member: a copy of the chosen Part would go through local memory.
  const auto pick = [second](auto q, auto k) { return second ? k : q; };
  const std::int32_t head =
      (second ? spot.group - cut.q_groups : spot.group) * cut.ground.group_heads + spot.head;
  if (spot.token >= g.tokens || head >= pick(g.part[0].heads, g.part[1].heads)) return;
  const T* x = static_cast<const T*>(pick(g.part[0].x, g.part[1].x)) +
               spot.batch * pick(g.part[0].x_batch, g.part[1].x_batch) +
               spot.token * pick(g.part[0].x_token, g.part[1].x_token) +
               head * pick(g.part[0].x_head, g.part[1].x_head);
  T* y = static_cast<T*>(pick(g.part[0].y, g.part[1].y)) +
         spot.batch * pick(g.part[0].y_batch, g.part[1].y_batch) +
         spot.token * pick(g.part[0].y_token, g.part[1].y_token) +
         head * pick(g.part[0].y_head, g.part[1].y_head);
  const auto lane = static_cast<std::int32_t>(threadIdx.x), lanes = static_cast<std::int32_t>(blockDim.x);
  const auto role = static_cast<std::int32_t>(threadIdx.z),
             copiers = static_cast<std::int32_t>(blockDim.z) - 1;
  if (role == 0) {
    for (std::int32_t slot = lane; slot < cut.steps.slots; slot += lanes) {
      rotate_slot<T, Vec, InAdjacent, OutAdjacent, Full, Any>(g, cut.steps, x, y, spot.batch, spot.token,
                                                              slot);
      if constexpr (Vec > 1) break;  // as many lanes as slots
    }
  } else {
    for (std::int32_t slot = lane + (role - 1) * lanes; slot < cut.copy_slots; slot += copiers * lanes) {
      copy_slot<T, Vec>(g, x, y, slot, cut.copy_slots);
    }
  }
}

}  // namespace rlk::simt::rope_kernel
