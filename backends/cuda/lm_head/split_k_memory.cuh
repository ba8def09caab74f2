// Split-K reduction through memory (split_k_cluster.cuh: inside a cluster), in the order of the ranges of k:
// ((s0 + s1) + s2) + s3, in fp32 to nearest. A thread holds the same outputs in every block, so
// sums lie in the order of the threads, and every access is 16 bytes from consecutive ones.
#pragma once

#include "cuda/lm_head/epilogue.cuh"

namespace rlk::cuda::lm_head {

inline constexpr std::size_t kCounterBytes = 8192;

struct Slots {
  int* arrived;     // per tile: how many ranges are done
  float4* partial;  // sums by range and tile, or by block
};

// Programmatic dependent launch: the product kernel starts behind this one without waiting for it to end, and
// waits (griddepcontrol.wait) only when it comes to the counters.
static __global__ void zero_counters(int* counters, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) counters[i] = 0;
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
  // `p`: the kernel's parameters. `patient`: this block has nothing else to do.
  template <class Params>
  __device__ static void run(const Params& p, const float (&acc)[BN / 2], std::int64_t tile,
                             std::int64_t tiles, int range, bool patient, int* shared, std::int64_t row0,
                             std::int64_t column0) {
    const Sum mine(p.slots.partial, range * tiles + tile);
    float4 own[kPieces];
#pragma unroll
    for (int quarter = 0; quarter < kRangesOfK; ++quarter)
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 four = Sum::four(acc, quarter * kPieces + i);
        if (quarter == range) own[i] = four;
        if (quarter != range || !patient) mine.put(quarter * kPieces + i, four);
      }
    int* const counter = p.slots.arrived + tile;
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
                               : Sum(p.slots.partial, from * tiles + tile).get(quarter * kPieces + i);
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

}  // namespace rlk::cuda::lm_head
