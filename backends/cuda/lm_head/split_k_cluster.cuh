// Split-K reduction inside a cluster: block `range` of it holds the sums of one range of k for the whole tile
// in registers, and owns a share of the tile's columns. Every block sends the others their shares, straight
// into their shared memory, and each owner adds what it got in the order of the ranges: ((s0 + s1) + s2) +
// s3, in fp32 to nearest. The order is that of the ranges whatever arrives first.
//
// The tile goes in rounds of a few columns per owner, so that the space received into leaves the operands'
// rings their stages. Thread t of every block holds the same rows and columns, so it sends to thread t: no
// layout to agree on, and every access is 16 bytes from consecutive threads.
#pragma once

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/cluster.cuh"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {

template <int Threads, int BN, int Ranges>
struct Exchange {
  static constexpr int kRounds = BN >= 64 ? BN / 64 : 1;
  static constexpr int kColumns = BN / (kRounds * Ranges);  // of one owner in one round
  static constexpr int kFloats = kColumns / 2, kPieces = kFloats / 4;
  static constexpr int kSlotBytes = Threads * kFloats * 4, kBytes = (Ranges - 1) * kSlotBytes;

  // Two barriers: the others' sums have landed here; the others have read what this block sent them.
  __device__ static void init(std::uint64_t* barriers) {
    barrier_init(barriers, 1);
    barrier_init(barriers + 1, (Ranges - 1) * Threads / 32);
  }

  // `turn` counts rounds over all tiles. The block's place in the cluster is range * Stride + rank.
  template <int Stride>
  __device__ static void run(const Gemm& g, const float (&acc)[BN / 2], unsigned char* received,
                             std::uint64_t* barriers, int rank, int range, int& turn, std::int64_t row0,
                             std::int64_t column0) {
    const std::uint32_t mine = threadIdx.x * 16, space = shared_address(received),
                        landed = shared_address(barriers), taken = shared_address(barriers + 1);
#pragma unroll
    for (int round = 0; round < kRounds; ++round, ++turn) {
      barrier_wait(barriers + 1, turn % 2 ^ 1);
      if (threadIdx.x == 0) barrier_expect(barriers, kBytes);
      float own[kFloats];
#pragma unroll
      for (int owner = 0; owner < Ranges; ++owner) {
        const float* part = acc + (round * Ranges + owner) * kFloats;
        if (owner == range) {
#pragma unroll
          for (int i = 0; i < kFloats; ++i) own[i] = part[i];
        } else {
          const int place = owner * Stride + rank, slot = range < owner ? range : range - 1;
          const std::uint32_t to = address_at(space + slot * kSlotBytes + mine, place),
                              count = address_at(landed, place);
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece)
            store_async(to + piece * Threads * 16, count, part + piece * 4);
        }
      }
      barrier_wait(barriers, turn % 2);
      float sum[kFloats];
#pragma unroll
      for (int from = 0; from < Ranges; ++from) {
        const unsigned char* slot = received + (from < range ? from : from - 1) * kSlotBytes + mine;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          float4 x = make_float4(own[piece * 4], own[piece * 4 + 1], own[piece * 4 + 2], own[piece * 4 + 3]);
          if (from != range) x = *reinterpret_cast<const float4*>(slot + piece * Threads * 16);
          const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum[piece * 4 + i] = from == 0 ? four[i] : __fadd_rn(sum[piece * 4 + i], four[i]);
        }
      }
      __syncwarp();
      if (const int lane = static_cast<int>(threadIdx.x) % 32; lane < Ranges && lane != range)
        barrier_arrive_released(address_at(taken, lane * Stride + rank));
      store(g, sum, row0, column0 + (round * Ranges + range) * kColumns);
    }
  }

 private:
  __device__ static void store(const Gemm& g, const float (&sum)[kFloats], std::int64_t row0,
                               std::int64_t column0) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kFloats; ++i)
      store_product(g, row0 + lane / 4 + i % 4 / 2 * 8, column0 + i / 4 * 8 + lane % 4 * 2 + i % 2, sum[i]);
  }
};
// One range: nothing to meet.
template <int Threads, int BN>
struct Exchange<Threads, BN, 1> {
  static constexpr int kBytes = 0;
};

}  // namespace rlk::cuda::lm_head
