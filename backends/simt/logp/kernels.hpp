// The portable GPU kernels of logp (arithmetic lse128/l8): the bits of the native backend on every GPU.
//
// fold       a block has a row and a leaf, 32 lanes a tile: lane l has the entries l, l + 32, .. of its 128, so bits 5 and 6
//            of the tree are a lane's own and the others are shuffles. The block's eight groups of lanes leave eight tiles in
//            shared memory, which are joined ascending. The logits are read once
// finish     one thread a row: leaves pairwise, the target's logit, results
// gradient   one thread an entry, four of them a row apart
// bad        one block counts rows
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::logp {

using namespace rlk::lse128;

inline constexpr int kThreads = 256, kLanes = 32, kGroups = kThreads / kLanes, kOwn = kTile / kLanes;

// A logit of the span as it goes into the rule, before softcap.
__device__ __forceinline__ float rounded(const Problem& p, const Matrix& logits, std::int64_t row,
                                         std::int64_t at) {
  return rows::round_to(p.round, rows::load(logits.type, logits.row(row), at));
}

// The tree of 128: bits 6, 3, 0, 1, 2, 4, 5.
__device__ __forceinline__ float tree(const float (&v)[kOwn]) {
  float a = add_rn(v[0], v[2]), b = add_rn(v[1], v[3]);
  const auto fold = [&](int step) {
    a = add_rn(a, __shfl_xor(a, step, kLanes));
    b = add_rn(b, __shfl_xor(b, step, kLanes));
  };
  fold(8), fold(1), fold(2), fold(4), fold(16);
  return add_rn(a, b);
}

// A tile by 32 lanes, each of which gets it; entries beyond `end` are absent.
__device__ __forceinline__ State tile(const Problem& p, const Panel& panel, std::int64_t row,
                                      std::int64_t begin, int lane, Scale k, bool bends) {
  float z[kOwn], e[kOwn], u[kOwn], m = none();
  for (int i = 0; i < kOwn; ++i) {
    const std::int64_t c = begin + i * kLanes + lane;
    z[i] =
        c < panel.end && p.kept(row, c) ? capped(p, rounded(p, panel.logits, row, c - panel.begin)) : none();
    m = z[i] > m ? z[i] : m;
  }
  for (int step = 1; step < kLanes; step *= 2) {
    const float other = __shfl_xor(m, step, kLanes);
    m = other > m ? other : m;
  }
  m = add_rn(m, 0.0f);  // one zero
  for (int i = 0; i < kOwn; ++i) {
    e[i] = weight(z[i], m, k.c);
    u[i] = bends ? bend(e[i], z[i], m, k.tau) : 0.0f;
  }
  const float s = tree(e);
  return {m, s, bends ? tree(u) : 0.0f};
}

__global__ void __launch_bounds__(kThreads)
    fold(Problem p, Panel panel, int leaves, bool bends, State* states, float* targets) {
  State* tiles = dynamic_shared<State>();
  const std::int64_t row = blockIdx.x / static_cast<unsigned>(leaves);
  const int leaf = leaves == 1 ? panel.leaf : static_cast<int>(blockIdx.x % static_cast<unsigned>(leaves));
  if (p.left_out(row)) return;
  Panel own = panel;
  if (leaves > 1) {  // the panel is all of the row
    own.begin = 0, own.end = p.leaf_end(leaf);
    own.leaf = leaf;
  }
  const std::int64_t from = leaves > 1 ? p.leaf_begin(leaf) : panel.begin;
  const Scale k = p.scale(row);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) / kLanes;
  State* kept = states + row * p.count + leaf;
  State all = from == p.leaf_begin(leaf) ? nothing() : *kept;
  for (std::int64_t at = from; at < own.end; at += kGroups * kTile) {
    const State mine = tile(p, own, row, at + group * kTile, lane, k, bends);
    if (lane == 0) tiles[group] = mine;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < kGroups; ++i) all = join(all, tiles[i], k);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
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

// Rows' states are given, or the first of each row's leaves.
__global__ void __launch_bounds__(kThreads)
    gradient(Problem p, Panel panel, Matrix to, std::int64_t columns, const State* states) {
  const auto across = static_cast<unsigned>((columns + kOwn * kThreads - 1) / (kOwn * kThreads));
  const std::int64_t row = blockIdx.x / across;
  const bool out = p.left_out(row);
  const float* given = p.given ? p.given + row * kStats : nullptr;
  const State state = given ? State{given[0], given[1], given[2]} : states[row * p.count];
  const Slope k = slope_of(p, row, state);
  const std::int64_t target = p.column(row), first = std::int64_t{blockIdx.x % across} * kOwn * kThreads;
  for (int i = 0; i < kOwn; ++i) {
    const std::int64_t at = first + i * kThreads + threadIdx.x, c = panel.begin + at;
    if (at >= columns) continue;
    float d = 0;
    if (!out && !k.nothing && c < panel.end && p.kept(row, c)) {
      const float raw = rounded(p, panel.logits, row, at);
      d = through_cap(p, lse128::gradient<float>(k, capped(p, raw), c == target ? 1.0f : 0.0f), raw);
    }
    rows::store(to.type, to.row(row), at, d);
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
  hipLaunchKernelGGL(fold, blocks(p.rows * leaves), dim3(kThreads), kGroups * sizeof(State), stream, p, panel,
                     leaves, bends(p), static_cast<State*>(states), targets);
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
  hipLaunchKernelGGL(gradient, blocks(p.rows * over(columns, kOwn * kThreads)), dim3(kThreads), 0, stream, p,
                     panel, to, columns, static_cast<const State*>(states));
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
