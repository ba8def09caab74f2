// The consumers of the wgmma kernel: warpgroups that multiply a tile of 64 rows each, stage after stage, and
// hand the sums to the epilogue or to the split-K reduction.
#pragma once

#include "cuda/hopper/wgmma.cuh"
#include "cuda/lm_head/wgmma_block.cuh"

namespace rlk::cuda::lm_head {

// The producers of all blocks that share the stage may fill it again.
template <class P>
__device__ __forceinline__ void release(const Block<P>& b, int which) {
  if constexpr (P::kCluster == 1) {
    if (threadIdx.x % 128 == 0) barrier_arrive(b.empty + which);
  } else {
    if (threadIdx.x % 128 < P::kCluster)
      barrier_arrive_at(b.empty + which, b.cluster_range * P::kCluster + static_cast<int>(threadIdx.x) % 128);
  }
}

// acc = the sum over one range of k, a chain ascending in k, of rows 64 `group` onwards.
template <class P>
__device__ __forceinline__ void multiply_range(Block<P>& b, float (&acc)[P::BN / 2], int group, int range) {
  const int begin = b.step_at(range), end = b.step_at(range + 1);
  // Stages whose products may still be running.
  constexpr int kRunning = P::BN <= 64 && P::Parts == 1 ? 3 : 1;
  int oldest = b.stage;
  for (int step = begin; step < end; ++step, b.advance()) {
    barrier_wait(b.full + b.stage, b.phase);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < P::Parts; ++part) {
      const int at = b.stage * P::Parts + part;
      const auto a_tile = P::A::descriptor(shared_address(b.ring_a + at * b.a_bytes), group * 64);
      const auto b_tile = P::B::descriptor(shared_address(b.ring_b + at * P::B::kBytes), 0);
#pragma unroll
      for (int k = 0; k < kStep; k += 16)
        wgmma<typename P::Element, !P::kAContiguous, !P::kBContiguous>(
            acc, a_tile.at(P::A::steps(k)), b_tile.at(P::B::steps(k)), step > begin || part > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<kRunning>();
    if (step - begin >= kRunning) release(b, oldest), oldest = b.after(oldest);
  }
  wgmma_wait<0>();
  for (; oldest != b.stage; oldest = b.after(oldest)) release(b, oldest);
  if constexpr (P::sums != Sums::whole) {
    if (begin == end)
      for (float& x : acc) x = 0;
  }
}

template <class P>
__device__ __forceinline__ void store(const Block<P>& b, const float (&acc)[P::BN / 2], std::int64_t row0,
                                      std::int64_t column0) {
  if constexpr (!P::kStoresLines) {
    store_direct<P::BN>(b.p.gemm, acc, row0, column0);
  } else if (b.p.gemm.out == Float::f32) {
    store_lines<float, P::BN>(b.p.gemm, b.p.whole_lines, acc, b.staging + b.warp * 2 * kLineBytes, row0,
                              column0);
  } else {
    store_lines<typename P::Element, P::BN>(b.p.gemm, b.p.whole_lines, acc,
                                            b.staging + b.warp * 2 * kLineBytes, row0, column0);
  }
}

template <class P>
__device__ __forceinline__ void consume(Block<P>& b) {
  const int group = b.warp / 4;  // which 64 rows of the tile
  float acc[P::BN / 2] = {};     // each range's first product overwrites it
  [[maybe_unused]] int turn = 0;
  for (std::int64_t unit = b.first; unit < b.units; unit += b.stride) {
    const std::int64_t tile = b.tile_of(unit);
    const TilePosition at = place(tile, b.p.clusters_m, b.p.clusters_n, b.p.band);
    const std::int64_t row0 = b.row0(at) + b.warp * 16, column0 = b.column0(at);
    [[maybe_unused]] bool whole = true;
    for (int i = 0; i < b.ranges_here; ++i) {
      const int range = b.first_range(unit) + i;
      multiply_range(b, acc, group, range);
      if constexpr (P::sums == Sums::memory) {
        whole = !b.spread && add_in_turn<P::kMultipliers>(acc, b.p.slots.partial, range);
        if (b.spread) {
          Meeting<P::kMultipliers, P::BN>::run(b.p, acc, tile * P::kCluster + b.rank, b.tiles * P::kCluster,
                                               range, unit + b.stride >= b.units,
                                               reinterpret_cast<int*>(b.meet), row0, column0);
          for (float& x : acc) x = 0;  // nobody reads them: their registers were free in there
        }
      }
    }
    if constexpr (P::sums == Sums::cluster) {
      P::Meet::template run<P::kCluster>(b.p.gemm, acc, b.staging, b.meet, b.rank, b.cluster_range, turn,
                                         row0, column0);
    } else {
      if (whole) store(b, acc, row0, column0);
    }
  }
}

}  // namespace rlk::cuda::lm_head
