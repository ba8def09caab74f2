// The portable GPU kernels of logp (arithmetic lse128/l8): the bits of the native backend on every GPU.
//
// fold       a block has a row and a leaf, four lanes a tile: a lane has the packs 2 l, 2 l + 1, 2 l + 8, 2 l + 9 of its 16, so
//            all bits of the tree but 4 and 5 are a lane's own. What two tiles' joining multiplies by follows from the maxima,
//            which 32 lanes know for 32 tiles at once; what is left of it in order is a chain of two fma. The logits are read
//            once
// finish     one thread a row: leaves pairwise, the target's logit, results
// gradient   one thread a pack, two of them a row apart
// bad        one block counts rows
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::logp {

using namespace rlk::lse128;

using rows::kPack;

inline constexpr int kThreads = 128;
inline constexpr int kWave = 32;  // lanes that share what they know of kWave tiles
inline constexpr int kTileLanes = 4;
inline constexpr int kTiles = kThreads / kTileLanes;  // of a block at a time
inline constexpr int kPacks = kTile / kPack / kTileLanes;
static_assert(kTiles == kWave && kPacks == 4);

// A logit of the span as it goes into the rule, before softcap.
__device__ __forceinline__ float rounded(const Problem& p, const Matrix& logits, std::int64_t row,
                                         std::int64_t at) {
  return rows::round_to(p.round, rows::load(logits.type, logits.row(row), at));
}

struct Eight {
  float at[kPack];
};
// What softcap and the mask make of a pack whose first column is `c`: out of line, for calls with either.
RLK_DEVICE_CALL Eight bent(const Problem& p, std::int64_t row, std::int64_t c, int n, Eight z) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) z.at[k] = k < n && p.kept(row, c + k) ? capped(p, z.at[k]) : none();
  return z;
}
// A pack of logits; those that take no part are -inf.
template <class T>
__device__ __forceinline__ void logits_of(const Problem& p, const rows::Raw<T>& raw, Type type,
                                          std::int64_t row, std::int64_t c, int n, float (&z)[kPack]) {
  rows::unpack<T>(type, raw, z);
  if (p.round != Type::f32) rows::round_pack<rows::Any>(p.round, z);
  if (p.cap == 0 && p.keep == nullptr && n == kPack) return;
  Eight eight;
#pragma unroll
  for (int k = 0; k < kPack; ++k) eight.at[k] = z[k];
  eight = bent(p, row, c, n, eight);
#pragma unroll
  for (int k = 0; k < kPack; ++k) z[k] = eight.at[k];
}

// 32 values of a tile's 128, bits 0 to 2 in a pack, bit 3 the number's lowest, bit 6 its other: folded by bits 6, 3, 0, 1, 2, and
// with the other lanes of the tile by 4, 5.
__device__ __forceinline__ float tree(float (&v)[kPacks][kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[0][k] = add_rn(add_rn(v[0][k], v[2][k]), add_rn(v[1][k], v[3][k]));
#pragma unroll
  for (int step = 1; step < kPack; step *= 2)
#pragma unroll
    for (int k = 0; k < kPack; k += 2 * step) v[0][k] = add_rn(v[0][k], v[0][k + step]);
  float sum = add_rn(v[0][0], __shfl_xor(v[0][0], 1, kWave));
  return add_rn(sum, __shfl_xor(sum, 2, kWave));
}

// The least of two, NaN if either is.
__device__ __forceinline__ float least(float a, float b) {
#if defined(__CUDA_ARCH__)
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
#else
  return a != a || a < b ? a : b;
#endif
}

// exp2_32 of what is in [kPlain, 0], where neither clamping nor scaling twice has anything to do: the same bits.
inline constexpr float kPlain = -125;
__device__ __forceinline__ float plain_exp2(float x) {
  using C = ExpConstants<float>;
  const float shifted = x + C::kShift, n = shifted - C::kShift, r = (x - n) * C::kLn2;
  const float e = fused(exp_tail(r) * r, r, r) + 1;
  return bits_float(float_bits(e) + (float_bits(shifted) << C::kMantissa));
}

// A tile by four lanes, each of which gets it.
__device__ __forceinline__ State tile(float (&z)[kPacks][kPack], Scale k, bool bends) {
  float m = none(), low = z[0][0];
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      m = z[i][j] > m ? z[i][j] : m;
      low = least(low, z[i][j]);
    }
#pragma unroll
  for (int step = 1; step < kTileLanes; step *= 2) {
    const float other = __shfl_xor(m, step, kWave);
    m = other > m ? other : m;
  }
  m = add_rn(m, 0.0f);  // one zero
  float u[kPacks][kPack] = {};
  if ((low - m) * k.c >= kPlain) {  // and no NaN
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float d = z[i][j] - m;
        z[i][j] = plain_exp2(d * k.c);
        if (bends) u[i][j] = z[i][j] * (d * k.tau);
      }
  } else {
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float e = weight(z[i][j], m, k.c);
        if (bends) u[i][j] = bend(e, z[i][j], m, k.tau);
        z[i][j] = e;
      }
  }
  const float s = tree(z);
  return {m, s, bends ? tree(u) : 0.0f};
}

// join() of `all` and 32 tiles, a tile a lane, ascending; every lane gets it.
__device__ __forceinline__ State join_tiles(State all, State mine, int lane, Scale k, bool bends) {
  // The maximum up to this tile, of tiles with a sum alone.
  const bool there = mine.s != 0;
  float m = there ? mine.m : none();
  bool some = there;
  for (int step = 1; step < kWave; step *= 2) {
    const float other = __shfl_up(m, static_cast<unsigned>(step), kWave);
    const bool others = __shfl_up(static_cast<int>(some), static_cast<unsigned>(step), kWave) != 0;
    if (lane < step) continue;
    m = other > m ? other : m;
    some = some || others;
  }
  const bool any = all.s != 0;
  if (any) m = all.m > m ? all.m : m;
  float before = __shfl_up(m, 1u, kWave);
  bool first = __shfl_up(static_cast<int>(some), 1u, kWave) == 0 && !any;
  if (lane == 0) before = all.m, first = !any;
  // What came before times a_by, and this tile as it is added; nothing changes where there is no tile.
  const float d = there && !first ? before - m : 0, by = there ? exp2<float>((mine.m - m) * k.c) : 0;
  const float a_by = !there ? 1.0f : first ? 0.0f : exp2<float>(d * k.c);
  const float s = !there ? 0.0f : first ? mine.s : mine.s * by;
  const float bend_by = d * k.tau;
  float u = 0;
  if (bends && there) u = first ? mine.u : shifted(mine.s, mine.u, mine.m - m, by, k.tau) * by;
#pragma unroll 8
  for (int t = 0; t < kWave; ++t) {
    const float by_t = __shfl(a_by, t, kWave), s_t = __shfl(s, t, kWave);
    if (bends) {
      const float u_t = __shfl(u, t, kWave), bend_t = __shfl(bend_by, t, kWave);
      const float old = by_t == 0 ? 0.0f : fused(all.s, bend_t, all.u);
      all.u = fused(old, by_t, u_t);
    }
    all.s = fused(all.s, by_t, s_t);
  }
  all.m = __shfl(m, kWave - 1, kWave);
  return all;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    fold(Problem p, Panel panel, int leaves, bool bends, State* states, float* targets) {
  State* tiles = dynamic_shared<State>();
  const std::int64_t row = blockIdx.x / static_cast<unsigned>(leaves);
  const int leaf = leaves == 1 ? panel.leaf : static_cast<int>(blockIdx.x % static_cast<unsigned>(leaves));
  if (p.left_out(row)) return;
  // Where the panel is all of the row, its leaf is a part of it.
  const std::int64_t from = leaves > 1 ? p.leaf_begin(leaf) : panel.begin,
                     end = leaves > 1 ? p.leaf_end(leaf) : panel.end, start = leaves > 1 ? 0 : panel.begin;
  const Scale k = p.scale(row);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kTileLanes;
  const void* logits = panel.logits.row(row);
  State* kept = states + row * p.count + leaf;
  State all = from == p.leaf_begin(leaf) ? nothing() : *kept;
  for (std::int64_t at = from; at < end; at += kTiles * kTile) {
    const std::int64_t first = at + thread / kTileLanes * kTile + 2 * kPack * lane;
    rows::Raw<T> raw[kPacks];
    float z[kPacks][kPack];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const std::int64_t c = first + i / 2 * (kTile / 2) + i % 2 * kPack;
      raw[i] = rows::fetch_pack<T>(panel.logits.type, logits, c - start, rows::pack_at(c, end));
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const std::int64_t c = first + i / 2 * (kTile / 2) + i % 2 * kPack;
      logits_of<T>(p, raw[i], panel.logits.type, row, c, rows::pack_at(c, end), z[i]);
    }
    const State mine = tile(z, k, bends);
    if (lane == 0) tiles[thread / kTileLanes] = mine;
    __syncthreads();
    if (thread < static_cast<int>(warpSize))  // a whole wave, which may be two times 32 lanes
      all = join_tiles(all, tiles[thread % kWave], thread % kWave, k, bends);
    tiles =
        dynamic_shared<State>() + (tiles == dynamic_shared<State>() ? kTiles : 0);  // the other half is read
  }
  if (thread != 0) return;
  *kept = all;
  if (targets == nullptr) return;
  const std::int64_t at = p.column(row);
  if (panel.begin == p.leaf_begin(0)) targets[row] = none();
  if (at >= panel.begin && at < panel.end && p.kept(row, at))
    targets[row] = capped(p, rounded(p, panel.logits, row, at - panel.begin));
}

// Leaves to a row: what is known of it, and its state in place of the first leaf's. `targets`: the targets' logits, where those
// are no more.
__global__ void __launch_bounds__(kThreads) finish(Problem p, State* states, const float* targets) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  if (p.left_out(row)) {
    states[row * p.count] = nothing();
    write(p, row, lse128::left_out(p, row));
    return;
  }
  const Scale k = p.scale(row);
  const State all = join_all(states + row * p.count, p.count, k);
  states[row * p.count] = all;
  const std::int64_t at = p.column(row);
  float z = targets ? targets[row] : none();
  if (!targets && at >= 0 && p.kept(row, at)) z = capped(p, rounded(p, p.logits, row, at));
  write(p, row, {all, z, k});
}

__global__ void __launch_bounds__(kThreads) bad(Problem p) {
  int* counts = dynamic_shared<int>();
  int mine = 0;
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kThreads) mine += p.bad(row);
  counts[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) mine += counts[i];
  *p.bad_count = mine;
}

// A pack's gradient where softcap or a mask has a part in it: out of line.
RLK_DEVICE_CALL Eight bent_gradient(const Problem& p, Slope k, std::int64_t row, std::int64_t c, int n,
                                    int target, Eight z) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float raw = z.at[j];
    z.at[j] = 0;
    if (j < n && p.kept(row, c + j))
      z.at[j] = through_cap(p, lse128::gradient<float>(k, capped(p, raw), j == target ? 1.0f : 0.0f), raw);
  }
  return z;
}

inline constexpr int kEach = 2, kSpan = kThreads * kPack;  // packs of a thread, columns from one to the next

// Rows' states are given, or the first of each row's leaves.
template <class T>
__global__ void __launch_bounds__(kThreads)
    gradient(Problem p, Panel panel, Matrix to, std::int64_t columns, const State* states) {
  const auto across = static_cast<unsigned>((columns + kEach * kSpan - 1) / (kEach * kSpan));
  const std::int64_t row = blockIdx.x / across;
  const std::int64_t first = std::int64_t{blockIdx.x % across} * kEach * kSpan + threadIdx.x * kPack;
  const bool out = p.left_out(row);
  const void* logits = panel.logits.row(row);
  rows::Raw<T> raw[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int64_t at = first + i * kSpan;
    raw[i] = rows::fetch_pack<T>(panel.logits.type, logits, at,
                                 out ? 0 : rows::pack_at(panel.begin + at, panel.end));
  }
  const float* given = p.given ? p.given + row * kStats : nullptr;
  const State state = given ? State{given[0], given[1], given[2]} : states[row * p.count];
  const Slope k = slope_of(p, row, state);
  const std::int64_t target = p.column(row);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::int64_t at = first + i * kSpan, c = panel.begin + at;
    const int n = rows::pack_at(c, panel.end), n_to = rows::pack_at(at, columns);
    if (n_to == 0) continue;
    Eight d = {};
    if (!out && !k.nothing) {
      rows::unpack<T>(panel.logits.type, raw[i], d.at);
      if (p.round != Type::f32) rows::round_pack<rows::Any>(p.round, d.at);
      const int here = target >= c && target < c + kPack ? static_cast<int>(target - c) : -1;
      if (p.cap != 0 || p.keep != nullptr || n < kPack) {
        d = bent_gradient(p, k, row, c, n, here, d);
      } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j)
          d.at[j] = lse128::gradient<float>(k, d.at[j], j == here ? 1.0f : 0.0f);
      }
    }
    rows::put_pack<T>(to.type, to.row(row), at, n_to, d.at);
  }
}

__global__ void __launch_bounds__(kThreads) merge(Merge m) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < m.p.rows) write(m.p, row, merged(m, row));
}

inline dim3 blocks(std::int64_t n) { return dim3(static_cast<unsigned>(n)); }
inline std::int64_t over(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }
inline bool bends(const Problem& p) { return p.entropy || p.stats || p.d_entropy; }

// All leaves of a row that lies in memory whole, or one leaf's part of it.
inline void launch_fold(const Problem& p, const Panel& panel, int leaves, void* states, float* targets,
                        hipStream_t stream) {
  if (p.rows == 0) return;
  rows::for_type(panel.logits.type == Type::bf16, [&]<class T>(T) {
    hipLaunchKernelGGL((fold<T>), blocks(p.rows * leaves), dim3(kThreads), 2 * kTiles * sizeof(State), stream,
                       p, panel, leaves, bends(p), static_cast<State*>(states), targets);
  });
}
inline void launch_count(const Problem& p, hipStream_t stream) {
  hipLaunchKernelGGL(bad, dim3(1), dim3(kThreads), kThreads * sizeof(int), stream, p);
}
inline void launch_finish(const Problem& p, void* states, const float* targets, hipStream_t stream) {
  if (p.rows > 0)
    hipLaunchKernelGGL(finish, blocks(over(p.rows, kThreads)), dim3(kThreads), 0, stream, p,
                       static_cast<State*>(states), targets);
  if (p.bad_count) launch_count(p, stream);
}
// `columns` of `to`, those beyond the panel's as +0.
inline void launch_gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                            const void* states, hipStream_t stream) {
  if (p.rows == 0 || columns == 0) return;
  rows::for_type(panel.logits.type == Type::bf16 && to.type == Type::bf16, [&]<class T>(T) {
    hipLaunchKernelGGL((gradient<T>), blocks(p.rows * over(columns, kEach * kSpan)), dim3(kThreads), 0,
                       stream, p, panel, to, columns, static_cast<const State*>(states));
  });
}

inline Panel whole(const Problem& p) { return {p.logits, 0, p.here, 0}; }

inline void launch_reduction(const Problem& p, void* states, hipStream_t stream) {
  launch_fold(p, whole(p), p.count, states, nullptr, stream);
  launch_finish(p, states, nullptr, stream);
}
inline void launch_backward(const Problem& p, void* states, hipStream_t stream) {
  if (!p.given) launch_reduction(p, states, stream);
  launch_gradient(p, whole(p), p.d_logits, p.columns, states, stream);
}
inline void launch_merge(const Merge& m, hipStream_t stream) {
  if (m.p.rows > 0) hipLaunchKernelGGL(merge, blocks(over(m.p.rows, kThreads)), dim3(kThreads), 0, stream, m);
}

}  // namespace rlk::simt::logp
