// lm_head products on Hopper's wgmma, fed by TMA: the kernel of arithmetic
// sm90/t25k16 and of sm90/t25k16/r4, which cuts k in four ranges.
//
// One persistent block per SM: a producer thread for each operand streams its tiles (64 of k a part, one or
// more parts a stage) into a ring, one to three consumer warpgroups multiply. Every sum is one chain of
// 16-wide groups ascending in k in one accumulator, whatever the tile, which is why the tile may be chosen
// for speed alone.
//
// Split-K, how the sums of the ranges meet (Sums):
//
// - whole: k is one range.
// - cluster: the blocks of a cluster take a range each and meet in shared memory. No memory needed, but a
//   cluster has to find room within one of the GPU's groups of SMs (GPCs).
// - memory: sums pass through the caller's workspace (they stay in L2). Few tiles: every block takes one
//   range of a tile, and each adds a quarter of what they leave there. Many: a block takes its tile's
//   ranges in turn.
//
// Tiles:
//
// - wide: 128x256 by two warpgroups of 64x256, pairs along m that share the n operand by multicast. Per
//   multiply-add the least shared-memory and L2 traffic that fits the registers (128 accumulators a
//   thread).
// - narrow: 64xN by one warpgroup, N as small as it takes to occupy every SM when n is small
//   (each then streams its few weight rows with everything in flight). Where both operands are long, L2 is
//   what runs out (10 TB/s), so pairs share one by multicast; and an SM takes in no more than
//   64 bytes a clock, however many share.
//
// Only the batch's real rows are copied where they fit one tile; the tensor core reads whatever lies
// behind them for the others, and those results are dropped. The epilogue writes lines of 128 bytes where
// the outputs' alignment allows, else one by one.
#pragma once

#include "cuda/hopper/matrix_map.h"
#include "cuda/lm_head/wgmma.h"
#include "cuda/lm_head/wgmma_consumer.cuh"
#include "cuda/lm_head/wgmma_producer.cuh"

namespace rlk::cuda::lm_head {

// Barriers, and which work the block has.
template <class P>
__device__ __forceinline__ void set_up(Block<P>& b, const CUtensorMap& map_a, const CUtensorMap& map_b) {
  if (threadIdx.x == 0) {
    prefetch_map(&map_a), prefetch_map(&map_b);
    for (int s = 0; s < b.p.stages; ++s) {
      barrier_init(b.full + s, 2);
      barrier_init(b.empty + s, P::kCluster * P::kGroups);
    }
    if constexpr (P::sums == Sums::cluster) P::Meet::init(b.meet);
    fence_barrier_init();
  }
  if constexpr (P::kBlocks > 1)
    cluster_sync();
  else
    __syncthreads();
  b.plan_work();
}

// Two threads load the operands, the other warpgroups run `consumer`. Accumulators of 128 registers leave no room to move
// under an even split: the producers' warpgroup gives most of its share up.
template <class P, class LoadA, class LoadB, class Consumer>
__device__ __forceinline__ void share_out(Block<P>& b, LoadA&& load_a, LoadB&& load_b, Consumer&& consumer) {
  constexpr bool kRedistribute = P::kGroups == 2 && P::BN == 256;
  if (b.warp >= P::kGroups * 4) {
    if constexpr (kRedistribute) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == P::kGroups * 128)
      produce(b, b.a_bytes, load_a);
    else if (threadIdx.x == P::kGroups * 128 + 32)
      produce(b, P::B::kBytes, load_b);
  } else {
    if constexpr (kRedistribute) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consumer();
  }
  if constexpr (P::kBlocks > 1)
    cluster_sync();  // no block may leave while another still writes or signals into it
}

template <class P>
__global__ void __launch_bounds__(P::kThreads, 1)
    tensor_core(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b) {
  extern __shared__ unsigned char shared_raw[];
  Block<P> b(p, shared_raw);
  set_up(b, map_a, map_b);
  share_out(
      b, [&](const TilePosition& at, int k0) { load_a(b, map_a, b.row0(at), k0); },
      [&](const TilePosition& at, int k0) { load_b(b, map_b, b.column0(at), k0); }, [&] { consume(b); });
}

// ---- launch

template <class P>
int bytes_of_a(const Params& p) {
  return P::kAContiguous ? p.a_rows * 128 : P::A::kBytes;
}
// All but what Sums need; as many columns of tiles as n has.
template <class P>
Params params_of(const Gemm& g) {
  Params p{};
  p.gemm = g;
  p.clusters_m = (g.m + P::kBM * P::ClusterM - 1) / (P::kBM * P::ClusterM);
  p.clusters_n = (g.n + P::BN * P::ClusterN - 1) / (P::BN * P::ClusterN);
  constexpr int kEight = 8 * P::kBoxes;  // of eight rows or more
  p.a_rows =
      P::kAContiguous && g.m < P::kBM ? static_cast<int>((g.m + kEight - 1) / kEight * kEight) : P::kBM;
  const int a_bytes = bytes_of_a<P>(p);
  p.stages =
      (kSharedBudget - P::kOutBytes - (P::A::kBytes - a_bytes)) / (P::Parts * (a_bytes + P::B::kBytes));
  if (p.stages > kMaxStages) p.stages = kMaxStages;
  p.whole_lines = g.bias == nullptr && reinterpret_cast<std::uintptr_t>(g.c) % 16 == 0 &&
                  (g.m == 1 || g.ldc * static_cast<std::int64_t>(bytes_of(g.out)) % 16 == 0);
  p.band = kBandRows / (P::kBM * P::ClusterM);
  return p;
}
template <class P>
std::size_t shared_bytes(const Params& p) {
  const int a_bytes = bytes_of_a<P>(p);
  return static_cast<std::size_t>(1024 + p.stages * P::Parts * (a_bytes + P::B::kBytes) +
                                  (P::A::kBytes - a_bytes) + P::kOutBytes + p.stages * 16 + 16);
}
template <class P>
bool encode_operands(CUtensorMap* a, CUtensorMap* b, const Params& p) {
  const Gemm& g = p.gemm;
  return (P::kAContiguous ? encode(a, g.a.data, g.a.type, g.k, g.m, g.a.ld, kStep, p.a_rows / P::kBoxes)
                          : encode(a, g.a.data, g.a.type, g.m, g.k, g.a.ld, 64, kStep)) &&
         (P::kBContiguous ? encode(b, g.b.data, g.b.type, g.k, g.n, g.b.ld, kStep, P::BN / P::ClusterM)
                          : encode(b, g.b.data, g.b.type, g.n, g.k, g.b.ld, P::B::kBox, kStep));
}

// Where a product in Sums::memory leaves its sums: counters first.
struct Space {
  void* data = nullptr;
  bool spread = false;
};

template <class T, int Groups, int BN, bool KA, bool KB, int ClusterM, int ClusterN, Sums sums = Sums::whole,
          int Parts = 1>
cudaError_t start_tile(const Gemm& g, int multiprocessors, cudaStream_t stream, Space space = {}) {
  using P = Traits<T, Groups, BN, KA, KB, ClusterM, ClusterN, sums, Parts>;
  Params p = params_of<P>(g);
  std::int64_t units = p.clusters_m * p.clusters_n;
  if constexpr (sums == Sums::memory) {
    p.slots.arrived = static_cast<int*>(space.data);
    p.slots.partial = reinterpret_cast<float4*>(static_cast<unsigned char*>(space.data) + kCounterBytes);
    p.spread = space.spread;
    if (p.spread) {
      zero_counters<<<1, 128, 0, stream>>>(p.slots.arrived, static_cast<int>(units * P::kCluster));
      if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
      units *= P::kRanges;
    }
  }

  auto kernel = tensor_core<P>;
  // The most any call takes, not this call's: the attribute is the kernel's, and another thread may be
  // between setting it and its launch.
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
      e != cudaSuccess)
    return e;
  // Only now: the encoder needs the device's context, which a thread has from its first call into the runtime
  // that does work there; asking which device is current is none.
  CUtensorMap a, b;
  if (!encode_operands<P>(&a, &b, p)) return cudaErrorInvalidValue;

  cudaLaunchConfig_t config{};
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = shared_bytes<P>(p);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {P::kBlocks, 1, 1};
  // Does not wait for zero_counters, which itself waits for what came before.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = p.spread ? 2 : 1;
  std::int64_t together = multiprocessors / P::kBlocks;
  if constexpr (P::kBlocks > 2) {  // a cluster stays inside one group of SMs, so fewer may fit
    config.gridDim = dim3(P::kBlocks);
    int fit = 0;
    if (cudaError_t e = cudaOccupancyMaxActiveClusters(&fit, kernel, &config); e != cudaSuccess) return e;
    together = fit;
  }
  config.gridDim = dim3(static_cast<unsigned>((units < together ? units : together) * P::kBlocks));
  return cudaLaunchKernelEx(&config, kernel, p, a, b);
}

}  // namespace rlk::cuda::lm_head
