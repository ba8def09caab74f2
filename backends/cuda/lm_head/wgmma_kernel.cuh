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

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/cluster.cuh"
#include "cuda/hopper/tensor_map.h"
#include "cuda/hopper/tma.cuh"
#include "cuda/lm_head/epilogue.cuh"
#include "cuda/lm_head/split_k_cluster.cuh"
#include "cuda/lm_head/split_k_memory.cuh"
#include "cuda/lm_head/stage.cuh"
#include "cuda/lm_head/wgmma.h"

namespace rlk::cuda::lm_head {

inline constexpr int kStep = 64;  // of k per part of a stage
inline constexpr int kMaxStages = 32;
inline constexpr int kBandRows =
    2048;  // 16 MB of the m operand at K = 4096: stays in L2 while a band crosses n
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
template <class T, int Groups, int BN, bool KA, bool KB, int ClusterM, int ClusterN, Sums sums, int Parts>
struct Plan {
  static_assert(Parts == 1 || sums == Sums::whole);  // a range may end within a stage
  static constexpr int kBM = 64 * Groups;
  using A = Staged<kBM, KA>;
  using B = Staged<BN, KB>;
  static constexpr int kMultipliers = 128 * Groups, kThreads = kMultipliers + 128;
  static constexpr int kRanges = sums == Sums::whole ? 1 : kRangesOfK;
  static constexpr int kCluster = ClusterM * ClusterN;
  // Blocks that share rows fetch whole parts of a stage in turn where there are enough, else some of the rows
  // each: boxes wholly behind the last row made d_hidden of up to eight rows a fifth slower.
  static constexpr bool kSharesParts = Parts % ClusterN == 0;
  static constexpr int kBlocks = kCluster * (sums == Sums::cluster ? kRanges : 1);
  using Meet = Exchange<kMultipliers, BN, sums == Sums::cluster ? kRanges : 1>;
  static constexpr bool kStoresLines = BN >= 64 && sums != Sums::cluster;
  // Behind the rings: the outputs' staging, or what the other ranges send.
  static constexpr int kOutBytes = sums == Sums::cluster ? Meet::kBytes
                                   : kStoresLines        ? Groups * 4 * 2 * kLineBytes
                                                         : 0;
};

// `Count` bits, `Step` apart.
template <int Step, int Count>
inline constexpr unsigned every = every<Step, Count - 1> << Step | 1;
template <int Step>
inline constexpr unsigned every<Step, 0> = 0;

template <class T, int Groups, int BN, bool KA, bool KB, int ClusterM, int ClusterN, Sums sums, int Parts>
__global__ void __launch_bounds__(128 * Groups + 128, 1)
    tensor_core(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b) {
  using P = Plan<T, Groups, BN, KA, KB, ClusterM, ClusterN, sums, Parts>;
  constexpr int Cluster = P::kCluster;
  extern __shared__ unsigned char shared_raw[];
  unsigned char* const shared = shared_raw + (1024 - shared_address(shared_raw) % 1024) % 1024;
  const int a_bytes = KA ? p.a_rows * 128 : P::A::kBytes;
  // The operands' rings, the outputs' staging (behind the ring, so that reading past the last real rows stays
  // inside), barriers.
  unsigned char* const ring_b = shared;
  unsigned char* const ring_a = shared + p.stages * Parts * P::B::kBytes;
  unsigned char* const staging = ring_a + (p.stages * Parts - 1) * a_bytes + P::A::kBytes;
  auto* const full = reinterpret_cast<std::uint64_t*>(staging + P::kOutBytes);
  std::uint64_t* const empty = full + p.stages;
  std::uint64_t* const meet = empty + p.stages;

  // Read from one lane, so that the compiler sees that a warp stays together and keeps stages and descriptors
  // in uniform registers: moving them there before each product took longer than a narrow product.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  // Block `rank` of those that share operands, at (rank_m, rank_n) of their tiles; of the ranges in a
  // cluster, `cluster_range`.
  const int rank = P::kBlocks > 1 ? cluster_rank() % Cluster : 0, rank_m = rank % ClusterM,
            rank_n = rank / ClusterM, cluster_range = sums == Sums::cluster ? cluster_rank() / Cluster : 0;
  if (threadIdx.x == 0) {
    prefetch_map(&map_a), prefetch_map(&map_b);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(full + s, 2);
      barrier_init(empty + s, Cluster * Groups);
    }
    if constexpr (sums == Sums::cluster) P::Meet::init(meet);
    fence_barrier_init();
  }
  if constexpr (P::kBlocks > 1)
    cluster_sync();
  else
    __syncthreads();

  // A unit of work is a tile with `ranges_here` ranges of k.
  const std::int64_t tiles = p.clusters_m * p.clusters_n;
  const bool spread = sums == Sums::memory && p.spread;
  const std::int64_t units = spread ? tiles * P::kRanges : tiles;
  const std::int64_t first = blockIdx.x / P::kBlocks, stride = gridDim.x / P::kBlocks;
  const int steps = static_cast<int>((p.gemm.k + kStep * Parts - 1) / (kStep * Parts)),
            per_range = (steps + P::kRanges - 1) / P::kRanges,
            ranges_here = sums == Sums::memory && !spread ? P::kRanges : 1;
  auto tile_of = [&](std::int64_t unit) { return spread ? unit % tiles : unit; };
  auto first_range = [&](std::int64_t unit) {
    return spread ? static_cast<int>(unit / tiles) : cluster_range;
  };
  auto step_at = [&](int range) { return range * per_range < steps ? range * per_range : steps; };
  int stage = 0, phase = 0;
  auto after = [&](int s) { return s + 1 == p.stages ? 0 : s + 1; };
  auto advance = [&] {
    stage = after(stage);
    if (stage == 0) phase ^= 1;
  };

  // Accumulators of 128 registers leave no room to move under an even split: the copying warpgroup gives most
  // of its share up.
  constexpr bool kRedistribute = Groups == 2 && BN == 256;
  if (warp >= Groups * 4) {
    if constexpr (kRedistribute) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // One thread each for the two operands: filling a stage has to take less time than a narrow product.
    auto each_step = [&](int bytes, auto&& load) {
      for (std::int64_t unit = first; unit < units; unit += stride) {
        const TilePosition at = place(tile_of(unit), p.clusters_m, p.clusters_n, p.band);
        const int begin = step_at(first_range(unit)), end = step_at(first_range(unit) + ranges_here);
        for (int step = begin; step < end; ++step, advance()) {
          barrier_wait(empty + stage, phase ^ 1);
          barrier_expect(full + stage, bytes * Parts);
          load(at, step * kStep * Parts);
        }
      }
    };
    // Blocks that share an operand fetch a part of it each, for all of them.
    auto load_a = [&](const TilePosition& at, int k0) {
      const int row0 = static_cast<int>(at.m * ClusterM + rank_m) * P::kBM;
#pragma unroll
      for (int part = 0; part < Parts; ++part) {
        unsigned char* const to = ring_a + (stage * Parts + part) * a_bytes;
        const int k = k0 + part * kStep;
        if constexpr (ClusterN > 1) {
          static_assert(KA);
          const auto same_rows =
              static_cast<std::uint16_t>(every<ClusterM, ClusterN> << rank_m << cluster_range * Cluster);
          if constexpr (P::kSharesParts) {
            if (part % ClusterN == rank_n) tma_load_multicast(to, &map_a, full + stage, k, row0, same_rows);
          } else {
            const int share = a_bytes / 128 / ClusterN;
            tma_load_multicast(to + rank_n * share * 128, &map_a, full + stage, k, row0 + rank_n * share,
                               same_rows);
          }
        } else if constexpr (KA) {
          tma_load(to, &map_a, full + stage, k, row0);
        } else {
#pragma unroll
          for (int block = 0; block < P::A::kBlocks; ++block)
            tma_load(to + block * P::A::kBlockBytes, &map_a, full + stage, row0 + block * 64, k);
        }
      }
    };
    auto load_b = [&](const TilePosition& at, int k0) {
      const int column0 = static_cast<int>(at.n * ClusterN + rank_n) * BN;
      unsigned char* const to = ring_b + stage * Parts * P::B::kBytes;
      [[maybe_unused]] const auto same_columns =
          static_cast<std::uint16_t>(every<1, ClusterM> << rank_n * ClusterM << cluster_range * Cluster);
      if constexpr (KB) {
        constexpr int kShare = BN / ClusterM;
#pragma unroll
        for (int part = 0; part < Parts; ++part) {
          unsigned char* const share = to + part * P::B::kBytes + rank_m * kShare * 128;
          const int k = k0 + part * kStep, column = column0 + rank_m * kShare;
          if constexpr (ClusterM > 1)
            tma_load_multicast(share, &map_b, full + stage, k, column, same_columns);
          else
            tma_load(share, &map_b, full + stage, k, column);
        }
      } else {
        static_assert(Parts * P::B::kBlocks % ClusterM == 0);
        constexpr int kShare = Parts * P::B::kBlocks / ClusterM;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int block = rank_m * kShare + i, k = k0 + block / P::B::kBlocks * kStep,
                    column = column0 + block % P::B::kBlocks * P::B::kBox;
          if constexpr (ClusterM > 1)
            tma_load_multicast(to + block * P::B::kBlockBytes, &map_b, full + stage, column, k, same_columns);
          else
            tma_load(to + block * P::B::kBlockBytes, &map_b, full + stage, column, k);
        }
      }
    };
    if (threadIdx.x == Groups * 128)
      each_step(a_bytes, load_a);
    else if (threadIdx.x == Groups * 128 + 32)
      each_step(P::B::kBytes, load_b);
  } else {
    if constexpr (kRedistribute) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warp / 4;
    auto release = [&](int which) {
      if constexpr (Cluster == 1) {
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + which);
      } else {
        if (threadIdx.x % 128 < Cluster)
          barrier_arrive_at(empty + which, cluster_range * Cluster + static_cast<int>(threadIdx.x) % 128);
      }
    };
    float acc[BN / 2] = {};  // each range's first product overwrites it
    [[maybe_unused]] int turn = 0;
    for (std::int64_t unit = first; unit < units; unit += stride) {
      const std::int64_t tile = tile_of(unit);
      const TilePosition at = place(tile, p.clusters_m, p.clusters_n, p.band);
      const std::int64_t row0 = (at.m * ClusterM + rank_m) * P::kBM + warp * 16,
                         column0 = (at.n * ClusterN + rank_n) * BN;
      [[maybe_unused]] bool whole = true;
      for (int i = 0; i < ranges_here; ++i) {
        const int range = first_range(unit) + i, begin = step_at(range), end = step_at(range + 1);
        // Stages whose products may still be running.
        constexpr int kRunning = BN <= 64 && Parts == 1 ? 3 : 1;
        int oldest = stage;
        for (int step = begin; step < end; ++step, advance()) {
          barrier_wait(full + stage, phase);
          wgmma_fence();
#pragma unroll
          for (int part = 0; part < Parts; ++part) {
            const int at = stage * Parts + part;
            const auto a = P::A::descriptor(shared_address(ring_a + at * a_bytes), group * 64);
            const auto b = P::B::descriptor(shared_address(ring_b + at * P::B::kBytes), 0);
#pragma unroll
            for (int k = 0; k < kStep; k += 16)
              wgmma<T, !KA, !KB>(acc, a.at(P::A::steps(k)), b.at(P::B::steps(k)),
                                 step > begin || part > 0 || k > 0);
          }
          wgmma_commit();
          wgmma_wait<kRunning>();
          if (step - begin >= kRunning) release(oldest), oldest = after(oldest);
        }
        wgmma_wait<0>();
        for (; oldest != stage; oldest = after(oldest)) release(oldest);
        if constexpr (sums != Sums::whole) {
          if (begin == end)
            for (float& x : acc) x = 0;
        }
        if constexpr (sums == Sums::memory) {
          whole = !spread && add_in_turn<P::kMultipliers>(acc, p.slots.partial, range);
          if (spread) {
            Meeting<P::kMultipliers, BN>::run(p, acc, tile * Cluster + rank, tiles * Cluster, range,
                                              unit + stride >= units, reinterpret_cast<int*>(meet), row0,
                                              column0);
            for (float& x : acc) x = 0;  // nobody reads them: their registers were free in there
          }
        }
      }
      if constexpr (sums == Sums::cluster) {
        P::Meet::template run<Cluster>(p.gemm, acc, staging, meet, rank, cluster_range, turn, row0, column0);
      } else if (!whole) {
        continue;
      } else if constexpr (!P::kStoresLines) {
        store_direct<BN>(p.gemm, acc, row0, column0);
      } else if (p.gemm.out == Dtype::f32) {
        store_lines<float, BN>(p.gemm, p.whole_lines, acc, staging + warp * 2 * kLineBytes, row0, column0);
      } else {
        store_lines<T, BN>(p.gemm, p.whole_lines, acc, staging + warp * 2 * kLineBytes, row0, column0);
      }
    }
  }
  if constexpr (P::kBlocks > 1)
    cluster_sync();  // no block may leave while another still writes or signals into it
}

inline bool encode(CUtensorMap* map, const void* data, Dtype type, std::int64_t inner, std::int64_t outer,
                   std::int64_t ld, int box_inner, int box_outer) {
  const auto bytes = static_cast<std::int64_t>(bytes_of(type));
  const CUtensorMapDataType data_type = type == Dtype::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                        : type == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const std::int64_t line = box_inner * bytes;
  const CUtensorMapSwizzle swizzle = line == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : line == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_32B;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  // A single line may come with any stride; the encoder wants one that is valid.
  const cuuint64_t strides[1] = {
      static_cast<cuuint64_t>(outer > 1 ? ld * bytes : (inner * bytes + 15) / 16 * 16)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_inner), static_cast<cuuint32_t>(box_outer)},
                   step[2] = {1, 1};
  return encoder()(map, data_type, 2, const_cast<void*>(data), sizes, strides, box, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Where a product in Sums::memory leaves its sums: counters first.
struct Space {
  void* data = nullptr;
  bool spread = false;
};

template <class T, int Groups, int BN, bool KA, bool KB, int ClusterM, int ClusterN, Sums sums = Sums::whole,
          int Parts = 1>
cudaError_t start_tile(const Gemm& g, int multiprocessors, cudaStream_t stream, Space space = {}) {
  using P = Plan<T, Groups, BN, KA, KB, ClusterM, ClusterN, sums, Parts>;
  Params p{};
  p.gemm = g;
  p.clusters_m = (g.m + P::kBM * ClusterM - 1) / (P::kBM * ClusterM);
  p.clusters_n = (g.n + BN * ClusterN - 1) / (BN * ClusterN);
  constexpr int kBoxes = P::kSharesParts ? 1 : ClusterN, kEight = 8 * kBoxes;  // of eight rows or more
  p.a_rows = KA && g.m < P::kBM ? static_cast<int>((g.m + kEight - 1) / kEight * kEight) : P::kBM;
  const int a_bytes = KA ? p.a_rows * 128 : P::A::kBytes;
  p.stages = (kSharedBudget - P::kOutBytes - (P::A::kBytes - a_bytes)) / (Parts * (a_bytes + P::B::kBytes));
  if (p.stages > kMaxStages) p.stages = kMaxStages;
  p.whole_lines = g.bias == nullptr && reinterpret_cast<std::uintptr_t>(g.c) % 16 == 0 &&
                  (g.m == 1 || g.ldc * static_cast<std::int64_t>(bytes_of(g.out)) % 16 == 0);
  p.band = kBandRows / (P::kBM * ClusterM);

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

  auto kernel = tensor_core<T, Groups, BN, KA, KB, ClusterM, ClusterN, sums, Parts>;
  const int bytes = 1024 + p.stages * Parts * (a_bytes + P::B::kBytes) + (P::A::kBytes - a_bytes) +
                    P::kOutBytes + p.stages * 16 + 16;
  // The most any call takes, not this call's: the attribute is the kernel's, and another thread may be
  // between setting it and its launch.
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
      e != cudaSuccess)
    return e;
  // Only now: the encoder needs the device's context, which a thread has from its first call into the runtime
  // that does work there; asking which device is current is none.
  CUtensorMap a, b;
  const bool encoded = (KA ? encode(&a, g.a.data, g.a.type, g.k, g.m, g.a.ld, kStep, p.a_rows / kBoxes)
                           : encode(&a, g.a.data, g.a.type, g.m, g.k, g.a.ld, 64, kStep)) &&
                       (KB ? encode(&b, g.b.data, g.b.type, g.k, g.n, g.b.ld, kStep, BN / ClusterM)
                           : encode(&b, g.b.data, g.b.type, g.n, g.k, g.b.ld, P::B::kBox, kStep));
  if (!encoded) return cudaErrorInvalidValue;

  cudaLaunchConfig_t config{};
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
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
