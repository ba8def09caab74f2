// Few rows of few sequences: what the blocks of a cluster share, and where keys and values lie.
//
// A round is the tiles of a split that the cluster has at once: a block has the keys of one, and of all of the round's values
// its own channels. A warp copies what it alone reads, so nobody has to be told of it.
#pragma once

#include "cuda/attention/few_rows_block.cuh"
#include "cuda/hopper/cluster.cuh"

namespace rlk::cuda::attention {

// Blocks of eight rows.
template <class T, int Eights>
struct ClusterShape {
  using Element = T;
  static constexpr int kBlocks = 8, kEights = Eights, kRows = 8 * Eights;
  static constexpr int kSlice = 16, kLineBytes = kSlice * 2;  // channels of values, of a warp
  // Warps: four have scores, and as many sum values as a block has slices.
  static constexpr int kScorers = 4, kSlices = kNarrow / kSlice / kBlocks, kWarps = kScorers + kSlices;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyBytes = kTile * kNarrow * 2, kSliceBytes = kBlocks * kTile * kLineBytes;
  static constexpr int kPieceBytes =
      32 * 16;  // of weights: 32 keys of eight rows, as the tensor core takes them
  static constexpr int kWeightBytes = kBlocks * kScorers * Eights * kPieceBytes;
  static constexpr int kTops = kBlocks * kScorers * kRows;  // [block][warp][row]
  static constexpr int kSums = kClasses * kTops;            // [block][warp][class][row % 8][row / 8]
  static constexpr int kBarriers = 3;
  static constexpr int kBytes =
      kKeyBytes + kSlices * kSliceBytes + kWeightBytes + (kTops + kSums) * 4 + kBarriers * 8;
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks of an SM");
};

// Full: what the blocks send has come. Taken: all warps of all blocks have read it.
enum class Event { tops_full, weights_full, taken };

// Keys, values, weights, maxima and sums, then barriers.
template <class S>
struct ClusterShared {
  unsigned char* keys;

  __device__ unsigned char* values(int slice) const { return keys + S::kKeyBytes + slice * S::kSliceBytes; }
  __device__ unsigned char* weights() const { return values(S::kSlices); }
  __device__ float* tops() const { return reinterpret_cast<float*>(weights() + S::kWeightBytes); }
  __device__ float* sums() const { return tops() + S::kTops; }
  __device__ std::uint64_t* barrier(Event event) const {
    return reinterpret_cast<std::uint64_t*>(sums() + S::kSums) + static_cast<int>(event);
  }
  __device__ void init() const {
    barrier_init(barrier(Event::tops_full), 1), barrier_init(barrier(Event::weights_full), 1);
    barrier_init(barrier(Event::taken), S::kBlocks * S::kWarps);
    fence_barrier_init();
  }
  // Before another init.
  __device__ void drop() const {
    for (const Event event : {Event::tops_full, Event::weights_full, Event::taken})
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier(event))) : "memory");
  }
};

// Tiles from `base` on, a tile each of the first `tiles` blocks.
struct Round {
  int base, tiles;
};

// Where key j lies: a page, which the table has, and the token there.
struct Spot {
  Unread page;
  int token = 0;

  __device__ __forceinline__ Spot() {}
  __device__ __forceinline__ Spot(const Problem& p, const Work& w, int j) {
    token = static_cast<int>(w.k_begin) + j;
    if (!p.block_table) return;
    const int size = static_cast<int>(p.page_size), column = j / size;
    page = {p.block_table, w.n, column}, token = j - column * size;
  }
  // Bytes from the tensor's start on; elements have two.
  __device__ __forceinline__ std::int64_t place(const Problem& p, const Work& w,
                                                const attn128::Tensor& t) const {
    const std::int64_t outer = p.block_table ? Problem::held(page.of(p.block_table), p.pages - 1) : w.n;
    return 2 * (w.h * t.head + outer * t.sequence + token * t.token);
  }
};

}  // namespace rlk::cuda::attention
