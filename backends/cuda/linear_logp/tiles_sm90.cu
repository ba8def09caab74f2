// linear_logp's kernels that keep the logits in registers: lm_head's wide tiles (128x256, pairs that share the weight's rows by
// multicast), with logp's sums (simt/logp/fragment.hpp) or its gradient in place of the epilogue that would write them. Whatever
// the tile, the bits of a logit are those of sm90/t25k16.
#include <algorithm>
#include <limits>

#include "cuda/linear_logp/tiles.h"
#include "cuda/lm_head/wgmma_kernel.cuh"
#include "simt/logp/fragment.hpp"

namespace rlk::cuda::linear_logp {
namespace {

using namespace lm_head;
using lse128::Scale;
using lse128::Slope;
using simt::logp::kFragment;

template <class T>
using Wide = Traits<T, 2, 256, true, true, 2, 1, Sums::whole, 1>;
inline constexpr int kColumns = 256,
                     kRowLogits = 2 * kFragment;  // of a tile; of a thread, of one of its two rows

// What a thread has of one of its rows: tile 0, then tile 1.
__device__ __forceinline__ float& logit(float (&acc)[kColumns / 2], int row, int i) {
  return acc[i / 2 * 4 + row * 2 + i % 2];
}
__device__ __forceinline__ float logit(const float (&acc)[kColumns / 2], int row, int i) {
  return acc[i / 2 * 4 + row * 2 + i % 2];
}
// The number of column `at` of a tile if this thread has it, else -1.
__device__ __forceinline__ int number_of(std::int64_t at, int columns) {
  const bool mine = at >= 0 && at < columns &&
                    simt::logp::lane_of_column(static_cast<int>(at)) == static_cast<int>(threadIdx.x) % 4;
  return mine ? simt::logp::number_of_column(static_cast<int>(at)) : -1;
}
template <class T>
__device__ __forceinline__ void round_logits(const Problem& p, float (&acc)[kColumns / 2]) {
  if (p.round == lse128::Type::f32) return;
#pragma unroll
  for (float& z : acc) z = to_float(round_to<T>(z));
}
__device__ __forceinline__ std::int64_t row_of(int half) {
  return static_cast<int>(threadIdx.x) % 32 / 4 + half * 8;
}

// The second warpgroup begins what it does to its logits when the first is done: the tensor cores then have the products of one
// of them, the next tile's or this one's, while the other computes. Not where the first could run a whole tile ahead.
template <class P>
__device__ __forceinline__ void wait_for_turn(const Block<P>& b) {
  if (b.warp / 4 == 1 && b.steps > b.p.stages) asm volatile("bar.sync 1, 256;" ::: "memory");
}
template <class P>
__device__ __forceinline__ void end_turn(const Block<P>& b) {
  if (b.warp / 4 == 0 && b.steps > b.p.stages) asm volatile("bar.arrive 1, 256;" ::: "memory");
}

// ---- sums

// Tiles of the leaves, one leaf after the other, `across` of each.
struct Leaves {
  Problem p;
  State* tiles;  // [row][leaf][room]
  std::int64_t room;
  int across;
  float* targets;

  __device__ __forceinline__ int leaf(const TilePosition& at) const {
    return static_cast<int>(at.n) / across;
  }
  // Columns of the leaf before this tile.
  __device__ __forceinline__ int before(const TilePosition& at) const {
    return static_cast<int>(at.n) % across * kColumns;
  }
  __device__ __forceinline__ int column0(const TilePosition& at) const {
    return static_cast<int>(p.leaf_begin(leaf(at))) + before(at);
  }
};

// A row, read before its logits are there.
struct RowToSum {
  Scale k;
  std::int64_t target;
  bool out;

  __device__ __forceinline__ RowToSum(const Problem& p, std::int64_t row)
      : k(p.scale(row)), target(p.column(row)), out(p.left_out(row)) {}
};

template <bool Bends>
__device__ __forceinline__ void sum_row(const Leaves& l, const TilePosition& at, const RowToSum& r,
                                        std::int64_t row, const float (&acc)[kColumns / 2], int half) {
  const int lane = static_cast<int>(threadIdx.x) % 4, leaf = l.leaf(at), before = l.before(at);
  const int columns = static_cast<int>(l.p.leaf_end(leaf) - l.p.leaf_begin(leaf)) - before;
  State* to = l.tiles + (row * l.p.count + leaf) * l.room + before / lse128::kTile;
#pragma unroll
  for (int tile = 0; tile < kColumns / lse128::kTile; ++tile) {
    const int left = columns - tile * lse128::kTile;
    if (left <= 0) break;  // for all threads
    float z[kFragment];
#pragma unroll
    for (int i = 0; i < kFragment; ++i) z[i] = logit(acc, half, tile * kFragment + i);
    if (left < lse128::kTile)
#pragma unroll
      for (int i = 0; i < kFragment; ++i)
        if (simt::logp::fragment_column(lane, i) >= left) z[i] = lse128::none();
    const State sums = simt::logp::fragment_tile<Bends>(z, r.k);
    if (lane == 0 && !r.out) to[tile] = sums;
  }
  if (at.n == 0 && lane == 0 && r.target < 0) l.targets[row] = lse128::none();
  if (const int here = number_of(r.target - l.column0(at), columns < kColumns ? columns : kColumns);
      here >= 0) {
#pragma unroll
    for (int i = 0; i < kRowLogits; ++i)
      if (i == here) l.targets[row] = logit(acc, half, i);
  }
}

template <bool Bends, class P>
__device__ __forceinline__ void sum(Block<P>& b, const Leaves& l) {
  float acc[P::BN / 2] = {};
  for (std::int64_t unit = b.first; unit < b.units; unit += b.stride) {
    const TilePosition at = place(unit, b.p.clusters_m, b.p.clusters_n, b.p.band);
    const std::int64_t row = b.row0(at) + b.warp * 16 + row_of(0);
    const RowToSum rows[2] = {{l.p, row}, {l.p, row + 8}};
    multiply_range(b, acc, b.warp / 4, 0);
    wait_for_turn(b);
    round_logits<typename P::Element>(l.p, acc);
#pragma unroll
    for (int half = 0; half < 2; ++half) sum_row<Bends>(l, at, rows[half], row + 8 * half, acc, half);
    end_turn(b);
  }
}

template <class P, bool Bends>
__global__ void __launch_bounds__(P::kThreads, 1)
    summed(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map_a,
           const __grid_constant__ CUtensorMap map_b, const __grid_constant__ Leaves l) {
  extern __shared__ unsigned char shared_raw[];
  Block<P> b(p, shared_raw);
  set_up(b, map_a, map_b);
  share_out(
      b, [&](const TilePosition& at, int k0) { load_a(b, map_a, b.row0(at), k0); },
      [&](const TilePosition& at, int k0) { load_b(b, map_b, l.column0(at), k0); },
      [&] { sum<Bends>(b, l); });
}

// ---- gradients

struct Slopes {
  Problem p;
  std::int64_t begin;
  const State* states;
};

struct RowToBend {
  Slope k;
  std::int64_t target;
  bool nothing;

  __device__ __forceinline__ RowToBend(const Slopes& s, std::int64_t row)
      : target(s.p.column(row)), nothing(s.p.left_out(row)) {
    const float* given = s.p.given ? s.p.given + row * lse128::kStats : nullptr;
    k = lse128::slope_of(s.p, row, given ? State{given[0], given[1], given[2]} : s.states[row * s.p.count]);
    nothing = nothing || k.nothing;
  }
};

__device__ __forceinline__ void slope_row(const RowToBend& r, std::int64_t target, float (&acc)[kColumns / 2],
                                          int half) {
  float z[kRowLogits];
#pragma unroll
  for (int i = 0; i < kRowLogits; ++i) z[i] = logit(acc, half, i);
  simt::logp::fragment_slopes(z, r.k, number_of(target, kColumns));
#pragma unroll
  for (int i = 0; i < kRowLogits; ++i) logit(acc, half, i) = r.nothing ? 0.0f : z[i];
}

template <class P>
__device__ __forceinline__ void bend(Block<P>& b, const Slopes& s) {
  float acc[P::BN / 2] = {};
  for (std::int64_t unit = b.first; unit < b.units; unit += b.stride) {
    const TilePosition at = place(unit, b.p.clusters_m, b.p.clusters_n, b.p.band);
    const std::int64_t row0 = b.row0(at) + b.warp * 16, row = row0 + row_of(0);
    const RowToBend rows[2] = {{s, row}, {s, row + 8}};
    multiply_range(b, acc, b.warp / 4, 0);
    wait_for_turn(b);
    round_logits<typename P::Element>(s.p, acc);
    const std::int64_t column0 = b.column0(at);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      slope_row(rows[half], rows[half].target - s.begin - column0, acc, half);
    store(b, acc, row0, column0);
    end_turn(b);
  }
}

template <class P>
__global__ void __launch_bounds__(P::kThreads, 1)
    bent(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map_a,
         const __grid_constant__ CUtensorMap map_b, const __grid_constant__ Slopes s) {
  extern __shared__ unsigned char shared_raw[];
  Block<P> b(p, shared_raw);
  set_up(b, map_a, map_b);
  share_out(
      b, [&](const TilePosition& at, int k0) { load_a(b, map_a, b.row0(at), k0); },
      [&](const TilePosition& at, int k0) { load_b(b, map_b, b.column0(at), k0); }, [&] { bend(b, s); });
}

// ---- launch

template <class P, class What>
cudaError_t start(void (*kernel)(Params, CUtensorMap, CUtensorMap, What), const Params& p, const What& what,
                  int multiprocessors, cudaStream_t stream) {
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
      e != cudaSuccess)
    return e;
  CUtensorMap a, b;
  if (!encode_operands<P>(&a, &b, p)) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = shared_bytes<P>(p);
  config.stream = stream;
  cudaLaunchAttribute pairs{};
  pairs.id = cudaLaunchAttributeClusterDimension;
  pairs.val.clusterDim = {P::kBlocks, 1, 1};
  config.attrs = &pairs, config.numAttrs = 1;
  const std::int64_t units = p.clusters_m * p.clusters_n, together = multiprocessors / P::kBlocks;
  config.gridDim = dim3(static_cast<unsigned>((units < together ? units : together) * P::kBlocks));
  return cudaLaunchKernelEx(&config, kernel, p, a, b, what);
}

template <class T>
cudaError_t start_sums(const Gemm& g, Leaves l, int multiprocessors, cudaStream_t stream) {
  using P = Wide<T>;
  Params p = params_of<P>(g);
  p.clusters_n = l.p.count * l.across;
  return start<P>(simt::logp::bends(l.p) ? summed<P, true> : summed<P, false>, p, l, multiprocessors, stream);
}
template <class T>
cudaError_t start_slopes(const Gemm& g, const Slopes& s, int multiprocessors, cudaStream_t stream) {
  using P = Wide<T>;
  return start<P>(bent<P>, params_of<P>(g), s, multiprocessors, stream);
}

}  // namespace

bool tiles_serve(const Gemm& g, const Problem& p) {
  constexpr std::int64_t kTensorMapLimit = std::numeric_limits<std::int32_t>::max();
  const auto type = g.a.type == Float::f16 ? lse128::Type::f16 : lse128::Type::bf16;
  return p.cap == 0 && p.keep == nullptr && p.d_entropy == nullptr && g.bias == nullptr &&
         (p.round == lse128::Type::f32 || p.round == type) && aligned16(g.a) && aligned16(g.b) && g.n > 0 &&
         g.k > 0 && std::max({g.m, g.n, g.k}) < kTensorMapLimit && encoder() != nullptr;
}

cudaError_t launch_tiles(const Gemm& g, const Problem& p, State* tiles, std::int64_t room, float* targets,
                         int multiprocessors, cudaStream_t stream) {
  const Leaves l{p, tiles, room, static_cast<int>((p.leaf + kColumns - 1) / kColumns), targets};
  return (g.a.type == Float::f16 ? start_sums<__half> : start_sums<__nv_bfloat16>)(g, l, multiprocessors,
                                                                                   stream);
}

cudaError_t launch_slopes(const Gemm& g, const Problem& p, std::int64_t begin, const State* states,
                          int multiprocessors, cudaStream_t stream) {
  const Slopes s{p, begin, states};
  return (g.a.type == Float::f16 ? start_slopes<__half> : start_slopes<__nv_bfloat16>)(g, s, multiprocessors,
                                                                                       stream);
}

}  // namespace rlk::cuda::linear_logp
