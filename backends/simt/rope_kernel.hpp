// Rotates q, or q and k, in one launch. Portable: HIP, CUDA and host fibers. Arithmetic id "rope32".
//
// Traffic: every element is read once and written once (4 bytes per bf16 element), a table row once per block
// and group of heads. A thread owns one slot of a row: 16 bytes of first members and 16 bytes of second
// members (Vec pairs), or 32 bytes of pass-through dims. It keeps its slot's factors in registers and walks
// over two heads at a time, all loads issued before the first use, so the tables cost registers instead
// of bandwidth. A block's rows lie along whichever of token and head has the smaller stride, so that a
// block's accesses are contiguous in every layout. Rejected: shared memory for the tables (a barrier for data
// that each thread needs once), one head per thread (reads 512 bytes of fp32 table per 512 bytes of data),
// shuffles to regroup adjacent pairs (both halves of a 32-byte sector are asked for by the same thread, the
// second hit is in L1).
// Capping the registers at 80 or 64 for more resident warps spills and measures slower (0.86 instead of 0.90
// of a copy).
#pragma once

#include <cstdint>

#include "rope_math.hpp"
#include "simt.hpp"

namespace rlk::simt::rope_kernel {

inline constexpr int kThreads = 256;

// How a launch cuts the work; made on the host by cut() in rope_launch.hpp.
struct Cut {
  std::int32_t lanes;                      // threads of a row; a thread takes slots lane, lane + lanes, ...
  std::int32_t slots, rotary_slots;        // per row: rotary slots first, then pass-through slots
  std::int32_t block_tokens, block_heads;  // rows of a block: tokens x heads
  std::int32_t head_groups[2];             // blocks along the heads of each part
  std::int32_t heads_per_block[2];         // heads that a block walks over
  std::uint32_t lanes_inverse, inner_inverse;  // 2^16 / n rounded up: exact quotients of numbers below 256
  bool token_first;                            // neighbouring rows are neighbouring tokens
  bool table_vectors;                          // table rows may be read 16 bytes at a time
  bool flat;                                   // more token blocks than a grid's second axis holds
  std::int32_t token_blocks;
  std::int64_t blocks;
};

inline std::uint32_t inverse_of(int n) {
  return (65536u + static_cast<unsigned>(n) - 1) / static_cast<unsigned>(n);
}
__device__ __forceinline__ int quotient(int x, std::uint32_t inverse) {
  return static_cast<int>(static_cast<unsigned>(x) * inverse >> 16);
}

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

// Data is used once. Where a thread's two loads lie in different sectors they skip L1, which leaves it to the
// tables; adjacent pairs share sectors and keep it.
template <class T, int N, bool Once>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
#if defined(__CUDA_ARCH__)
  if constexpr (Once && sizeof(T) * N == 16) {
    uint4 r;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return __builtin_bit_cast(Pack<T, N>, r);
  }
#endif
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <class T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& v) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) * N == 16) {
    __stcs(reinterpret_cast<uint4*>(p), __builtin_bit_cast(uint4, v));
    return;
  }
#endif
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

// N neighbouring entries of one row of cos or sin, in one access.
template <class T, int N>
__device__ __forceinline__ void table_run(const void* base, rotary::Float type, std::int64_t first,
                                          float* out) {
  if (type == rotary::Float::f32) {
    const auto v = load<float, N, false>(static_cast<const float*>(base) + first);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = v.v[i];
  } else {  // the data's own type
    const auto v = load<T, N, false>(static_cast<const T*>(base) + first);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(v.v[i]);
  }
}

// Entries of cos and sin as the table has them, before signs.
template <int Vec, bool Full>
struct Entries {
  float c1[Vec], s1[Vec], c2[Full ? Vec : 1], s2[Full ? Vec : 1];
};

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

// Factors of the pairs from pair0 on and, for their second half, from pair1 on. Any: the table cannot be read
// in vectors. A kernel of its own, because that code sets the register count even where it never runs.
template <class T, int Vec, bool Full, bool Any>
__device__ __forceinline__ void read_factors(const rotary::Geometry& g, std::int64_t batch,
                                             std::int64_t token, int pair0, int pair1,
                                             Factors<Vec, Full>& f) {
  const rotary::Table& t = g.table;
  Entries<Vec, Full> e;
  if constexpr (!Any) {
    constexpr int kRun = Vec > 1 ? Vec / 2 : 1;
    const std::int64_t row = row_of(g.rows, g.tokens, batch, token);
    const bool inside = row >= 0 && row < g.rows.count;
    const std::int64_t c = batch * t.cos_batch + (inside ? row : 0) * t.cos_row;
    const std::int64_t s = batch * t.sin_batch + (inside ? row : 0) * t.sin_row;
#pragma unroll
    for (int run = 0; run < Vec; run += kRun) {
      const int at = run == 0 ? pair0 : pair1;
      table_run<T, kRun>(t.cos, t.type, c + at, e.c1 + run);
      table_run<T, kRun>(t.sin, t.type, s + at, e.s1 + run);
      if constexpr (Full) {
        table_run<T, kRun>(t.cos, t.type, c + at + t.second, e.c2 + run);
        table_run<T, kRun>(t.sin, t.type, s + at + t.second, e.s2 + run);
      }
    }
    if (!inside) {
#pragma unroll
      for (int i = 0; i < Vec; ++i) {
        e.c1[i] = bits_float(0x7fffffffu);
        if constexpr (Full) e.c2[i] = bits_float(0x7fffffffu);
      }
    }
  } else {
    read_entries<Vec, Full>(g, batch, token, pair0, pair1, e);
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

// Where a slot's two packs lie. Lanes of a wave read and write whole sectors: neighbouring slots hold
// neighbouring packs, and the second pack of an adjacent-to-adjacent slot lies `slots` packs behind the
// first. Only where the places change (adjacent to half) is one side read or written in steps of 32 bytes.
struct Places {
  int pair0, pair1, in0, in1, out0, out1;
};
template <int Vec>
__device__ __forceinline__ Places places_of(const rotary::Geometry& g, int slot, int slots) {
  const int half = g.rotary_dim / 2;
  Places p;
  if (g.in_adjacent && g.out_adjacent && Vec > 1) {
    p.in0 = p.out0 = slot * Vec;
    p.in1 = p.out1 = (slot + slots) * Vec;
    p.pair0 = p.in0 / 2;
    p.pair1 = p.in1 / 2;
    return p;
  }
  p.pair0 = slot * Vec;
  p.pair1 = p.pair0 + Vec / 2;
  p.in0 = g.in_adjacent ? 2 * p.pair0 : p.pair0;
  p.in1 = g.in_adjacent ? p.in0 + Vec : p.in0 + half;
  p.out0 = g.out_adjacent ? 2 * p.pair0 : p.pair0;
  p.out1 = g.out_adjacent ? p.out0 + Vec : p.out0 + half;
  return p;
}

// What a thread works on: one row start, and the rows that follow it along the heads.
template <class T>
struct Walk {
  const T* x;
  T* y;
  std::int64_t x_step, y_step;
  std::int32_t rows;
};

// Dims outside the rotary range: pack `slot` of them and the one `slots` behind it.
template <class T, int Vec, int Unroll>
__device__ __forceinline__ void copy_slot(const rotary::Geometry& g, Walk<T> w, int slot, int slots) {
  int dims[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    dims[i] = (slot + i * slots) * Vec;
    if (dims[i] >= g.offset) dims[i] += g.rotary_dim;
  }
  const bool two = dims[1] < g.head_dim;
  for (; w.rows > 0; w.rows -= Unroll, w.x += Unroll * w.x_step, w.y += Unroll * w.y_step) {
    Pack<T, Vec> v[Unroll][2];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (u < w.rows) {
        v[u][0] = load<T, Vec, true>(w.x + u * w.x_step + dims[0]);
        if (two) v[u][1] = load<T, Vec, true>(w.x + u * w.x_step + dims[1]);
      }
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (u < w.rows) {
        store<T, Vec>(w.y + u * w.y_step + dims[0], v[u][0]);
        if (two) store<T, Vec>(w.y + u * w.y_step + dims[1], v[u][1]);
      }
    }
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, bool Any, int Unroll>
__device__ __forceinline__ void rotate_slot(const rotary::Geometry& g, Walk<T> w, int slot, int slots,
                                            std::int64_t batch, std::int64_t token) {
  constexpr bool kOnce = InAdjacent == OutAdjacent;
  const Places p = places_of<Vec>(g, slot, slots);
  w.x += g.offset;
  w.y += g.offset;
  Factors<Vec, Full> f;
  bool ready = false;
  for (; w.rows > 0; w.rows -= Unroll, w.x += Unroll * w.x_step, w.y += Unroll * w.y_step) {
    Pack<T, Vec> in[Unroll][2];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (u < w.rows) {
        in[u][0] = load<T, Vec, kOnce>(w.x + u * w.x_step + p.in0);
        in[u][1] = load<T, Vec, kOnce>(w.x + u * w.x_step + p.in1);
      }
    }
    if (!ready) {  // behind the first loads, so that both latencies overlap
      read_factors<T, Vec, Full, Any>(g, batch, token, p.pair0, p.pair1, f);
      ready = true;
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (u < w.rows) {
        Pack<T, Vec> out[2];
        rotate_packs<T, T, Vec, InAdjacent, OutAdjacent, Full>(in[u], out, f);
        store<T, Vec>(w.y + u * w.y_step + p.out0, out[0]);
        store<T, Vec>(w.y + u * w.y_step + p.out1, out[1]);
      }
    }
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, bool Any, int Unroll>
__global__ void __launch_bounds__(kThreads) rotate_rows(const rotary::Geometry g, const Cut cut) {
  // Blocks that run together share their tokens, hence their table rows in L2.
  unsigned x = blockIdx.x, tile = blockIdx.y;
  std::int64_t batch = blockIdx.z;
  if (cut.flat) {
    const auto groups = static_cast<unsigned>(cut.head_groups[0] + cut.head_groups[1]);
    tile = x / groups, x %= groups;
    batch = tile / unsigned(cut.token_blocks), tile %= unsigned(cut.token_blocks);
  }
  const bool second = x >= unsigned(cut.head_groups[0]);
  const auto group = static_cast<std::int32_t>(second ? x - unsigned(cut.head_groups[0]) : x);
  // Member by member: a copy of the chosen Part would go through local memory.
  const auto pick = [second](auto q, auto k) { return second ? k : q; };
  const std::int64_t heads = pick(g.part[0].heads, g.part[1].heads);
  const std::int32_t heads_per_block = pick(cut.heads_per_block[0], cut.heads_per_block[1]);

  const int thread = static_cast<int>(threadIdx.x), row = quotient(thread, cut.lanes_inverse);
  const int lane = thread - row * cut.lanes;
  if (row >= cut.block_tokens * cut.block_heads) return;
  const int inner_count = cut.token_first ? cut.block_tokens : cut.block_heads;
  const int outer = quotient(row, cut.inner_inverse), inner = row - outer * inner_count;
  const std::int64_t token = std::int64_t{tile} * cut.block_tokens + (cut.token_first ? inner : outer);
  const std::int32_t head = group * heads_per_block + (cut.token_first ? outer : inner);
  std::int32_t end = (group + 1) * heads_per_block;
  if (end > heads) end = static_cast<std::int32_t>(heads);
  if (token >= g.tokens || head >= end) return;

  Walk<T> w;
  const std::int64_t x_head = pick(g.part[0].x_head, g.part[1].x_head),
                     y_head = pick(g.part[0].y_head, g.part[1].y_head);
  w.x = static_cast<const T*>(pick(g.part[0].x, g.part[1].x)) +
        batch * pick(g.part[0].x_batch, g.part[1].x_batch) +
        token * pick(g.part[0].x_token, g.part[1].x_token) + head * x_head;
  w.y = static_cast<T*>(pick(g.part[0].y, g.part[1].y)) + batch * pick(g.part[0].y_batch, g.part[1].y_batch) +
        token * pick(g.part[0].y_token, g.part[1].y_token) + head * y_head;
  w.x_step = x_head * cut.block_heads;
  w.y_step = y_head * cut.block_heads;
  w.rows = 0;
  for (std::int32_t h = head; h < end; h += cut.block_heads) ++w.rows;
  for (int slot = lane; slot < cut.slots; slot += cut.lanes) {
    if (slot < cut.rotary_slots) {
      rotate_slot<T, Vec, InAdjacent, OutAdjacent, Full, Any, Unroll>(g, w, slot, cut.rotary_slots, batch,
                                                                      token);
    } else {
      copy_slot<T, Vec, Unroll>(g, w, slot - cut.rotary_slots, cut.slots - cut.rotary_slots);
    }
  }
}

}  // namespace rlk::simt::rope_kernel
