// What producers and consumers of the wgmma kernel share: the tile, the ring of stages in shared memory, and
// which work a block has.
#pragma once

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/cluster.cuh"
#include "cuda/lm_head/epilogue.cuh"
#include "cuda/lm_head/split_k_cluster.cuh"
#include "cuda/lm_head/split_k_memory.cuh"
#include "cuda/lm_head/stage.cuh"

namespace rlk::cuda::lm_head {

inline constexpr int kStep = 64;  // of k per part of a stage
inline constexpr int kMaxStages = 32;
// 16 MB of the m operand at K = 4096: stays in L2 while a band crosses n.
inline constexpr int kBandRows = 2048;
inline constexpr int kMostShared = 227 * 1024;  // of a block
inline constexpr int kSharedBudget = kMostShared - 1024 - 512;

struct Params {
  Gemm gemm;
  std::int64_t clusters_m, clusters_n;
  int stages, a_rows, band;
  bool whole_lines;
  // Sums::memory
  bool spread;  // a block takes one range of a tile, not all
  Slots slots;
};

enum class Sums : std::uint8_t { whole, cluster, memory };

// What one thread does per stage around the products, some 250 cycles of them one after the other, is longer
// than four narrow products: where k is one range, stages of narrow tiles hold several parts.
template <class T, int Groups, int Columns, bool KA, bool KB, int ClusterM_, int ClusterN_, Sums kSums,
          int kParts>
struct Traits {
  static_assert(kParts == 1 || kSums == Sums::whole, "a range may end within a stage");
  using Element = T;
  static constexpr int kGroups = Groups, kBM = 64 * Groups, BN = Columns, Parts = kParts;
  static constexpr bool kAContiguous = KA, kBContiguous = KB;  // along k
  static constexpr int ClusterM = ClusterM_, ClusterN = ClusterN_;
  static constexpr Sums sums = kSums;
  using A = Staged<kBM, KA>;
  using B = Staged<BN, KB>;
  static constexpr int kMultipliers = 128 * Groups, kThreads = kMultipliers + 128;
  static constexpr int kRanges = sums == Sums::whole ? 1 : kRangesOfK;
  static constexpr int kCluster = ClusterM * ClusterN;
  // Blocks that share rows fetch whole parts of a stage in turn where there are enough, else some of the rows
  // each: boxes wholly behind the last row made d_hidden of up to eight rows a fifth slower.
  static constexpr bool kSharesParts = Parts % ClusterN == 0;
  static constexpr int kBoxes = kSharesParts ? 1 : ClusterN;
  static constexpr int kBlocks = kCluster * (sums == Sums::cluster ? kRanges : 1);
  using Meet = Exchange<kMultipliers, BN, sums == Sums::cluster ? kRanges : 1>;
  static constexpr bool kStoresLines = BN >= 64 && sums != Sums::cluster;
  // Behind the rings: the outputs' staging, or what the other ranges send.
  static constexpr int kOutBytes = sums == Sums::cluster ? Meet::kBytes
                                   : kStoresLines        ? Groups * 4 * 2 * kLineBytes
                                                         : 0;
};

// A block's shared memory, its place among the blocks that work together, and its work. A unit of work is a
// tile with `ranges_here` ranges of k; a thread goes through the stages of all units in the same order,
// whatever its role.
template <class P>
struct Block {
  static constexpr int kParts = P::Parts;
  const Params& p;
  // The operands' rings, the outputs' staging (behind the ring, so that reading past the last real rows stays
  // inside), barriers: a stage is full, a stage is empty, and what Sums need.
  int a_bytes;
  unsigned char *ring_b, *ring_a, *staging;
  std::uint64_t *full, *empty, *meet;

  int warp;
  // Block `rank` of those that share operands, at (rank_m, rank_n) of their tiles; of the ranges in a
  // cluster, `cluster_range`.
  int rank, rank_m, rank_n, cluster_range;

  std::int64_t tiles, units, first, stride;
  bool spread;
  int steps, per_range, ranges_here;

  int phase = 0, stage = 0;

  __device__ __forceinline__ Block(const Params& params, unsigned char* shared_raw) : p(params) {
    unsigned char* const shared = shared_raw + (1024 - shared_address(shared_raw) % 1024) % 1024;
    a_bytes = P::kAContiguous ? p.a_rows * 128 : P::A::kBytes;
    ring_b = shared;
    ring_a = shared + p.stages * kParts * P::B::kBytes;
    staging = ring_a + (p.stages * kParts - 1) * a_bytes + P::A::kBytes;
    full = reinterpret_cast<std::uint64_t*>(staging + P::kOutBytes);
    empty = full + p.stages;
    meet = empty + p.stages;
    // Read from one lane, so that the compiler sees that a warp stays together and keeps stages and
    // descriptors in uniform registers: moving them there before each product took longer than a narrow
    // product.
    warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    rank = P::kBlocks > 1 ? cluster_rank() % P::kCluster : 0;
    rank_m = rank % P::ClusterM, rank_n = rank / P::ClusterM;
    cluster_range = P::sums == Sums::cluster ? cluster_rank() / P::kCluster : 0;
  }
  __device__ __forceinline__ void plan_work() {
    tiles = p.clusters_m * p.clusters_n;
    spread = P::sums == Sums::memory && p.spread;
    units = spread ? tiles * P::kRanges : tiles;
    first = blockIdx.x / P::kBlocks, stride = gridDim.x / P::kBlocks;
    steps = static_cast<int>((p.gemm.k + kStep * kParts - 1) / (kStep * kParts));
    per_range = (steps + P::kRanges - 1) / P::kRanges;
    ranges_here = P::sums == Sums::memory && !spread ? P::kRanges : 1;
  }
  __device__ __forceinline__ std::int64_t tile_of(std::int64_t unit) const {
    return spread ? unit % tiles : unit;
  }
  // This block's part of a cluster's tile.
  __device__ __forceinline__ std::int64_t row0(const TilePosition& at) const {
    return (at.m * P::ClusterM + rank_m) * P::kBM;
  }
  __device__ __forceinline__ std::int64_t column0(const TilePosition& at) const {
    return (at.n * P::ClusterN + rank_n) * P::BN;
  }
  __device__ __forceinline__ int first_range(std::int64_t unit) const {
    return spread ? static_cast<int>(unit / tiles) : cluster_range;
  }
  __device__ __forceinline__ int step_at(int range) const {
    return range * per_range < steps ? range * per_range : steps;
  }
  __device__ __forceinline__ int after(int s) const { return s + 1 == p.stages ? 0 : s + 1; }
  __device__ __forceinline__ void advance() {
    stage = after(stage);
    if (stage == 0) phase ^= 1;
  }
};

}  // namespace rlk::cuda::lm_head
