// Kernels of logp by the exponential of Hopper's special function units (arithmetic sm90/ex2/lse2048/l8):
//
//   e = ex2((z - m) c)      per logit one addition, one product, one ex2 and one addition to its chain; with the sum for the
//                           entropy one maximum and one fma more; half a maximum and one conversion from bf16
//
// sum_leaves    a warp has a row and a leaf (or what a panel has of it), or a block has where there are few. Of a tile a lane
//               has eight packs of eight, 256 entries apart, which lie in registers until the tile's maximum is known; its
//               eight chains are those of its packs' places. As a pack is summed, that of the next tile takes its registers.
//               The logits are read once
// gradients     a block has a row and 8192 columns; one thread finds out what all of them share while the others load
//
// Logits in fp32 or bf16 that lie in whole packs of 16 bytes are taken as they lie, if nothing rounds, bends or masks them; all
// others by kernels that ask for every pack what it is.
#pragma once

#include "arithmetic/logp/ex2.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/rows.hpp"

namespace rlk::cuda::logp {

using lse128::Matrix;
using lse128::Problem;
using lse128::Scale;
using lse128::State;
using lse2048::kTile;
using rows::kPack;
using rows::Type;
using simt::logp::Panel;

inline constexpr int kWarp = 32, kRound = kWarp * kPack;  // entries of a warp's lanes at once
inline constexpr int kPacks = kTile / kRound;             // of a lane, of a tile
inline constexpr int kThreads = 128, kMostWarps = 8;
static_assert(kPacks == 8 && kRound == lse2048::kChains);

// ---- a tile

// The larger of two, of a number and NaN the number; either of two zeros.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return b > a || a != a ? b : a;
#endif
}

// The sums of a lane's chains, one for each place of a pack.
template <bool Bends>
struct Chains {
  float s[kPack] = {}, u[kPack] = {};

  __device__ __forceinline__ void add(const float (&z)[kPack], float base, float c) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float x = lse2048::exponent(z[j], base, c), e = lse2048::exp2_by_unit(x);
      s[j] = simt::add_rn(s[j], e);
      if constexpr (Bends) u[j] = simt::fused(e, lse2048::finite_exponent(x), u[j]);
    }
  }
};
// The sum of a warp's chains, neighbours first, for each of its lanes.
__device__ __forceinline__ float tree(float (&v)[kPack]) {
#pragma unroll
  for (int step = 1; step < kPack; step *= 2)
#pragma unroll
    for (int j = 0; j < kPack; j += 2 * step) v[j] = simt::add_rn(v[j], v[j + step]);
  float sum = v[0];
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) sum = simt::add_rn(sum, __shfl_xor(sum, step, kWarp));
  return sum;
}
__device__ __forceinline__ float most_of_warp(float m) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) m = larger(m, __shfl_xor(m, step, kWarp));
  return m;
}
template <bool Bends>
__device__ __forceinline__ State tile_of(float most, Chains<Bends>& chains) {
  return lse2048::tile_of(most, tree(chains.s), Bends ? tree(chains.u) : 0.0f);
}

// ---- logits as they lie

// A pack, and its numbers: T is float, or the bits of a bf16.
template <class T>
struct Raw {
  rows::Bytes16 part[sizeof(T) / 2];
};
template <class T>
__device__ __forceinline__ void unpack(const Raw<T>& raw, float (&z)[kPack]) {
  rows::unpack<std::conditional_t<sizeof(T) == 4, float, simt::bf16>>(raw.part, z);
}

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ std::uint32_t larger_pairs(std::uint32_t a, std::uint32_t b) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ __forceinline__ std::uint32_t larger_pairs(const Raw<std::uint16_t>& raw) {
  const auto& w = raw.part[0].word;
  return larger_pairs(larger_pairs(w[0], w[1]), larger_pairs(w[2], w[3]));
}
#endif
// The largest of a lane's numbers, -inf where there is none.
template <class T>
__device__ __forceinline__ float most_of(const Raw<T> (&raw)[kPacks]) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    std::uint32_t pairs[kPacks];
#  pragma unroll
    for (int i = 0; i < kPacks; ++i) pairs[i] = larger_pairs(raw[i]);
#  pragma unroll
    for (int n = kPacks / 2; n > 0; n /= 2)
#  pragma unroll
      for (int i = 0; i < n; ++i) pairs[i] = larger_pairs(pairs[i], pairs[i + n]);
    const float low = simt::bits_float(pairs[0] << 16), high = simt::bits_float(pairs[0] & 0xffff0000u);
    return larger(lse128::none(), larger(low, high));
  }
#endif
  float most[4] = {lse128::none(), lse128::none(), lse128::none(), lse128::none()};
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float z[kPack];
    unpack<T>(raw[i], z);
#pragma unroll
    for (int j = 0; j < kPack; ++j) most[j % 4] = larger(most[j % 4], z[j]);
  }
  return larger(larger(most[0], most[1]), larger(most[2], most[3]));
}

// The pack at `from`.
template <class T>
__device__ __forceinline__ void fetch(const T* from, Raw<T>& raw) {
#pragma unroll
  for (int part = 0; part < static_cast<int>(sizeof(T) / 2); ++part)
    raw.part[part] = reinterpret_cast<const rows::Bytes16*>(from)[part];
}
template <class T>
__device__ __forceinline__ void fetch_all(const T* from, Raw<T> (&raw)[kPacks]) {
#pragma unroll
  for (int i = 0; i < kPacks; ++i) fetch<T>(from + i * kRound, raw[i]);
}
// A lane's packs of a tile of which `left` entries are there from its first on, -inf in place of the others.
template <class T>
__device__ __forceinline__ void fetch_some(const T* from, int left, Raw<T> (&raw)[kPacks]) {
  rows::Bytes16 absent;
#pragma unroll
  for (std::uint32_t& word : absent.word) word = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
#pragma unroll
    for (rows::Bytes16& part : raw[i].part) part = absent;
    if (i * kRound < left) fetch<T>(from + i * kRound, raw[i]);
  }
}

// The tile in raw, where that at `next` is then, if it is to be.
template <bool Ahead, bool Bends, class T>
__device__ __forceinline__ State sum_tile(Raw<T> (&raw)[kPacks], const T* next, float c) {
  const float most = most_of_warp(most_of<T>(raw)), base = lse2048::base_of(most);
  Chains<Bends> chains;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float z[kPack];
    unpack<T>(raw[i], z);
    if constexpr (Ahead) fetch<T>(next + i * kRound, raw[i]);
    chains.add(z, base, c);
  }
  return tile_of(most, chains);
}

// ---- logits of any kind

struct Eight {
  float at[kPack];
};
// What softcap makes of a pack: out of line, for calls with it.
RLK_DEVICE_CALL Eight capped(float cap, Eight z) {
  Problem p;
  p.cap = cap;
#pragma unroll 1
  for (float& x : z.at) x = lse128::capped<float>(p, x);
  return z;
}
// Which of a pack's columns take part, of `n` that are there.
__device__ __forceinline__ std::uint32_t part_of(const Problem& p, std::int64_t row, std::int64_t c, int n) {
  const std::uint32_t there = (1u << n) - 1;
  return p.keep == nullptr || n == 0 ? there : there & p.keep[row * p.words + c / 32] >> c % 32;
}
// A pack of the row as it goes into the rule; those that take no part are -inf.
__device__ __forceinline__ void logits_at(const Problem& p, const Panel& panel, std::int64_t row,
                                          std::int64_t c, int n, float (&z)[kPack]) {
  rows::get_pack<rows::Any>(panel.logits.type, panel.logits.row(row), c - panel.begin, n, z);
  rows::round_pack<rows::Any>(p.round, z);
  if (p.cap != 0) {
    Eight eight;
#pragma unroll
    for (int j = 0; j < kPack; ++j) eight.at[j] = z[j];
    eight = capped(p.cap, eight);
#pragma unroll
    for (int j = 0; j < kPack; ++j) z[j] = eight.at[j];
  }
  const std::uint32_t part = part_of(p, row, c, n);
#pragma unroll
  for (int j = 0; j < kPack; ++j) z[j] = (part >> j & 1) != 0 ? z[j] : lse128::none();
}
// The tile whose first column is `at`, of a leaf that ends at `end`; its logits are read twice.
template <bool Bends>
__device__ __forceinline__ State sum_any_tile(const Problem& p, const Panel& panel, std::int64_t row,
                                              std::int64_t at, std::int64_t end, int lane, float c) {
  const auto visit = [&](auto&& each) {
#pragma unroll 1
    for (std::int64_t first = at + lane * kPack; first < end && first < at + kTile; first += kRound) {
      float z[kPack];
      logits_at(p, panel, row, first, rows::pack_at(first, end), z);
      each(z);
    }
  };
  float most = lse128::none();
  visit([&](const float(&z)[kPack]) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) most = larger(most, z[j]);
  });
  most = most_of_warp(most);
  const float base = lse2048::base_of(most);
  Chains<Bends> chains;
  visit([&](const float(&z)[kPack]) { chains.add(z, base, c); });
  return tile_of(most, chains);
}

// ---- a leaf

// Where a warp's tiles lie: the leaf's from its own on, every `step` columns.
struct Walk {
  std::int64_t begin, end;
  int step;
};
// each(state) for every tile of a warp, in order.
template <class T, bool Bends, class Each>
__device__ __forceinline__ void for_tiles(const Problem& p, const Panel& panel, std::int64_t row, Walk walk,
                                          int lane, float c, Each each) {
  if constexpr (std::is_same_v<T, rows::Any>) {
    for (std::int64_t at = walk.begin; at < walk.end; at += walk.step)
      each(sum_any_tile<Bends>(p, panel, row, at, walk.end, lane, c));
  } else {
    const T* at = static_cast<const T*>(panel.logits.row(row)) + (walk.begin - panel.begin) + lane * kPack;
    int left = static_cast<int>(walk.end - walk.begin);
    Raw<T> raw[kPacks];
    bool there = left >= kTile;  // raw has the tile
    if (there) fetch_all<T>(at, raw);
    for (; left - walk.step >= kTile; left -= walk.step) {
      at += walk.step;
      each(sum_tile<true, Bends, T>(raw, at, c));
    }
#pragma unroll 1
    for (; left > 0; left -= walk.step, at += walk.step) {
      if (!there) fetch_some<T>(at, left - lane * kPack, raw);
      there = false;
      each(sum_tile<false, Bends, T>(raw, at, c));
    }
  }
}

// Blocks of a multiprocessor, by the registers that lanes' packs take.
template <class T, bool Bends>
constexpr int blocks_at_once(bool together) {
  const int wide = sizeof(T) == 2 ? Bends ? 7 : 8 : 5;
  return together ? wide / 2 : wide;
}

// Where the panel has the row's target, its logit as it goes into the rule.
template <class T>
__device__ __forceinline__ void put_target(const Problem& p, const Panel& panel, std::int64_t row,
                                           float* targets) {
  const std::int64_t at = p.column(row);
  if (panel.begin == p.leaf_begin(0)) targets[row] = lse128::none();
  if (at < panel.begin || at >= panel.end) return;
  const float raw = rows::load(panel.logits.type, panel.logits.row(row), at - panel.begin);
  if constexpr (std::is_same_v<T, rows::Any>) {
    if (!p.kept(row, at)) return;
    const float z = rows::round_to(p.round, raw);
    targets[row] = p.cap != 0 ? capped(p.cap, {{z}}).at[0] : z;
  } else {
    targets[row] = raw;
  }
}

// `T`: float, the bits of a bf16, or rows::Any. Together: all warps of a block have one leaf and take its tiles in turn.
// `leaves`: all of the call, or 1: what the panel has of its own, behind what came before it in the leaf.
template <class T, bool Bends, bool Together>
__global__ void __launch_bounds__(Together ? kMostWarps* kWarp : kThreads, blocks_at_once<T, Bends>(Together))
    sum_leaves(Problem p, Panel panel, unsigned leaves, State* states, float* targets) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned item = Together ? blockIdx.x : blockIdx.x * (kThreads / kWarp) + static_cast<unsigned>(warp);
  const std::int64_t row = item / leaves;
  if (row >= p.rows || p.left_out(row)) return;
  const int leaf = leaves == 1 ? panel.leaf : static_cast<int>(item % leaves);
  const Scale given = p.scale(row), k = lse2048::counting(given);
  const std::int64_t begin = leaves == 1 ? panel.begin : p.leaf_begin(leaf),
                     end = leaves == 1 ? panel.end : p.leaf_end(leaf);
  if (targets && (Together ? threadIdx.x == 0 : lane == 0)) put_target<T>(p, panel, row, targets);
  State all = begin == p.leaf_begin(leaf) ? lse128::nothing() : states[row * p.count + leaf];
  if constexpr (!Together) {
    for_tiles<T, Bends>(p, panel, row, {begin, end, kTile}, lane, k.c,
                        [&](const State& tile) { all = lse2048::join(all, tile, k); });
  } else {
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    const auto tiles = static_cast<int>((end - begin + kTile - 1) / kTile);
    State* const room = simt::dynamic_shared<State>();
    int mine = warp;
    for_tiles<T, Bends>(p, panel, row, {begin + std::int64_t{warp} * kTile, end, warps * kTile}, lane, k.c,
                        [&](const State& tile) {
                          if (lane == 0) room[mine] = tile;
                          mine += warps;
                        });
    __syncthreads();
    if (threadIdx.x == 0)
      for (int t = 0; t < tiles; ++t) all = lse2048::join(all, room[t], k);
  }
  if (Together ? threadIdx.x == 0 : lane == 0) states[row * p.count + leaf] = lse2048::counted(all, given);
}

// ---- the gradient

inline constexpr int kWide = 256, kEach = 4, kSpan = kWide * kPack;  // threads; packs of one, columns between

// What a block's threads share, from one of them.
struct OfRow {
  lse2048::Slope slope;
  int target;   // its column in the panel, or one that is none
  bool inside;  // the slope is of numbers, which keep what is infinite from the result by themselves
};
__device__ __forceinline__ OfRow of_row(const Problem& p, const Panel& panel, std::int64_t row, bool out,
                                        const State* states) {
  const float* given = p.given ? p.given + row * lse128::kStats : nullptr;
  const State state = out     ? lse128::nothing()
                      : given ? State{given[0], given[1], given[2]}
                              : states[row * p.count];
  const lse2048::Slope slope = lse2048::slope_of(p, row, state);
  return {slope, static_cast<int>(p.column(row) - panel.begin), !slope.nothing && slope.finite()};
}

// The gradients of a pack where something is infinite or NaN, and of the target's: out of line.
RLK_DEVICE_CALL Eight any_gradients(lse2048::Slope k, bool bends, int target, Eight z) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) z.at[j] = lse2048::gradient(k, bends, z.at[j], j == target);
  return z;
}
// Softcap's part of a pack's gradients; `raw` are the logits before it.
RLK_DEVICE_CALL Eight through_cap(float cap, Eight d, Eight raw) {
  Problem p;
  p.cap = cap;
#pragma unroll 1
  for (int j = 0; j < kPack; ++j) d.at[j] = lse128::through_cap<float>(p, d.at[j], raw.at[j]);
  return d;
}
// Of logits of any kind.
__device__ __forceinline__ Eight masked_gradients(const Problem& p, const lse2048::Slope& k, std::int64_t row,
                                                  std::int64_t c, int n, int target, Eight raw) {
  rows::round_pack<rows::Any>(p.round, raw.at);
  Eight d = any_gradients(k, p.d_entropy != nullptr, target, p.cap != 0 ? capped(p.cap, raw) : raw);
  if (p.cap != 0) d = through_cap(p.cap, d, raw);
  const std::uint32_t part = part_of(p, row, c, n);
#pragma unroll
  for (int j = 0; j < kPack; ++j) d.at[j] = (part >> j & 1) != 0 ? d.at[j] : 0.0f;
  return d;
}

// The row of a block, and the first column of a thread.
__device__ __forceinline__ std::int64_t row_of_block() {
  return blockIdx.y + std::int64_t{gridDim.y} * blockIdx.z;
}
__device__ __forceinline__ int first_of_thread() {
  return static_cast<int>(blockIdx.x) * kEach * kSpan + static_cast<int>(threadIdx.x) * kPack;
}
// The place of the target in a pack that begins at `at`, or -1.
__device__ __forceinline__ int place_of(int target, int at) {
  return static_cast<unsigned>(target - at) < static_cast<unsigned>(kPack) ? target - at : -1;
}

// `T`: float, or the bits of a bf16. `To`: what put_pack() takes. `columns` of `to`, those beyond the panel's as +0.
template <class T, class To, bool Bends>
__global__ void __launch_bounds__(kWide, 4)
    plain_gradients(Problem p, Panel panel, Matrix to, int columns, const State* states) {
  const std::int64_t row = row_of_block();
  if (row >= p.rows) return;
  const int first = first_of_thread();
  const bool out = p.left_out(row);
  const int left = out ? 0 : static_cast<int>(panel.width()) - first;
  auto* const shared = simt::dynamic_shared<OfRow>();
  const T* logits = static_cast<const T*>(panel.logits.data) + row * panel.logits.stride + first;
  Raw<T> raw[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (i * kSpan < left) fetch<T>(logits + i * kSpan, raw[i]);
  if (threadIdx.x == 0) *shared = of_row(p, panel, row, out, states);
  __syncthreads();
  const lse2048::Slope k = shared->slope;
  const int target = shared->target;
  const bool inside = shared->inside;
  void* const results = to.row(row);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = first + i * kSpan;
    if (at >= columns) return;
    const bool there = i * kSpan < left;
    Eight d;
    if (inside && there && place_of(target, at) < 0) {
      unpack<T>(raw[i], d.at);
#pragma unroll
      for (float& z : d.at) z = lse2048::gradient_inside<Bends>(k, z, 0.0f);
    } else {
      d = {};
      if (there && !k.nothing) {
        unpack<T>(raw[i], d.at);
        d = any_gradients(k, Bends, place_of(target, at), d);
      }
    }
    const int n = std::is_same_v<To, rows::Whole> ? kPack : rows::pack_at(at, columns);
    rows::put_pack<To>(to.type, results, at, n, d.at);
  }
}

// Of logits of any kind.
__global__ void __launch_bounds__(kWide, 4)
    gradients(Problem p, Panel panel, Matrix to, int columns, const State* states) {
  const std::int64_t row = row_of_block();
  if (row >= p.rows) return;
  const bool out = p.left_out(row);
  auto* const shared = simt::dynamic_shared<OfRow>();
  if (threadIdx.x == 0) *shared = of_row(p, panel, row, out, states);
  __syncthreads();
  const lse2048::Slope k = shared->slope;
#pragma unroll 1
  for (int i = 0; i < kEach; ++i) {
    const int at = first_of_thread() + i * kSpan, n = rows::pack_at(at, panel.width());
    Eight d = {};
    if (!out && !k.nothing && n > 0) {
      rows::get_pack<rows::Any>(panel.logits.type, panel.logits.row(row), at, n, d.at);
      d = masked_gradients(p, k, row, panel.begin + at, n, place_of(shared->target, at), d);
    }
    rows::put_pack<rows::Any>(to.type, to.row(row), at, rows::pack_at(at, columns), d.at);
  }
}

// ---- launches

inline bool bends(const Problem& p) { return p.entropy || p.stats || p.d_entropy; }
inline std::int64_t over(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

inline bool lies_whole(const Matrix& m) {
  return reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0 && m.stride % (16 / rows::size_of(m.type)) == 0;
}
// Whether logits may be taken as they lie, in packs of the leaves.
inline bool plain(const Problem& p, const Panel& panel) {
  const Matrix& l = panel.logits;
  const bool same = p.round == Type::f32 || p.round == l.type;
  return (l.type == Type::f32 || l.type == Type::bf16) && same && lies_whole(l) &&
         panel.width() % kPack == 0 && p.cap == 0 && p.keep == nullptr;
}
// Calls f(T{}) with what kernels take the logits for.
template <class F>
void for_logits(const Problem& p, const Panel& panel, F f) {
  if (!plain(p, panel))
    f(rows::Any{});
  else if (panel.logits.type == Type::f32)
    f(float{});
  else
    f(std::uint16_t{});
}

// Leaves that keep a large GPU busy with a warp each.
inline constexpr std::int64_t kManyLeaves = 4096;
inline constexpr std::int64_t kMostTiles = 2048;  // of a leaf, in a block's memory

// All leaves of a row that lies in memory whole, or a panel of one.
template <class T, bool Bends>
void launch_fold(const Problem& p, const Panel& panel, int leaves, State* states, float* targets,
                 hipStream_t stream, std::int64_t many) {
  const std::int64_t items = p.rows * leaves, columns = leaves == 1 ? panel.width() : p.leaf;
  const std::int64_t tiles = columns > kTile ? over(columns, kTile) : 1;
  const auto of_row = static_cast<unsigned>(leaves);
  if (items >= many || tiles > kMostTiles) {
    hipLaunchKernelGGL((sum_leaves<T, Bends, false>),
                       dim3(static_cast<unsigned>(over(items, kThreads / kWarp))), dim3(kThreads), 0, stream,
                       p, panel, of_row, states, targets);
    return;
  }
  const auto warps = static_cast<unsigned>(over(tiles, over(tiles, kMostWarps)));  // as many tiles each
  hipLaunchKernelGGL((sum_leaves<T, Bends, true>), dim3(static_cast<unsigned>(items)), dim3(warps * kWarp),
                     static_cast<std::size_t>(tiles) * sizeof(State), stream, p, panel, of_row, states,
                     targets);
}
inline void launch_fold(const Problem& p, const Panel& panel, int leaves, State* states, float* targets,
                        hipStream_t stream, std::int64_t many = kManyLeaves) {
  if (p.rows == 0) return;
  for_logits(p, panel, [&]<class T>(T) {
    bends(p) ? launch_fold<T, true>(p, panel, leaves, states, targets, stream, many)
             : launch_fold<T, false>(p, panel, leaves, states, targets, stream, many);
  });
}

// `columns` of `to`, those beyond the panel's as +0.
inline void launch_gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                            const State* states, hipStream_t stream) {
  if (p.rows == 0 || columns == 0) return;
  constexpr std::int64_t kMostRows = 32768;
  const dim3 grid(static_cast<unsigned>(over(columns, kEach * kSpan)),
                  static_cast<unsigned>(p.rows < kMostRows ? p.rows : kMostRows),
                  static_cast<unsigned>(over(p.rows, kMostRows)));
  const auto launch = [&](void (*kernel)(Problem, Panel, Matrix, int, const State*)) {
    hipLaunchKernelGGL(kernel, grid, dim3(kWide), sizeof(OfRow), stream, p, panel, to,
                       static_cast<int>(columns), states);
  };
  const bool whole = to.type == Type::bf16 && lies_whole(to) && columns % kPack == 0;
  for_logits(p, panel, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, rows::Any>) {
      launch(gradients);
    } else {
      const auto as = [&]<class To>(To) {
        launch(p.d_entropy ? plain_gradients<T, To, true> : plain_gradients<T, To, false>);
      };
      if (whole)
        as(rows::Whole{});
      else if (to.type == Type::f32)
        as(float{});
      else
        as(rows::Any{});
    }
  });
}

}  // namespace rlk::cuda::logp
