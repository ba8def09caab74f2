// The portable GPU kernels of logp (arithmetic lse128/l8): the bits of the native backend on every GPU.
//
// fold       a block has a row and a leaf, or a wave has where there are many; four lanes a tile: a lane has the packs 2 l,
//            2 l + 1, 2 l + 8, 2 l + 9 of its 16, so all bits of the tree but 4 and 5 are a lane's own. What two tiles' joining
//            multiplies by follows from the maxima, which 32 lanes know for 32 tiles at once; what is left of it in order is a
//            chain of two fma. The logits are read once
// finish     one thread a row: leaves pairwise, the target's logit, results
// gradient   one thread a pack, two of them a row apart
// bad        one block counts rows
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/logp/plain.hpp"
#include "simt/logp/tiles.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::logp {

using namespace rlk::lse128;

inline constexpr int kThreads = 128;
inline constexpr int kTiles = kThreads / kTileLanes;  // of a block at a time
static_assert(kTiles == kWave);

// A logit of the span as it goes into the rule, before softcap.
__device__ __forceinline__ float rounded(const Problem& p, const Matrix& logits, std::int64_t row,
                                         std::int64_t at) {
  return rows::round_to(p.round, rows::load(logits.type, logits.row(row), at));
}

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
  if (n == 0)
#pragma unroll
    for (int k = 0; k < kPack; ++k) z[k] = none();
  if (p.round != Type::f32) rows::round_pack<rows::Any>(p.round, z);
  if (n == 0 || (p.cap == 0 && p.keep == nullptr && n == kPack)) return;
  Eight eight;
#pragma unroll
  for (int k = 0; k < kPack; ++k) eight.at[k] = z[k];
  eight = bent(p, row, c, n, eight);
#pragma unroll
  for (int k = 0; k < kPack; ++k) z[k] = eight.at[k];
}

// What the threads of a leaf share: how tiles are joined, and the tiles, in two halves in turn.
struct Desk {
  Joining room[kWave];
  State tiles[2][kTiles];
};

// `Waves` of 32 lanes have a leaf, and the block as many leaves of one row as fit. Tiles are joined by 32, so few waves take
// some steps to them.
template <class T, int Waves>
__global__ void __launch_bounds__(kThreads, 5)
    fold(Problem p, Panel panel, int leaves, bool bends, State* states, float* targets) {
  constexpr int kTeam = Waves * kWave, kTeams = kThreads / kTeam, kAtOnce = kTeam / kTileLanes;
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  Desk& desk = dynamic_shared<Desk>()[team];
  const std::int64_t item = std::int64_t{blockIdx.x} * kTeams + team, row = item / leaves;
  const int leaf = leaves == 1 ? panel.leaf : static_cast<int>(item % leaves), lane = thread % kTileLanes;
  if (p.left_out(row)) return;
  // Where the panel is all of the row, its leaf is a part of it.
  const std::int64_t from = leaves > 1 ? p.leaf_begin(leaf) : panel.begin,
                     end = leaves > 1 ? p.leaf_end(leaf) : panel.end, start = leaves > 1 ? 0 : panel.begin;
  const std::int64_t stop = from + (leaves > 1 ? p.leaf : end - from);  // as many turns for every leaf
  const Scale k = p.scale(row);
  const void* logits = panel.logits.row(row);
  State* kept = states + row * p.count + leaf;
  State all = from == p.leaf_begin(leaf) ? nothing() : *kept;
  rows::Raw<T> raw[kPacks];
  // The column of a pack of this lane.
  const auto column = [&](std::int64_t at, int i) {
    return at + thread / kTileLanes * kTile + pack_start(lane, i);
  };
  const auto fetch = [&](std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const std::int64_t c = column(at, i);
      raw[i] = rows::fetch_pack<T>(panel.logits.type, logits, c - start, rows::pack_at(c, end));
    }
  };
  fetch(from);
  int half = 0;
  for (std::int64_t first = from; first < stop; first += kTiles * kTile) {
    State* const tiles = desk.tiles[half];
    half = 1 - half;
#pragma unroll 1
    for (int done = 0; done < kTiles; done += kAtOnce) {
      const std::int64_t at = first + done * kTile;
      float z[kPacks][kPack];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const std::int64_t c = column(at, i);
        logits_of<T>(p, raw[i], panel.logits.type, row, c, rows::pack_at(c, end), z[i]);
      }
      fetch(at + kAtOnce * kTile);
      const State mine = tile(z, k, bends);
      if (lane == 0) tiles[done + thread / kTileLanes] = mine;
    }
    if constexpr (Waves > 1)
      __syncthreads();
    else
      wave_sync();
    if (Waves == 1 || thread < static_cast<int>(warpSize))  // a whole wave, which may be two times 32 lanes
      all = join_tiles(all, tiles[thread % kWave], thread % kWave, k, bends, desk.room);
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
    write(p, row, lse128::left_out(p));
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

// Leaves that keep a large GPU busy with a wave each.
inline constexpr std::int64_t kManyLeaves = 2048;
inline bool whole_packs(const Panel& panel) {
  return panel.logits.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(panel.logits.data) % 16 == 0 &&
         panel.logits.stride % kPack == 0 && (panel.end - panel.begin) % kPack == 0;
}

// Whether logits may be taken as they lie (plain.hpp).
inline bool plain(const Problem& p, const Panel& panel) {
  const Matrix& l = panel.logits;
  const bool fits = l.type == Type::f32
                        ? l.stride % 4 == 0 && p.round == Type::f32
                        : l.type == Type::bf16 && l.stride % kPack == 0 && p.round != Type::f16;
  return fits && reinterpret_cast<std::uintptr_t>(l.data) % 16 == 0 &&
         (panel.end - panel.begin) % kPack == 0 && p.cap == 0 && p.keep == nullptr;
}
template <class T, bool Bends, int Waves>
void launch_plain_fold(const Problem& p, const Panel& panel, int leaves, void* states, float* targets,
                       hipStream_t stream) {
  constexpr int kTeams = kPlainThreads / (Waves * kWave);
  hipLaunchKernelGGL((plain_fold<T, Bends, Waves>), blocks(over(p.rows * leaves, kTeams)),
                     dim3(kPlainThreads), kTeams * sizeof(PlainDesk), stream, p, panel, leaves,
                     static_cast<State*>(states), targets);
}

// All leaves of a row that lies in memory whole, or one leaf's part of it.
inline void launch_fold(const Problem& p, const Panel& panel, int leaves, void* states, float* targets,
                        hipStream_t stream, std::int64_t many = kManyLeaves) {
  if (p.rows == 0) return;
  if (plain(p, panel)) {
    const auto with = [&]<class T, bool Bends>(T) {
      p.rows* leaves >= many ? launch_plain_fold<T, Bends, 1>(p, panel, leaves, states, targets, stream)
                             : launch_plain_fold<T, Bends, 4>(p, panel, leaves, states, targets, stream);
    };
    const auto of = [&]<class T>(T number) {
      bends(p) ? with.template operator()<T, true>(number) : with.template operator()<T, false>(number);
    };
    return panel.logits.type == Type::f32 ? of(float{}) : of(std::uint16_t{});
  }
  const auto launch = [&]<class T, int Waves>(T, std::integral_constant<int, Waves>) {
    constexpr int kTeams = kThreads / (Waves * kWave);
    hipLaunchKernelGGL((fold<T, Waves>), blocks(p.rows * leaves / kTeams), dim3(kThreads),
                       kTeams * sizeof(Desk), stream, p, panel, leaves, bends(p), static_cast<State*>(states),
                       targets);
  };
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, kThreads / kWave> kBlock;
  if (whole_packs(panel) && leaves % (kThreads / kWave) == 0 && p.rows * leaves >= many)
    launch(rows::Whole{}, kOne);
  else
    rows::for_type(panel.logits.type == Type::bf16, [&]<class T>(T type) { launch(type, kBlock); });
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
  if (plain(p, panel) && columns % kPack == 0) {
    const auto with = [&]<class T, class To>(T, To) {
      hipLaunchKernelGGL((plain_gradient<T, To>), blocks(p.rows * over(columns, kPlainEach * kPlainSpan)),
                         dim3(kPlainThreads), 0, stream, p, panel, to, columns,
                         static_cast<const State*>(states));
    };
    const auto of = [&]<class T>(T number) {
      to.type == Type::bf16 ? with(number, bf16{}) : with(number, rows::Any{});
    };
    return panel.logits.type == Type::f32 ? of(float{}) : of(std::uint16_t{});
  }
  rows::for_type(panel.logits.type == Type::bf16 && to.type == Type::bf16, [&]<class T>(T) {
    hipLaunchKernelGGL((gradient<T>), blocks(p.rows * over(columns, kEach * kSpan)), dim3(kThreads), 0,
                       stream, p, panel, to, columns, static_cast<const State*>(states));
  });
}

inline void launch_reduction(const Problem& p, void* states, hipStream_t stream,
                             std::int64_t many = kManyLeaves) {
  launch_fold(p, whole(p), p.count, states, nullptr, stream, many);
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
