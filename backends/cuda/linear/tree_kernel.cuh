// linear on Hopper's wgmma, fed by TMA: arithmetic sm90/t25k16/tree8.
//
// One persistent block per SM: a producer thread streams the operands, 64 of k a stage, into a ring; one or two
// consumer warpgroups multiply 64 rows each. A leaf is one chain of 16-wide groups ascending in k in one accumulator. The
// leaves of a block are taken depth first, so that no more than three finished sums wait for their partner: two in
// registers, the oldest in shared memory.
//
// The next leaf begins in other registers before a leaf is complete, and sums are joined while the tensor cores go on.
// Three sets of sums, which live as long as the block, are what keeps the compiler from copying them at every leaf: 192
// moves a thread, three times the additions.
//
// The tree is the split-K: where tiles are too few to occupy the GPU, the blocks of a cluster take 1, 2 or 4 leaves each.
// Each brings the others what they finish of the tile, into their shared memory, and adds the sums of its own share from
// all of them, as the tree says, and stores it. Where there are more tiles than blocks, whole rounds of them come first, a
// tile a block. Which cut is taken never shows in a bit.
//
// With swiglu a tile has the same 64 columns of gate and of up, which a thread then holds side by side.
//
// Every leaf has as many stages as the first. What lies over the end of k comes as zeros, which are neutral. The last
// stage of a leaf may reach into the next one: its groups of 16 behind the end take their operands from a place that
// holds zeros, for a branch round a product would make the compiler wait for every one.
#pragma once

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/cluster.cuh"
#include "cuda/hopper/matrix_map.h"
#include "cuda/hopper/tma.cuh"
#include "cuda/linear/tree.h"
#include "cuda/linear/tree_epilogue.cuh"
#include "cuda/lm_head/epilogue.cuh"
#include "cuda/lm_head/stage.cuh"

namespace rlk::cuda::linear {

using namespace hopper;

inline constexpr int kStep = 64;  // of k per stage
inline constexpr int kMaxStages = 32;
inline constexpr int kMostShared = 227 * 1024;  // of a block
inline constexpr int kBandRows = 2048;          // of the m operand: stay in L2 while a band crosses n

// Gated: the first half of a tile's columns are gates, the second their ups, and it leaves half as many. Tail: leaves end
// within a stage.
template <class T, int Groups, int Columns, bool KA, bool KB, int Pair, bool Gated, bool Tail>
struct Traits {
  using Element = T;
  static constexpr int kGroups = Groups, kBM = 64 * Groups, BN = Columns, kPair = Pair;
  static constexpr bool kGated = Gated, kTail = Tail;
  static constexpr int kLeaving = Gated ? Columns / 2 : Columns;
  static constexpr bool kAContiguous = KA, kBContiguous = KB;  // along k
  using A = lm_head::Staged<kBM, KA>;
  using B = lm_head::Staged<BN, KB>;
  static constexpr int kMultipliers = 128 * Groups, kThreads = kMultipliers + 128;
  static constexpr int kFloats = BN / 2;  // of a tile's sums, per thread
  static constexpr int kRunning = 1;      // stages whose products may still be running
  static constexpr int kSlotBytes = kBM * BN * 4;
  static constexpr int kZeroBytes = Tail ? 1024 : 0;  // what 16 of k read again and again, of either operand
  static constexpr bool kSplits = KA && Pair == 1;
  static constexpr int kMostBlocks = Columns % 64 == 0 ? 8 : 4;  // that can share a tile, by eight columns
};

struct Params {
  Product product;
  std::int64_t tiles_m, tiles_n;  // of pairs, where blocks are paired
  int split, stages, a_bytes, band;
  int whole;        // rounds of tiles before those whose leaves the blocks of a cluster share
  int a_box;        // lines of a that a copy of a whole tile has
  int steps, last;  // stages of a leaf, and groups of 16 in its last
  bool aligned;     // lines of c, bias and residual, for stores of four
  bool plain;       // nothing is added, and lines of 16-bit c start on 16 bytes
  bool mapped;      // nothing is added, and map_c says where lines of 128 bytes leave to
};

// A block's shared memory and its place in the cluster. A thread goes through the stages of all tiles in the same
// order, whatever its role.
template <class P>
struct Block {
  const Params& p;
  unsigned char *zeros, *ring_b, *ring_a, *slot;
  std::uint64_t *full, *empty, *landed, *taken;
  int a_bytes, warp, rank, first_leaf, leaves;
  std::int64_t tiles;
  int phase = 0, stage = 0;
  int running = 0;  // stages whose products may still be running

  __device__ __forceinline__ Block(const Params& params, unsigned char* shared_raw) : p(params) {
    unsigned char* const shared = shared_raw + (1024 - shared_address(shared_raw) % 1024) % 1024;
    a_bytes = p.a_bytes;
    zeros = shared;
    ring_b = shared + P::kZeroBytes;
    ring_a = ring_b + p.stages * P::B::kBytes;
    // Behind the rings, so that reading past the last real rows stays inside.
    slot = ring_a + (p.stages - 1) * a_bytes + P::A::kBytes;
    full = reinterpret_cast<std::uint64_t*>(slot + P::kSlotBytes);
    empty = full + p.stages;
    landed = empty + p.stages;
    taken = landed + 1;
    // Read from one lane, so that the compiler sees that a warp stays together.
    warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    const int blocks = p.split * P::kPair;
    rank = __shfl_sync(~0u, blocks > 1 ? cluster_rank() : 0, 0);
    tiles = p.tiles_m * p.tiles_n;
  }
  // A block's tile in this round, and which leaves of it are the block's; from `tiles` on there is none.
  struct Unit {
    int round = 0;
    std::int64_t tile = 0;
  };
  __device__ __forceinline__ void find(Unit& u) {
    const int blocks = p.split * P::kPair;
    const bool alone = P::kPair == 1 && u.round < p.whole;
    leaves = alone ? p.product.leaves : p.product.leaves / p.split;
    first_leaf = P::kPair > 1 || alone ? 0 : rank * leaves;
    const std::int64_t whole = static_cast<std::int64_t>(p.whole) * gridDim.x;
    u.tile = alone ? static_cast<std::int64_t>(u.round) * gridDim.x + blockIdx.x
                   : whole + (u.round - p.whole) * static_cast<std::int64_t>(gridDim.x / blocks) +
                         blockIdx.x / blocks;
  }
  __device__ __forceinline__ std::int64_t start(int leaf) const {
    const std::int64_t at = leaf * p.product.width;
    return at < p.product.k ? at : p.product.k;
  }
  // Stages of a leaf. Sums in order have as many leaves as they need, which end where k does.
  __device__ __forceinline__ int steps(int leaf) const {
    if constexpr (P::kAContiguous) return p.steps;
    return static_cast<int>((start(leaf + 1) - start(leaf) + kStep - 1) / kStep);
  }
  __device__ __forceinline__ int after(int s) const { return s + 1 == p.stages ? 0 : s + 1; }
  __device__ __forceinline__ void advance() {
    stage = after(stage);
    if (stage == 0) phase ^= 1;
  }
  struct Place {
    std::int64_t row0, column0;
  };
  __device__ __forceinline__ Place place(std::int64_t tile) const {
    const lm_head::TilePosition at = lm_head::place(tile, p.tiles_m, p.tiles_n, p.band);
    return {(at.m * P::kPair + (P::kPair > 1 ? rank : 0)) * P::kBM, at.n * P::kLeaving};
  }
};

// ---- the producer

struct Maps {
  CUtensorMap a, b, a_last, b_last;  // of whole tiles, and of those that end before
};

// What a stage of a tile copies. Of a k-contiguous operand no lines behind its end, but to a multiple of eight: a bulk copy takes
// several times as long for those as for lines that are there. Of other operands always all.
struct Extent {
  int a, b;   // lines; of b this block's share, where a pair has two
  int bytes;  // of both, of a pair's shares together
  const CUtensorMap *map_a, *map_b;
};
__host__ __device__ inline int lines_before_end(std::int64_t left, int most) {
  return left >= most ? most : left <= 0 ? 0 : static_cast<int>((left + 7) / 8 * 8);
}
template <class P>
__device__ __forceinline__ Extent extent_of(const Block<P>& b, const Maps& maps,
                                            const typename Block<P>::Place& at) {
  constexpr int kShare = P::BN / P::kPair, kLine = kStep * 2;
  Extent e{P::kBM, kShare, 0, &maps.a, &maps.b};
  if constexpr (P::kAContiguous) {
    e.a = lines_before_end(b.p.product.m - at.row0, b.p.a_box);
    if (e.a != b.p.a_box) e.map_a = &maps.a_last;
  }
  e.bytes = e.a * kLine;
  if constexpr (P::kBContiguous && !P::kGated) {
    const auto share = [&](int i) {
      return lines_before_end(b.p.product.n - at.column0 - i * kShare, kShare);
    };
    e.b = share(b.rank % P::kPair);
    if (e.b != kShare) e.map_b = &maps.b_last;
    for (int i = 0; i < P::kPair; ++i) e.bytes += share(i) * kLine;
  } else {
    e.bytes += P::B::kBytes;
  }
  return e;
}

template <class P>
__device__ __forceinline__ void load_a(const Block<P>& b, const Extent& e, int k, int row0) {
  unsigned char* const to = b.ring_a + b.stage * b.a_bytes;
  if constexpr (P::kAContiguous) {
    if (e.a > 0) tma_load(to, e.map_a, b.full + b.stage, k, row0);
  } else {
#pragma unroll
    for (int block = 0; block < P::A::kBlocks; ++block)
      tma_load(to + block * P::A::kBlockBytes, e.map_a, b.full + b.stage, row0 + block * P::A::kBox, k);
  }
}
// The same columns of gate and of up.
template <class P>
__device__ __forceinline__ void load_gated(const Block<P>& b, const Extent& e, int k, int column0) {
  static_assert(P::kBContiguous && P::BN % 16 == 0);
  unsigned char* const to = b.ring_b + b.stage * P::B::kBytes;
  std::uint64_t* const full = b.full + b.stage;
  constexpr int kHalf = P::BN / 2;
  const Product& g = b.p.product;
  const int gate = static_cast<int>(column0 / g.run * g.step + column0 % g.run),
            up = gate + static_cast<int>(g.up);
  if constexpr (P::kPair > 1) {
    tma_load_multicast(to + b.rank * kHalf * 128, e.map_b, full, k, b.rank == 0 ? gate : up, 3);
  } else {
    tma_load(to, e.map_b, full, k, gate);
    tma_load(to + kHalf * 128, e.map_b, full, k, up);
  }
}
template <class P>
__device__ __forceinline__ void load_b(const Block<P>& b, const Extent& e, int k, int column0) {
  if constexpr (P::kGated) return load_gated(b, e, k, column0);
  unsigned char* const to = b.ring_b + b.stage * P::B::kBytes;
  std::uint64_t* const full = b.full + b.stage;
  if constexpr (P::kBContiguous) {
    constexpr int kShare = P::BN / P::kPair;
    static_assert(kShare % 8 == 0);
    const int first = b.rank % P::kPair * kShare;
    if (e.b == 0) return;
    if constexpr (P::kPair > 1)
      tma_load_multicast(to + first * 128, e.map_b, full, k, column0 + first, 3);
    else
      tma_load(to, e.map_b, full, k, column0);
  } else {
    static_assert(P::B::kBlocks % P::kPair == 0);
    constexpr int kShare = P::B::kBlocks / P::kPair;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int block = b.rank % P::kPair * kShare + i;
      unsigned char* const place = to + block * P::B::kBlockBytes;
      if constexpr (P::kPair > 1)
        tma_load_multicast(place, e.map_b, full, column0 + block * P::B::kBox, k, 3);
      else
        tma_load(place, e.map_b, full, column0 + block * P::B::kBox, k);
    }
  }
}

// Where number `at` of a leaf lies, whose segments follow one another.
__device__ __forceinline__ std::int64_t place_of(const rlk::leaves::Segments& s, int leaf, std::int64_t at) {
  int i = 0;
  for (; at >= s.width[i]; ++i) at -= s.width[i];
  return s.start[i] + leaf * s.width[i] + at;
}

template <class P>
__device__ __forceinline__ void produce(Block<P>& b, const Maps& maps, typename Block<P>::Unit u,
                                        typename Block<P>::Place at, Extent extent) {
  for (; u.tile < b.tiles; ++u.round, b.find(u), at = b.place(u.tile), extent = extent_of(b, maps, at)) {
    for (int leaf = b.first_leaf; leaf < b.first_leaf + b.leaves; ++leaf)
      for (int step = 0, steps = b.steps(leaf); step < steps; ++step, b.advance()) {
        barrier_wait(b.empty + b.stage, b.phase ^ 1);
        barrier_expect(b.full + b.stage, extent.bytes);
        int from = static_cast<int>(leaf * b.p.product.width) + step * kStep;
        if constexpr (P::kAContiguous && !P::kBContiguous)
          if (b.p.product.segments.count > 0)
            from = static_cast<int>(place_of(b.p.product.segments, leaf, step * kStep));
        load_b(b, extent, from, static_cast<int>(at.column0));
        load_a(b, extent, from, static_cast<int>(at.row0));
      }
  }
}

// ---- the consumers

// The producers that fill the stage, of both blocks of a pair, may do so again.
template <class P>
__device__ __forceinline__ void release(const Block<P>& b, int which) {
  if constexpr (P::kPair == 1) {
    if (threadIdx.x % 128 == 0) barrier_arrive(b.empty + which);
  } else {
    if (threadIdx.x % 128 < P::kPair) barrier_arrive_at(b.empty + which, static_cast<int>(threadIdx.x) % 128);
  }
}

template <int Floats>
__device__ __forceinline__ void add_to(float (&acc)[Floats], const float (&left)[Floats]) {
#pragma unroll
  for (int i = 0; i < Floats; ++i) acc[i] = __fadd_rn(left[i], acc[i]);
}

// Of 16 of k in lines of 128 bytes: the eight lines at `base` again and again.
__device__ __forceinline__ std::uint64_t same_lines(const void* base) {
  return Descriptor(shared_address(base) >> 4 & 0x3fff, 0, 0, Swizzle::bytes128).at(0);
}

// A step of a leaf begins, its last or not: acc (+)= its products, which are under way.
template <class P>
__device__ __forceinline__ void begin_step(Block<P>& b, float (&acc)[P::kFloats], bool more, bool last) {
  barrier_wait(b.full + b.stage, b.phase);
  const auto a_tile = P::A::descriptor(shared_address(b.ring_a + b.stage * b.a_bytes), b.warp / 4 * 64);
  const auto b_tile = P::B::descriptor(shared_address(b.ring_b + b.stage * P::B::kBytes), 0);
  static_assert(P::A::kLineBytes == 128 && P::B::kLineBytes == 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStep / 16; ++i) {
    std::uint64_t a_group = a_tile.at(P::A::steps(i * 16)), b_group = b_tile.at(P::B::steps(i * 16));
    if constexpr (P::kTail)
      if (last && i >= b.p.last) a_group = b_group = same_lines(b.zeros);
    wgmma<typename P::Element, !P::kAContiguous, !P::kBContiguous>(acc, a_group, b_group, more || i > 0);
  }
  wgmma_commit();
  b.advance();
  ++b.running;
}
// All steps are complete but the last `Running`, and their stages given back.
template <int Running, class P>
__device__ __forceinline__ void finish_steps(Block<P>& b) {
  wgmma_wait<Running>();
  for (; b.running > Running; --b.running) {
    const int oldest = b.stage - b.running;
    release(b, oldest < 0 ? oldest + b.p.stages : oldest);
  }
}
template <class P>
__device__ __forceinline__ void begin_leaf(Block<P>& b, float (&acc)[P::kFloats]) {
  begin_step(b, acc, false, b.p.steps == 1);
}
// acc = a leaf whose first step has begun; its last is under way.
template <class P>
__device__ __forceinline__ void rest_of_leaf(Block<P>& b, float (&acc)[P::kFloats], int steps) {
  for (int step = 1; step < steps - (P::kTail ? 1 : 0); ++step) {
    begin_step(b, acc, true, false);
    finish_steps<P::kRunning>(b);
  }
  if (P::kTail && steps > 1) {
    begin_step(b, acc, true, true);
    finish_steps<P::kRunning>(b);
  }
}

// x = the tree over four leaves, the first of which has begun in x. A leaf begins in other registers before the one before
// it is complete, so that the tensor cores go on while sums are joined. With More, the leaf after the four begins in y.
template <bool More, class P>
__device__ __forceinline__ void multiply_four(Block<P>& b, float (&x)[P::kFloats], float (&y)[P::kFloats],
                                              float (&z)[P::kFloats]) {
  rest_of_leaf(b, x, b.p.steps);
  begin_leaf(b, z), finish_steps<1>(b);
  rest_of_leaf(b, z, b.p.steps);
  begin_leaf(b, y), finish_steps<1>(b);
  wgmma_fence_operand(x), wgmma_fence_operand(z);
  add_to(z, x);
  rest_of_leaf(b, y, b.p.steps);
  begin_leaf(b, x), finish_steps<1>(b);
  rest_of_leaf(b, x, b.p.steps);
  finish_steps<0>(b);
  wgmma_fence_operand(x), wgmma_fence_operand(y);
  add_to(x, y);
  if constexpr (More) begin_leaf(b, y);
  add_to(x, z);
}

// y = the tree over a block's leaves.
template <class P>
__device__ __forceinline__ void multiply_ahead(Block<P>& b, float (&x)[P::kFloats], float (&y)[P::kFloats],
                                               float (&z)[P::kFloats]) {
  if (b.leaves == 8) {
    const Waiting<P::kFloats> left(b.slot, b.warp);
    begin_leaf(b, x);
    multiply_four<true>(b, x, y, z);
    corner_is_free(b);
    left.keep(x);
    multiply_four<false>(b, y, x, z);
    left.add_to(y);
  } else if (b.leaves == 4) {
    begin_leaf(b, y);
    multiply_four<false>(b, y, x, z);
  } else if (b.leaves == 2) {
    begin_leaf(b, x);
    rest_of_leaf(b, x, b.p.steps);
    begin_leaf(b, y), finish_steps<1>(b);
    rest_of_leaf(b, y, b.p.steps);
    finish_steps<0>(b);
    wgmma_fence_operand(x), wgmma_fence_operand(y);
    add_to(y, x);
  } else {
    begin_leaf(b, y);
    rest_of_leaf(b, y, b.p.steps);
    finish_steps<0>(b);
    wgmma_fence_operand(y);
  }
}

// total = the sums of all leaves in order. A leaf begins in other registers before the one before it is complete, which is
// added while the tensor cores go on; what -0 is added to stays what it is.
template <class P>
__device__ __forceinline__ void multiply_in_order(Block<P>& b, float (&total)[P::kFloats],
                                                  float (&x)[P::kFloats], float (&y)[P::kFloats]) {
  const auto begin_after = [&](float(&to)[P::kFloats], float(&before)[P::kFloats]) {
    begin_leaf(b, to), finish_steps<1>(b);
    wgmma_fence_operand(before);
    add_to(total, before);
  };
  const auto end = [&](float(&last)[P::kFloats]) {
    finish_steps<0>(b);
    wgmma_fence_operand(last);
    add_to(total, last);
  };
#pragma unroll
  for (float& sum : total) sum = -0.0f;
  begin_leaf(b, x);
  rest_of_leaf(b, x, b.steps(0));
  for (int leaf = 1;; leaf += 2) {
    if (leaf == b.leaves) return end(x);
    begin_after(y, x);
    rest_of_leaf(b, y, b.steps(leaf));
    if (leaf + 1 == b.leaves) return end(y);
    begin_after(x, y);
    rest_of_leaf(b, x, b.steps(leaf + 1));
  }
}

// A warp stores its rows, `left` of which are there, from its corner of the slot: of four columns a share of `Fours`.
template <class P, int Fours>
__device__ __forceinline__ void store_fours(const Block<P>& b, int share, std::int64_t left,
                                            std::int64_t row0, std::int64_t column0) {
  const int rows = left < 16 ? static_cast<int>(left) : 16;
  const auto sums = [&](int row, int four) {
    return *reinterpret_cast<const float4*>(b.slot + Slot<P::BN>::offset(row, four));
  };
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 32; i < rows * Fours; i += 32) {
    const int row = b.warp * 16 + i / Fours, four = share * Fours + i % Fours;
    if constexpr (P::kGated)
      store_gated<typename P::Element>(b.p.product, b.p.aligned, row0 + row, column0 + four * 4,
                                       sums(row, four), sums(row, four + P::kLeaving / 4));
    else
      store_four<typename P::Element>(b.p.product, b.p.aligned, row0 + row, column0 + four * 4,
                                      sums(row, four));
  }
  __syncwarp();
}

// The sums of `Split` blocks joined as a tree.
template <int Split>
__device__ __forceinline__ float4 join(float4 (&x)[Split]) {
#pragma unroll
  for (int half = 1; half < Split; half *= 2)
#pragma unroll
    for (int i = 0; i < Split; i += 2 * half)
      x[i] = make_float4(__fadd_rn(x[i].x, x[i + half].x), __fadd_rn(x[i].y, x[i + half].y),
                         __fadd_rn(x[i].z, x[i + half].z), __fadd_rn(x[i].w, x[i + half].w));
  return x[0];
}

// How the blocks of a cluster share a tile out: each finishes some blocks of eight columns, of gate and of up where there
// are both, and of those the warps of the others bring this warp what they have. `i` counts a share's blocks, which lie in
// the warp's corner of the slot by sender.
template <class P, int Split>
struct Shares {
  static constexpr int kBlocks = P::BN / 8 / Split, kBytes = kBlocks * 512;  // of a warp's share
  __device__ static __forceinline__ int block(int share, int i) {
    if constexpr (P::kGated) {
      constexpr int kHalf = kBlocks / 2;
      return (i < kHalf ? 0 : P::BN / 16 - kHalf) + share * kHalf + i;
    }
    return share * kBlocks + i;
  }
  // To every other block of the cluster what it finishes; this block's own is kept likewise.
  __device__ static __forceinline__ void send(const Block<P>& b, const float (&acc)[P::kFloats],
                                              unsigned char* corner) {
    unsigned char* const at = corner + b.rank * kBytes + threadIdx.x % 32 * 16;
#pragma unroll
    for (int share = 0; share < Split; ++share) {
      const std::uint32_t there = address_at(shared_address(at), share),
                          landed = address_at(shared_address(b.landed), share);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int first = 4 * block(share, i);
        const float x[4] = {acc[first], acc[first + 1], acc[first + 2], acc[first + 3]};
        if (share != b.rank)
          store_async(there + i * 512, landed, x);
        else
          *reinterpret_cast<float4*>(at + i * 512) = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  // The whole sums of this block's share.
  __device__ static __forceinline__ void join_all(const unsigned char* corner, float4 (&sums)[kBlocks]) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      float4 x[Split];
#pragma unroll
      for (int from = 0; from < Split; ++from)
        x[from] = *reinterpret_cast<const float4*>(corner + from * kBytes + i * 512 + threadIdx.x % 32 * 16);
      sums[i] = join(x);
    }
  }
  // They leave from registers, 16 bytes at a time, if 16-bit results lie so and nothing is added to them.
  __device__ static __forceinline__ bool leave(const Block<P>& b, int share, const float4 (&sums)[kBlocks],
                                               std::int64_t row0, std::int64_t column0) {
    using Out = typename P::Element;
    if constexpr (!P::kGated && kBlocks % 2 == 0) {
      if (!b.p.plain || column0 + P::BN > b.p.product.n) return false;
      std::uint32_t words[2 * kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        words[i] = lm_head::round_pair<Out>(sums[i].x, sums[i].y);
        words[kBlocks + i] = lm_head::round_pair<Out>(sums[i].z, sums[i].w);
      }
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int first = 0; first < 2 * kBlocks; first += 4) {
        std::uint32_t line[4] = {words[first], words[first + 1], words[first + 2], words[first + 3]};
        turn_four(line);
        const int at = first + lane % 4;
        const std::int64_t row = row0 + b.warp * 16 + lane / 4 + at / kBlocks * 8;
        Out* const to = static_cast<Out*>(b.p.product.c) + row * b.p.product.ldc + column0 +
                        (share * kBlocks + at % kBlocks) * 8;
        if (row < b.p.product.m)
          __stcs(reinterpret_cast<uint4*>(to), make_uint4(line[0], line[1], line[2], line[3]));
      }
      return true;
    }
    return false;
  }
  // Or from the warp's corner.
  __device__ static __forceinline__ void put(const Block<P>& b, const float4 (&sums)[kBlocks]) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) Slot<P::BN>::put_block(b.slot, b.warp, block(b.rank, i), sums[i]);
    __syncwarp();
  }
};

// The blocks of a cluster bring each other their sums, and each finishes its share.
template <class P, int Split>
__device__ __forceinline__ void store_joined(const Block<P>& b, const float (&acc)[P::kFloats],
                                             std::int64_t row0, std::int64_t column0, int round) {
  using S = Shares<P, Split>;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t left = b.p.product.m - row0;
  const int rows = left < P::kBM ? static_cast<int>(left) : P::kBM, warps = (rows + 15) / 16;
  unsigned char* const corner = b.slot + b.warp * Split * S::kBytes;
  if (thread == 0) barrier_expect(b.landed, warps * (Split - 1) * S::kBytes);
  const int turn = round - b.p.whole;
  if (round > 0) barrier_wait_released(b.taken, (turn + (b.p.whole > 0)) % 2 ^ 1);
  if (b.warp < warps) {
    S::send(b, acc, corner);
    barrier_wait_released(b.landed, turn % 2);
    float4 sums[S::kBlocks];
    S::join_all(corner, sums);
    if (!S::leave(b, b.rank, sums, row0, column0)) {
      S::put(b, sums);
      store_fours<P, P::kLeaving / 4 / Split>(b, b.rank, rows - b.warp * 16, row0, column0);
    }
  }
}

// What a warp's own stores still read from its corner of the slot is read.
template <class P>
__device__ __forceinline__ void corner_is_free(const Block<P>& b) {
  if (!b.p.mapped) return;
  if (threadIdx.x % 32 == 0) tma_store_wait_read();
  __syncwarp();
}

// The other blocks of the cluster may bring their sums.
template <class P>
__device__ __forceinline__ void slot_is_free(const Block<P>& b) {
  corner_is_free(b);
  asm volatile("bar.sync 1, %0;" ::"n"(P::kMultipliers) : "memory");
  if (static_cast<int>(threadIdx.x) < b.p.split)
    barrier_arrive_released(address_at(shared_address(b.taken), static_cast<int>(threadIdx.x)));
}

// A warp's 16 rows leave by bulk copies out of its corner of the slot, which end where c does.
template <class Out, class P>
__device__ __forceinline__ void store_mapped(const Block<P>& b, const CUtensorMap& map_c,
                                             const float (&acc)[P::kFloats], std::int64_t row0,
                                             std::int64_t column0) {
  constexpr int kColumns = 128 / static_cast<int>(sizeof(Out)), kBytes = 16 * 128;
  unsigned char* const corner = b.slot + b.warp * 16 * P::BN * 4;
  corner_is_free(b);
#pragma unroll
  for (int line = 0; line < P::kLeaving / kColumns; ++line)
    lm_head::put_lines<Out>(corner + line * kBytes, acc + line * kColumns / 2);
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int line = 0; line < P::kLeaving / kColumns; ++line)
    tma_store(&map_c, corner + line * kBytes, static_cast<int>(column0) + line * kColumns,
              static_cast<int>(row0) + b.warp * 16);
  tma_store_commit();
}

// swiglu of a thread's sums, the first half of which are gates, the second their ups.
template <class Out, class P>
__device__ __forceinline__ void gate_sums(const Block<P>& b, float (&acc)[P::kFloats]) {
#pragma unroll
  for (int i = 0; i < P::kFloats / 2; ++i) {
    const auto held = [](float sum) { return lm_head::to_float(lm_head::round_to<Out>(sum)); };
    acc[i] =
        lm_head::to_float(gated_pair<Out>(held(acc[i]), held(acc[i + P::kFloats / 2]), b.p.product.twice));
  }
}

// A warp stores its 16 rows by way of its corner of the slot, so that lines leave whole.
template <class P>
__device__ __forceinline__ void store_alone(const Block<P>& b, const CUtensorMap& map_c,
                                            float (&acc)[P::kFloats], std::int64_t row0,
                                            std::int64_t column0) {
  const std::int64_t left = b.p.product.m - row0 - b.warp * 16;
  if (left <= 0) return;
  if (b.p.mapped) {
    const auto leave = [&](auto zero) {
      using Out = decltype(zero);
      if constexpr (P::kGated) gate_sums<Out>(b, acc);
      store_mapped<Out>(b, map_c, acc, row0, column0);
    };
    if (b.p.product.out == Float::f32) return leave(float{});
    return leave(typename P::Element{});
  }
  if constexpr (P::BN == 96) {
    float4 sums[P::BN / 8];
#pragma unroll
    for (int i = 0; i < P::BN / 8; ++i)
      sums[i] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    if (Shares<P, 1>::leave(b, 0, sums, row0, column0)) return;
  }
  __syncwarp();
  Slot<P::BN>::put(b.slot, b.warp, acc);
  __syncwarp();
  store_fours<P, P::kLeaving / 4>(b, 0, left, row0, column0);
}

template <class P>
__device__ __forceinline__ void store_tile(const Block<P>& b, const CUtensorMap& map_c,
                                           float (&acc)[P::kFloats], const typename Block<P>::Place& at,
                                           int round, bool more) {
  if constexpr (P::kSplits) {
    if (b.p.split > 1) {
      if (round == 0) cluster_wait();
      if (round < b.p.whole)
        store_alone(b, map_c, acc, at.row0, at.column0);
      else if (b.p.split == 8)
        store_joined<P, P::kMostBlocks>(b, acc, at.row0, at.column0, round);
      else if (b.p.split == 4)
        store_joined<P, 4>(b, acc, at.row0, at.column0, round);
      else
        store_joined<P, 2>(b, acc, at.row0, at.column0, round);
      if (more && round >= b.p.whole - 1) slot_is_free(b);
      return;
    }
  }
  store_alone(b, map_c, acc, at.row0, at.column0);
}

template <class P>
__device__ __forceinline__ void consume(Block<P>& b, const CUtensorMap& map_c) {
  // Alive from tile to tile, or the compiler copies them; each leaf's first product overwrites them.
  float x[P::kFloats] = {}, y[P::kFloats] = {}, z[P::kFloats] = {};
  typename Block<P>::Unit u;
  for (b.find(u); u.tile < b.tiles;) {
    if constexpr (P::kAContiguous)
      multiply_ahead(b, x, y, z);
    else
      multiply_in_order(b, y, x, z);
    const auto at = b.place(u.tile);
    const int round = u.round++;
    b.find(u);
    store_tile(b, map_c, y, at, round, u.tile < b.tiles);
  }
  corner_is_free(b);
}

template <class P>
__global__ void __launch_bounds__(P::kThreads, 1)
    tree(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
         const __grid_constant__ CUtensorMap map_c) {
  extern __shared__ unsigned char shared_raw[];
  Block<P> b(p, shared_raw);
  const bool cluster = p.split * P::kPair > 1;
  if (threadIdx.x == 0) {
    prefetch_map(&maps.a), prefetch_map(&maps.b);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(b.full + s, 1);
      barrier_init(b.empty + s, P::kPair * P::kGroups);
    }
    barrier_init(b.landed, 1), barrier_init(b.taken, p.split);
    fence_barrier_init();
  }
  if constexpr (P::kTail) {
    for (int i = static_cast<int>(threadIdx.x); i < P::kZeroBytes / 16; i += P::kThreads)
      reinterpret_cast<uint4*>(b.zeros)[i] = uint4{};
    fence_async_proxy();
  }
  __syncthreads();
  // The other blocks' barriers are needed by pairs at once, by split sums when the first are finished.
  if (cluster) cluster_arrive();
  // The next kernel in the stream may take the SMs that this one leaves, and this one waits here for the one before it.
  const auto wait = [] {
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
    if constexpr (P::kPair > 1) cluster_wait();
  };
  // Sums that wait in registers leave no room under an even split: the producers' warpgroup gives most of its share up.
  constexpr bool kRedistribute = P::kGroups == 2;
  if (b.warp >= P::kGroups * 4) {
    if constexpr (kRedistribute) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const bool produces = threadIdx.x == P::kGroups * 128;
    typename Block<P>::Unit unit;  // found while this block waits
    b.find(unit);
    const auto at = b.place(unit.tile);
    const Extent extent = extent_of(b, maps, at);
    wait();
    if (produces) produce(b, maps, unit, at, extent);
    __syncwarp();
    if (P::kPair == 1 && cluster) cluster_wait();
  } else {
    if constexpr (kRedistribute) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait();
    consume(b, map_c);
  }
  // No block of a pair may leave while the other signals in it; those that share a tile have had all that comes.
  if (P::kPair > 1) cluster_sync();
}

// ---- the launch

template <class P>
Params params_of(const Product& g, int split) {
  Params p{};
  p.product = g, p.split = split;
  constexpr int rows = P::kBM * P::kPair;
  p.tiles_m = (g.m + rows - 1) / rows, p.tiles_n = (g.n + P::kLeaving - 1) / P::kLeaving;
  p.band = kBandRows / rows;
  p.steps = static_cast<int>((g.width + kStep - 1) / kStep);
  p.last = static_cast<int>((g.width + 15) / 16) - (p.steps - 1) * (kStep / 16);
  p.aligned = fours_aligned(g);
  p.plain = g.bias == nullptr && g.residual == nullptr && g.out != Float::f32 && g.n % 8 == 0 &&
            g.ldc % 8 == 0 && reinterpret_cast<std::uintptr_t>(g.c) % 16 == 0;
  return p;
}

template <class P>
bool encode_operands(Maps* maps, const Params& p) {
  const Product& g = p.product;
  const auto lines = [&](CUtensorMap* map, const Operand& x, std::int64_t count, int box) {
    return encode(map, x.data, x.type, g.k, count, x.ld, kStep, box);
  };
  // Of lines behind the last whole box; any box where there are none.
  const auto left = [](std::int64_t count, int box) {
    return count % box == 0 ? box : lines_before_end(count % box, box);
  };
  if constexpr (P::kAContiguous) {
    if (!lines(&maps->a, g.a, g.m, p.a_box) || !lines(&maps->a_last, g.a, g.m, left(g.m, P::kBM)))
      return false;
  } else if (!encode(&maps->a, g.a.data, g.a.type, g.m, g.k, g.a.ld, P::A::kBox, kStep)) {
    return false;
  }
  if constexpr (P::kGated) return lines(&maps->b, g.b, 2 * g.n, P::BN / 2);
  if constexpr (P::kBContiguous) {
    constexpr int kShare = P::BN / P::kPair;
    return lines(&maps->b, g.b, g.n, kShare) && lines(&maps->b_last, g.b, g.n, left(g.n, kShare));
  }
  return encode(&maps->b, g.b.data, g.b.type, g.n, g.k, g.b.ld, P::B::kBox, kStep);
}

// The map by which 16 rows and 128 bytes of c leave at once; false where they cannot. A bulk copy ends where 16 bytes do.
inline bool encode_lines(CUtensorMap* map, const Product& g) {
  const auto bytes = static_cast<std::int64_t>(bytes_of(g.out));
  const bool even = reinterpret_cast<std::uintptr_t>(g.c) % 16 == 0 && g.n * bytes % 16 == 0 &&
                    (g.m == 1 || (g.ldc >= g.n && g.ldc * bytes % 16 == 0));
  return even && encode(map, g.c, g.out, g.n, g.m, g.ldc, static_cast<int>(128 / bytes), 16);
}

template <class T, int Groups, int BN, bool KA, bool KB, int Pair, bool Gated, bool Tail>
cudaError_t start_tree(const Product& g, int split, int multiprocessors, cudaStream_t stream) {
  using P = Traits<T, Groups, BN, KA, KB, Pair, Gated, Tail>;
  if (split > (P::kSplits ? P::kMostBlocks : 1)) return cudaErrorInvalidValue;
  Params p = params_of<P>(g, split);
  // Only the real rows are copied where they fit one tile; what the tensor core reads behind them is dropped.
  p.a_box = P::kAContiguous ? lines_before_end(g.m, P::kBM) : P::kBM;
  p.a_bytes = p.a_box * 128;
  const int stage_bytes = p.a_bytes + P::B::kBytes + 16,
            fixed = 1024 + 16 + P::kZeroBytes + P::kSlotBytes + P::A::kBytes - p.a_bytes;
  p.stages = (kMostShared - fixed) / stage_bytes;
  if (p.stages > kMaxStages) p.stages = kMaxStages;

  const auto kernel = tree<P>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
      e != cudaSuccess)
    return e;
  Maps maps;
  if (!encode_operands<P>(&maps, p)) return cudaErrorInvalidValue;

  const int blocks = split * P::kPair;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(fixed + p.stages * stage_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes, config.numAttrs = 2;
  std::int64_t together = multiprocessors / blocks;
  if (blocks > 2) {  // a cluster stays inside one group of SMs, so fewer may fit
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    int fit = 0;
    if (cudaError_t e = cudaOccupancyMaxActiveClusters(&fit, kernel, &config); e != cudaSuccess) return e;
    if (fit < together) together = fit;
  }
  if (together < 1) together = 1;
  const std::int64_t tiles = p.tiles_m * p.tiles_n;
  config.gridDim = dim3(static_cast<unsigned>((tiles < together ? tiles : together) * blocks));
  p.whole = split == 1 ? 0 : static_cast<int>(tiles / config.gridDim.x);
  CUtensorMap c{};
  p.mapped = (split == 1 || p.whole > 0) && P::BN % 64 == 0 && g.bias == nullptr && g.residual == nullptr &&
             encode_lines(&c, g);
  return cudaLaunchKernelEx(&config, kernel, p, maps, c);
}

template <class T, bool KB, bool Gated, bool Tail>
cudaError_t start_as(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  const int split = cut.split < g.leaves ? cut.split : g.leaves;
  const auto with = [&](auto start) { return start(g, split, multiprocessors, stream); };
  if constexpr (!Gated)  // swiglu has wide tiles alone, of which 64 columns leave
    if (cut.columns == 64)
      return with(cut.rows == 64 ? start_tree<T, 1, 64, true, KB, 1, false, Tail>
                                 : start_tree<T, 2, 64, true, KB, 1, false, Tail>);
  if constexpr (!Gated && KB)
    if (cut.columns == 96)
      return with(cut.rows == 64 ? start_tree<T, 1, 96, true, KB, 1, false, Tail>
                                 : start_tree<T, 2, 96, true, KB, 1, false, Tail>);
  if (cut.rows == 64) return with(start_tree<T, 1, 128, true, KB, 1, Gated, Tail>);
  return with(cut.pair ? start_tree<T, 2, 128, true, KB, 2, Gated, Tail>
                       : start_tree<T, 2, 128, true, KB, 1, Gated, Tail>);
}
template <class T, bool KB, bool Gated>
cudaError_t start_cut(const Product& g, const Cut& cut, int multiprocessors, cudaStream_t stream) {
  return g.width % kStep == 0 ? start_as<T, KB, Gated, false>(g, cut, multiprocessors, stream)
                              : start_as<T, KB, Gated, true>(g, cut, multiprocessors, stream);
}

}  // namespace rlk::cuda::linear
