// lm_head products on Hopper's wgmma, fed by the bulk tensor copy engine: the kernel of arithmetic
// sm90/t25k16 and of sm90/t25k16/r4, which cuts k in four ranges.
//
// One persistent block per multiprocessor: a thread for each operand streams its tiles (64 of k a part,
// one or more parts a stage) into a ring, one to three warpgroups multiply. Every sum is one chain of
// 16-wide groups ascending in k in one accumulator, whatever the tile, which is why the tile may be chosen
// for speed alone.
//
// How the sums of the ranges meet (Sums):
//
// - whole: k is one range.
// - cluster: the blocks of a cluster take a range each and meet in shared memory. No memory needed, but a
//   cluster has to find room within one of the GPU's groups of multiprocessors.
// - memory: sums pass through the caller's workspace (they stay in L2). Few tiles: every block takes one
//   range of a tile, and each adds a quarter of what they leave there. Many: a block takes its tile's
//   ranges in turn.
//
// Tiles:
//
// - wide: 128x256 by two warpgroups of 64x256, pairs along m that share the n operand by multicast. Per
//   multiply-add the least shared-memory and L2 traffic that fits the registers (128 accumulators a
//   thread).
// - narrow: 64xN by one warpgroup, N as small as it takes to occupy every multiprocessor when n is small
//   (each then streams its few weight rows with everything in flight). Where both operands are long, L2 is
//   what runs out (10 TB/s), so pairs share one by multicast; and a multiprocessor takes in no more than
//   64 bytes a clock, however many share.
//
// Only the batch's real rows are copied where they fit one tile; the tensor core reads whatever lies
// behind them for the others, and those results are dropped. Outputs leave in lines of 128 bytes where
// their alignment allows, else one by one.
#pragma once

#include "lm_head_exchange.cuh"
#include "lm_head_hopper.cuh"
#include "lm_head_sm90.h"
#include "tensor_map.h"

namespace rlk::cuda::hopper {

inline constexpr int kStep = 64;  // of k per part of a stage
inline constexpr int kMaxStages = 32;
inline constexpr int kBandRows =
    2048;  // 16 MB of the m operand at K = 4096: stays in L2 while a band crosses n
inline constexpr int kLineBytes = 16 * 128;  // one warp's 16 rows on their way out; two of them, used in turn
inline constexpr int kMostShared = 227 * 1024;  // of a block
inline constexpr int kSharedBudget = kMostShared - 1024 - 512;

struct Params {
  Gemm gemm;
  std::int64_t clusters_m, clusters_n;
  int stages, a_rows, band;
  bool whole_lines;
  // Sums::memory
  bool spread;      // a block takes one range of a tile, not all
  int* arrived;     // per tile: how many ranges are done
  float4* partial;  // sums by range and tile when spread, else by block
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

// One line of 16 bytes on its way out where it cannot leave whole: the bias, an unaligned output, the last
// columns.
template <class Out>
__device__ __noinline__ void store_elements(const Gemm& g, const Out* line, std::int64_t row,
                                            std::int64_t column) {
  for (int e = 0; e < 16 / static_cast<int>(sizeof(Out)) && column + e < g.n; ++e) {
    Out y = line[e];
    if (g.bias) y = round_to<Out>(__fadd_rn(to_float(y), load_element(g.bias, g.b.type, column + e)));
    static_cast<Out*>(g.c)[row * g.ldc + column + e] = y;
  }
}

// Writes one warp's 16 rows x BN columns: through its own corner of shared memory, so that every store is 16
// bytes and a quarter warp covers a line of 128. Bulk tensor stores were no faster; what counts is that this
// stays a few hundred instructions: it runs once per tile, cold in the instruction cache, while the tensor
// cores wait. Everything that is not the plain case happens out of line, after the rounding and from shared
// memory.
template <class Out, int BN>
__device__ __forceinline__ void store_lines(const Gemm& g, bool whole_lines, const float (&acc)[BN / 2],
                                            unsigned char* staging, std::int64_t row0, std::int64_t column0) {
  constexpr int kColumns = 128 / static_cast<int>(sizeof(Out)),
                kPerStore = 16 / static_cast<int>(sizeof(Out));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row0 >= g.m) return;
  const bool plain = whole_lines && row0 + 16 <= g.m && column0 + BN <= g.n;
  const int line_row = lane / 8, piece = lane % 8;
  Out* to = static_cast<Out*>(g.c) + (row0 + line_row) * g.ldc + column0 + piece * kPerStore;
#pragma unroll
  for (int chunk = 0; chunk < BN / kColumns; ++chunk) {
    unsigned char* buffer = staging + chunk % 2 * kLineBytes;
    if constexpr (sizeof(Out) == 2) {
      const int row = lane % 16;
#pragma unroll
      for (int block = 0; block < kColumns / 8; block += 2) {
        std::uint32_t packed[4];
#pragma unroll
        for (int half = 0; half < 4; ++half) {
          const float* pair = acc + (chunk * kColumns / 8 + block + half / 2) * 4 + half % 2 * 2;
          packed[half] = round_pair<Out>(pair[0], pair[1]);
        }
        const std::uint32_t at = smem_address(buffer) + row * 128 + ((block + lane / 16) ^ row % 8) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                     "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                     : "memory");
      }
    } else {
#pragma unroll
      for (int block = 0; block < kColumns / 8; ++block)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = lane / 4 + half * 8, at = block * 2 + lane % 4 / 2;
          *reinterpret_cast<float2*>(buffer + row * 128 + (at ^ row % 8) * 16 + lane % 2 * 8) =
              make_float2(round_to<float>(acc[(chunk * 4 + block) * 4 + half * 2]),
                          round_to<float>(acc[(chunk * 4 + block) * 4 + half * 2 + 1]));
        }
    }
    __syncwarp();
    if (plain) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + line_row;
        __stcs(reinterpret_cast<int4*>(to + i * 4 * g.ldc + chunk * kColumns),
               *reinterpret_cast<const int4*>(buffer + row * 128 + (piece ^ row % 8) * 16));
      }
    } else {
#pragma unroll 1
      for (int row = line_row; row < 16 && row0 + row < g.m; row += 4)
        store_elements(g, reinterpret_cast<const Out*>(buffer + row * 128 + (piece ^ row % 8) * 16),
                       row0 + row, column0 + chunk * kColumns + piece * kPerStore);
    }
  }
}

// One range's sums of a tile in memory, in the order of the threads: a thread holds the same outputs in every
// block.
template <int Threads, int Floats>
struct Partial {
  static constexpr int kPieces = Floats / 4;
  static constexpr std::int64_t kFours = kPieces * Threads;
  float4* at;
  __device__ Partial(float4* all, std::int64_t slot) : at(all + slot * kFours + threadIdx.x) {}

  __device__ static float4 four(const float (&acc)[Floats], int piece) {
    return make_float4(acc[piece * 4], acc[piece * 4 + 1], acc[piece * 4 + 2], acc[piece * 4 + 3]);
  }
  template <int Count>
  __device__ static void set_four(float (&acc)[Count], int piece, float4 x) {
    acc[piece * 4] = x.x, acc[piece * 4 + 1] = x.y, acc[piece * 4 + 2] = x.z, acc[piece * 4 + 3] = x.w;
  }
  __device__ void put(int piece, float4 x) const { __stcg(at + piece * Threads, x); }
  __device__ float4 get(int piece) const { return __ldcg(at + piece * Threads); }
};
__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// A block takes the ranges in turn: the running sum waits in its slot. True when acc has become the whole
// sum.
template <int Threads, int Floats>
__device__ bool add_in_turn(float (&acc)[Floats], float4* slots, int range) {
  using Sum = Partial<Threads, Floats>;
  const Sum sum(slots, blockIdx.x);
  if (range > 0) {
#pragma unroll
    for (int i = 0; i < Sum::kPieces; ++i) Sum::set_four(acc, i, add(sum.get(i), Sum::four(acc, i)));
  }
  if (range + 1 == kRangesOfK) return true;
#pragma unroll
  for (int i = 0; i < Sum::kPieces; ++i) sum.put(i, Sum::four(acc, i));
  return false;
}

// The sums of one thread for `Floats / 4` blocks of eight columns: pairs of neighbours leave together where
// the output's alignment allows.
template <int Floats>
__device__ void store_sums(const Gemm& g, bool whole_lines, const float (&sums)[Floats], std::int64_t row0,
                           std::int64_t column0) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < Floats; i += 2) {
    const std::int64_t row = row0 + lane / 4 + i % 4 / 2 * 8, column = column0 + i / 4 * 8 + lane % 4 * 2;
    if (row >= g.m) continue;
    if (!whole_lines || column + 1 >= g.n) {
      store_product(g, row, column, sums[i]), store_product(g, row, column + 1, sums[i + 1]);
      continue;
    }
    const std::int64_t at = (row * g.ldc + column) / 2;
    if (g.out == Dtype::f32)
      static_cast<float2*>(g.c)[at] = make_float2(round_to<float>(sums[i]), round_to<float>(sums[i + 1]));
    else
      static_cast<std::uint32_t*>(g.c)[at] = g.out == Dtype::f16
                                                 ? round_pair<__half>(sums[i], sums[i + 1])
                                                 : round_pair<__nv_bfloat16>(sums[i], sums[i + 1]);
  }
}

// Every range of a tile by another block. Each leaves its sums in memory and waits for the others; then each
// adds a quarter of the tile's columns in the order of the ranges. One block that did it all, the last, took
// 16 us of the 330 of d_hidden at 128 rows.
//
// The blocks of a tile need not run at the same time, so nobody waits for long. Who gives up leaves its own
// quarter in memory too, and says so; the last to arrive adds what was left. Both are one atomic operation on
// the tile's counter, so exactly one block adds each quarter.
template <int Threads, int BN>
class Meeting {
 public:
  // `patient`: this block has nothing else to do.
  __device__ static void run(const Params& p, const float (&acc)[BN / 2], std::int64_t tile,
                             std::int64_t tiles, int range, bool patient, int* shared, std::int64_t row0,
                             std::int64_t column0) {
    const Sum mine(p.partial, range * tiles + tile);
    float4 own[kPieces];
#pragma unroll
    for (int quarter = 0; quarter < kRangesOfK; ++quarter)
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 four = Sum::four(acc, quarter * kPieces + i);
        if (quarter == range) own[i] = four;
        if (quarter != range || !patient) mine.put(quarter * kPieces + i, four);
      }
    int* const counter = p.arrived + tile;
    int quarters = everyone([&] { return arrive(counter, range, patient); }, shared);
    if (quarters == 0 && patient) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) mine.put(range * kPieces + i, own[i]);
      quarters = everyone([&] { return give_up(counter, range); }, shared);
    }
    if (quarters == 0) return;
    __threadfence();
#pragma unroll 1
    for (int quarter = 0; quarter < kRangesOfK; ++quarter) {
      if ((quarters >> quarter & 1) == 0) continue;
      float4 parts[kRangesOfK][kPieces];
#pragma unroll
      for (int from = 0; from < kRangesOfK; ++from)
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          parts[from][i] = from == range && quarter == range
                               ? own[i]
                               : Sum(p.partial, from * tiles + tile).get(quarter * kPieces + i);
      float sums[kPieces * 4];
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        Sum::set_four(sums, i, add(add(add(parts[0][i], parts[1][i]), parts[2][i]), parts[3][i]));
      store_sums(p.gemm, p.whole_lines, sums, row0, column0 + quarter * (BN / kRangesOfK));
    }
  }

 private:
  using Sum = Partial<Threads, BN / 2>;
  static_assert(kRangesOfK == 4);
  static constexpr int kPieces = Sum::kPieces / kRangesOfK;
  // A counter: how many have arrived, and which of them gave up.
  static constexpr int kArrived = 7, kGaveUp = 4;
  static constexpr int kPatience = 400;  // polls of about half a microsecond

  // One thread acts, after what every thread has stored; all get the answer.
  template <class Act>
  __device__ static int everyone(Act&& act, int* shared) {
    __threadfence();
    asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
    if (threadIdx.x == 0) *shared = act();
    asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
    return *shared;
  }
  // The quarters this block is to add, a bit each: none when it has not seen the others arrive.
  __device__ static int arrive(int* counter, int range, bool patient) {
    asm volatile("griddepcontrol.wait;" ::: "memory");  // for the counters' zeros
    const int before = atomicAdd(counter, patient ? 1 : 1 | 1 << range << kGaveUp);
    if ((before & kArrived) + 1 == kRangesOfK) return before >> kGaveUp | 1 << range;
    for (int polls = patient ? kPatience : 0; polls > 0; --polls)
      if ((*static_cast<volatile int*>(counter) & kArrived) == kRangesOfK) return 1 << range;
    return 0;
  }
  __device__ static int give_up(int* counter, int range) {
    return (atomicOr(counter, 1 << range << kGaveUp) & kArrived) == kRangesOfK ? 1 << range : 0;
  }
};

template <int BN>
__device__ void store_direct(const Gemm& g, const float (&acc)[BN / 2], std::int64_t row0,
                             std::int64_t column0) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row0 >= g.m) return;
#pragma unroll
  for (int i = 0; i < BN / 2; ++i)
    store_product(g, row0 + lane / 4 + i % 4 / 2 * 8, column0 + i / 4 * 8 + lane % 4 * 2 + i % 2, acc[i]);
}

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
  unsigned char* const shared = shared_raw + (1024 - smem_address(shared_raw) % 1024) % 1024;
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
            if (part % ClusterN == rank_n)
              tensor_load_multicast(to, &map_a, full + stage, k, row0, same_rows);
          } else {
            const int share = a_bytes / 128 / ClusterN;
            tensor_load_multicast(to + rank_n * share * 128, &map_a, full + stage, k, row0 + rank_n * share,
                                  same_rows);
          }
        } else if constexpr (KA) {
          tensor_load(to, &map_a, full + stage, k, row0);
        } else {
#pragma unroll
          for (int block = 0; block < P::A::kBlocks; ++block)
            tensor_load(to + block * P::A::kBlockBytes, &map_a, full + stage, row0 + block * 64, k);
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
            tensor_load_multicast(share, &map_b, full + stage, k, column, same_columns);
          else
            tensor_load(share, &map_b, full + stage, k, column);
        }
      } else {
        static_assert(Parts * P::B::kBlocks % ClusterM == 0);
        constexpr int kShare = Parts * P::B::kBlocks / ClusterM;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int block = rank_m * kShare + i, k = k0 + block / P::B::kBlocks * kStep,
                    column = column0 + block % P::B::kBlocks * P::B::kBox;
          if constexpr (ClusterM > 1)
            tensor_load_multicast(to + block * P::B::kBlockBytes, &map_b, full + stage, column, k,
                                  same_columns);
          else
            tensor_load(to + block * P::B::kBlockBytes, &map_b, full + stage, column, k);
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
            const auto a = P::A::descriptor(smem_address(ring_a + at * a_bytes), group * 64);
            const auto b = P::B::descriptor(smem_address(ring_b + at * P::B::kBytes), 0);
#pragma unroll
            for (int k = 0; k < kStep; k += 16)
              Wgmma<T, BN, !KA, !KB>::run(acc, a.at(k), b.at(k), step > begin || part > 0 || k > 0);
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
          whole = !spread && add_in_turn<P::kMultipliers>(acc, p.partial, range);
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

// Lets the product after it in the stream begin at once; that waits when it comes to the counters.
static __global__ void zero_counters(int* counters, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) counters[i] = 0;
}

// Where a product in Sums::memory leaves its sums: counters first.
inline constexpr std::size_t kCounterBytes = 8192;
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
    p.arrived = static_cast<int*>(space.data);
    p.partial = reinterpret_cast<float4*>(static_cast<unsigned char*>(space.data) + kCounterBytes);
    p.spread = space.spread;
    if (p.spread) {
      zero_counters<<<1, 128, 0, stream>>>(p.arrived, static_cast<int>(units * P::kCluster));
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
  if constexpr (P::kBlocks > 2) {  // a cluster stays inside one group of multiprocessors, so fewer may fit
    config.gridDim = dim3(P::kBlocks);
    int fit = 0;
    if (cudaError_t e = cudaOccupancyMaxActiveClusters(&fit, kernel, &config); e != cudaSuccess) return e;
    together = fit;
  }
  config.gridDim = dim3(static_cast<unsigned>((units < together ? units : together) * P::kBlocks));
  return cudaLaunchKernelEx(&config, kernel, p, a, b);
}

}  // namespace rlk::cuda::hopper
