// The producers of the wgmma kernel: one thread each for the two operands, since filling a stage has to take
// less time than a narrow product. Blocks that share an operand fetch a part of it each, for all of them, by
// multicast.
#pragma once

#include "cuda/hopper/tma.cuh"
#include "cuda/lm_head/wgmma_block.cuh"

namespace rlk::cuda::lm_head {

// `Count` bits, `Step` apart.
template <int Step, int Count>
inline constexpr unsigned every = every<Step, Count - 1> << Step | 1;
template <int Step>
inline constexpr unsigned every<Step, 0> = 0;

// Every stage in order: waits until it is empty, announces its bytes, and has `load` order the copies.
template <class P, class Load>
__device__ __forceinline__ void produce(Block<P>& b, int bytes, Load&& load) {
  for (std::int64_t unit = b.first; unit < b.units; unit += b.stride) {
    const TilePosition at = place(b.tile_of(unit), b.p.clusters_m, b.p.clusters_n, b.p.band);
    const int begin = b.step_at(b.first_range(unit)), end = b.step_at(b.first_range(unit) + b.ranges_here);
    for (int step = begin; step < end; ++step, b.advance()) {
      barrier_wait(b.empty + b.stage, b.phase ^ 1);
      barrier_expect(b.full + b.stage, bytes * P::Parts);
      load(at, step * kStep * P::Parts);
    }
  }
}

template <class P>
__device__ __forceinline__ void load_a(const Block<P>& b, const CUtensorMap& map, std::int64_t first,
                                       int k0) {
  const int row0 = static_cast<int>(first);
#pragma unroll
  for (int part = 0; part < P::Parts; ++part) {
    unsigned char* const to = b.ring_a + (b.stage * P::Parts + part) * b.a_bytes;
    const int k = k0 + part * kStep;
    if constexpr (P::ClusterN > 1) {
      static_assert(P::kAContiguous);
      const auto same_rows = static_cast<std::uint16_t>(
          every<P::ClusterM, P::ClusterN> << b.rank_m << b.cluster_range * P::kCluster);
      if constexpr (P::kSharesParts) {
        if (part % P::ClusterN == b.rank_n)
          tma_load_multicast(to, &map, b.full + b.stage, k, row0, same_rows);
      } else {
        const int share = b.a_bytes / 128 / P::ClusterN;
        tma_load_multicast(to + b.rank_n * share * 128, &map, b.full + b.stage, k, row0 + b.rank_n * share,
                           same_rows);
      }
    } else if constexpr (P::kAContiguous) {
      tma_load(to, &map, b.full + b.stage, k, row0);
    } else {
#pragma unroll
      for (int block = 0; block < P::A::kBlocks; ++block)
        tma_load(to + block * P::A::kBlockBytes, &map, b.full + b.stage, row0 + block * 64, k);
    }
  }
}

template <class P>
__device__ __forceinline__ void load_b(const Block<P>& b, const CUtensorMap& map, std::int64_t first,
                                       int k0) {
  const int column0 = static_cast<int>(first);
  unsigned char* const to = b.ring_b + b.stage * P::Parts * P::B::kBytes;
  [[maybe_unused]] const auto same_columns = static_cast<std::uint16_t>(
      every<1, P::ClusterM> << b.rank_n * P::ClusterM << b.cluster_range * P::kCluster);
  if constexpr (P::kBContiguous) {
    constexpr int kShare = P::BN / P::ClusterM;
#pragma unroll
    for (int part = 0; part < P::Parts; ++part) {
      unsigned char* const share = to + part * P::B::kBytes + b.rank_m * kShare * 128;
      const int k = k0 + part * kStep, column = column0 + b.rank_m * kShare;
      if constexpr (P::ClusterM > 1)
        tma_load_multicast(share, &map, b.full + b.stage, k, column, same_columns);
      else
        tma_load(share, &map, b.full + b.stage, k, column);
    }
  } else {
    static_assert(P::Parts * P::B::kBlocks % P::ClusterM == 0);
    constexpr int kShare = P::Parts * P::B::kBlocks / P::ClusterM;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int block = b.rank_m * kShare + i, k = k0 + block / P::B::kBlocks * kStep,
                column = column0 + block % P::B::kBlocks * P::B::kBox;
      if constexpr (P::ClusterM > 1)
        tma_load_multicast(to + block * P::B::kBlockBytes, &map, b.full + b.stage, column, k, same_columns);
      else
        tma_load(to + block * P::B::kBlockBytes, &map, b.full + b.stage, column, k);
    }
  }
}

}  // namespace rlk::cuda::lm_head
