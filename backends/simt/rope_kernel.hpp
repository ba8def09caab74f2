// Rotates q, or q and k, in one launch. Portable: HIP, CUDA and host fibers. Arithmetic id "rope32".
//
// Traffic: every element is read once and written once (4 bytes per bf16 element), a table row once per block
// and group of heads. A thread owns one slot of a row: 16 bytes of first members and 16 bytes of second
// members (Vec pairs), or 32 bytes of pass-through dims. It keeps its slot's factors in registers and walks
// over kUnroll heads at a time, all loads issued before the first use, so the tables cost registers instead
// of bandwidth. A block's rows lie along whichever of token and head has the smaller stride, so that a
// block's accesses are contiguous in every layout. Rejected: shared memory for the tables (a barrier for data
// that each thread needs once), one head per thread (reads 512 bytes of fp32 table per 512 bytes of data),
// shuffles to regroup adjacent pairs (both halves of a 32-byte sector are asked for by the same thread, the
// second hit is in L1).
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
  bool token_first;                        // neighbouring rows are neighbouring tokens
  bool table_vectors;                      // table rows may be read 16 bytes at a time
  std::int32_t token_blocks;
  std::int64_t blocks;
};

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
  *reinterpret_cast<Pack<T, N>*>(p) = v;
}

// Factors of Vec pairs of one token.
template <int Vec, bool Full>
struct Factors {
  float c1[Vec], s1[Vec], c2[Full ? Vec : 1], s2[Full ? Vec : 1];

  __device__ __forceinline__ Turn at(int i, bool transpose) const {
    if constexpr (Full) {
      return turn(c1[i], s1[i], c2[i], s2[i], transpose);
    } else {
      return turn(c1[i], s1[i], c1[i], s1[i], transpose);
    }
  }
};

// Vec entries of one row of cos or sin, from `first` on.
template <class T, int Vec>
__device__ __forceinline__ void table_row(const void* base, rotary::Float type, std::int64_t first, int step,
                                          bool vectors, float (&out)[Vec]) {
  if constexpr (Vec % 4 == 0) {
    if (vectors && type == rotary::Float::f32) {
      const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(base) + first);
#pragma unroll
      for (int i = 0; i < Vec / 4; ++i) {
        const float4 v = __ldg(p + i);
        out[4 * i] = v.x, out[4 * i + 1] = v.y, out[4 * i + 2] = v.z, out[4 * i + 3] = v.w;
      }
      return;
    }
    if (vectors) {  // tables of the data's own type
      const auto v = load<T, Vec, false>(static_cast<const T*>(base) + first);
#pragma unroll
      for (int i = 0; i < Vec; ++i) out[i] = to_float(v.v[i]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < Vec; ++i) out[i] = table_value(base, type, first + std::int64_t{i} * step);
}

template <class T, int Vec, bool Full>
__device__ __forceinline__ void read_factors(const rotary::Geometry& g, bool vectors, std::int64_t batch,
                                             std::int64_t token, int pair, Factors<Vec, Full>& f) {
  const rotary::Table& t = g.table;
  const std::int64_t cos0 = batch * t.cos_batch, sin0 = batch * t.sin_batch;
  if (g.rows.axes == 1) {
    const std::int64_t row = row_of(g.rows, g.tokens, batch, token);
    if (row >= 0 && row < g.rows.count) {
      const std::int64_t at = std::int64_t{pair} * t.step;
      table_row<T, Vec>(t.cos, t.type, cos0 + row * t.cos_row + at, t.step, vectors, f.c1);
      table_row<T, Vec>(t.sin, t.type, sin0 + row * t.sin_row + at, t.step, vectors, f.s1);
      if constexpr (Full) {
        table_row<T, Vec>(t.cos, t.type, cos0 + row * t.cos_row + at + t.second, t.step, vectors, f.c2);
        table_row<T, Vec>(t.sin, t.type, sin0 + row * t.sin_row + at + t.second, t.step, vectors, f.s2);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < Vec; ++i) {
    f.c1[i] = f.s1[i] = bits_float(0x7fffffffu);
    if constexpr (Full) f.c2[i] = f.s2[i] = bits_float(0x7fffffffu);
    if (g.rows.axes == 1) continue;
    const std::int64_t row = row_of(g.rows, g.tokens, batch, token, axis_of(g.rows, pair + i));
    if (row < 0 || row >= g.rows.count) continue;
    const std::int64_t at = std::int64_t{pair + i} * t.step;
    f.c1[i] = table_value(t.cos, t.type, cos0 + row * t.cos_row + at);
    f.s1[i] = table_value(t.sin, t.type, sin0 + row * t.sin_row + at);
    if constexpr (Full) {
      f.c2[i] = table_value(t.cos, t.type, cos0 + row * t.cos_row + at + t.second);
      f.s2[i] = table_value(t.sin, t.type, sin0 + row * t.sin_row + at + t.second);
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

template <class T, int Vec>
__device__ __forceinline__ void put_pair(Pack<T, Vec> (&out)[2], bool adjacent, int i, float a, float b) {
  if (adjacent) {
    out[2 * i / Vec].v[2 * i % Vec] = from_float<T>(a);
    out[(2 * i + 1) / Vec].v[(2 * i + 1) % Vec] = from_float<T>(b);
  } else {
    out[0].v[i] = from_float<T>(a);
    out[1].v[i] = from_float<T>(b);
  }
}

// What a thread works on: one row start, and the rows that follow it along the heads.
template <class T>
struct Walk {
  const T* x;
  T* y;
  std::int64_t x_step, y_step;
  std::int32_t rows;
};

// Dims outside the rotary range, 2 * Vec of them.
template <class T, int Vec>
__device__ __forceinline__ void copy_slot(const rotary::Geometry& g, Walk<T> w, int slot) {
  int dims[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    dims[i] = (slot * 2 + i) * Vec;
    if (dims[i] >= g.offset) dims[i] += g.rotary_dim;
  }
  for (; w.rows > 0; --w.rows, w.x += w.x_step, w.y += w.y_step) {
    Pack<T, Vec> v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (dims[i] < g.head_dim) v[i] = load<T, Vec, true>(w.x + dims[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (dims[i] < g.head_dim) store<T, Vec>(w.y + dims[i], v[i]);
    }
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, int Unroll>
__device__ __forceinline__ void rotate_slot(const rotary::Geometry& g, Walk<T> w, int slot,
                                            std::int64_t batch, std::int64_t token, bool table_vectors) {
  const int pair = slot * Vec, half = g.rotary_dim / 2;
  const int in0 = g.offset + (InAdjacent ? 2 * pair : pair), in1 = in0 + (InAdjacent ? Vec : half);
  const int out0 = g.offset + (OutAdjacent ? 2 * pair : pair), out1 = out0 + (OutAdjacent ? Vec : half);
  Factors<Vec, Full> f;
  bool ready = false;
  for (; w.rows > 0; w.rows -= Unroll, w.x += Unroll * w.x_step, w.y += Unroll * w.y_step) {
    Pack<T, Vec> in[Unroll][2];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (u < w.rows) {
        in[u][0] = load<T, Vec, !InAdjacent>(w.x + u * w.x_step + in0);
        in[u][1] = load<T, Vec, !InAdjacent>(w.x + u * w.x_step + in1);
      }
    }
    if (!ready) {  // behind the first loads, so that both latencies overlap
      read_factors<T, Vec, Full>(g, table_vectors, batch, token, pair, f);
      ready = true;
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      if (u < w.rows) {
        Pack<T, Vec> out[2];
#pragma unroll
        for (int i = 0; i < Vec; ++i) {
          float a, b, ya, yb;
          pair_up<T, Vec>(in[u], InAdjacent, i, a, b);
          rotate(f.at(i, g.transpose), a, b, ya, yb);
          put_pair<T, Vec>(out, OutAdjacent, i, ya, yb);
        }
        store<T, Vec>(w.y + u * w.y_step + out0, out[0]);
        store<T, Vec>(w.y + u * w.y_step + out1, out[1]);
      }
    }
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, int Unroll>
__global__ void __launch_bounds__(kThreads) rotate_rows(const rotary::Geometry g, const Cut cut) {
  // Blocks that run together share their tokens, hence their table rows in L2.
  const std::int32_t groups = cut.head_groups[0] + cut.head_groups[1];
  std::int32_t group = static_cast<std::int32_t>(blockIdx.x % unsigned(groups));
  const unsigned tile = blockIdx.x / unsigned(groups);
  const int which = group >= cut.head_groups[0] ? 1 : 0;
  if (which == 1) group -= cut.head_groups[0];
  const rotary::Part part =
      which == 1 ? g.part[1] : g.part[0];  // a select: indexing would copy both to local memory

  const int thread = static_cast<int>(threadIdx.x), lane = thread % cut.lanes, row = thread / cut.lanes;
  if (row >= cut.block_tokens * cut.block_heads) return;
  const int row_token = cut.token_first ? row % cut.block_tokens : row / cut.block_heads;
  const int row_head = cut.token_first ? row / cut.block_tokens : row % cut.block_heads;
  const std::int64_t batch = tile / unsigned(cut.token_blocks);
  const std::int64_t token = std::int64_t{tile % unsigned(cut.token_blocks)} * cut.block_tokens + row_token;
  const std::int64_t head = std::int64_t{group} * cut.heads_per_block[which] + row_head;
  std::int64_t end = std::int64_t{group + 1} * cut.heads_per_block[which];
  if (end > part.heads) end = part.heads;
  if (token >= g.tokens || head >= end) return;

  Walk<T> w;
  w.x = static_cast<const T*>(part.x) + batch * part.x_batch + token * part.x_token + head * part.x_head;
  w.y = static_cast<T*>(part.y) + batch * part.y_batch + token * part.y_token + head * part.y_head;
  w.x_step = part.x_head * cut.block_heads;
  w.y_step = part.y_head * cut.block_heads;
  w.rows = static_cast<std::int32_t>((end - head + cut.block_heads - 1) / cut.block_heads);
  for (int slot = lane; slot < cut.slots; slot += cut.lanes) {
    if (slot < cut.rotary_slots) {
      rotate_slot<T, Vec, InAdjacent, OutAdjacent, Full, Unroll>(g, w, slot, batch, token, cut.table_vectors);
    } else {
      copy_slot<T, Vec>(g, w, slot - cut.rotary_slots);
    }
  }
}

}  // namespace rlk::simt::rope_kernel
