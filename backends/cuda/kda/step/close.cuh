// What the last row of a block of 16 leaves for later ones; and the end of a chunk: S' = eg_last S + (k el)^T n, in the state's
// place, before the call's token begins the next chunk. For both kernels, the end by 256 threads.
#pragma once

#include "cuda/hopper/barrier.cuh"
#include "cuda/kda/step/numbers.cuh"

namespace rlk::cuda::kda::step {

// What later blocks need of channel d of a block whose last row this is.
template <class Task, class Shared>
__device__ inline void end_block(const Task& r, const Shared& s, const float* key, const float (&e)[kBlock],
                                 int d, float from_start, float in_block) {
  const int b = r.block();
  r.c.start[(b + 1) * kDim + d] = from_start;
  r.c.whole[b * kDim + d] = in_block;
  float tail[kBlock], to_bound = 1;
#pragma unroll
  for (int m = kBlock - 1; m >= 0; --m) {
    tail[m] = mul_rn(m < r.own() ? key[m * kDim + d] : s.token.k[d], to_bound);
    to_bound = flushed(mul_rn(to_bound, e[m]));
  }
  write(r.c.tail + d * kRows + r.first(), tail);
}

// Keys decayed to the chunk's end, and the whole decay into `total`: a thread a channel, whose pieces come
// through `slots` from `piece` on, keys and decays of the last block first.
template <class Task, class Slots>
__device__ inline void decay_keys(const Task& r, Slots& slots, unsigned piece, float (&keys)[kBlocks][kTile],
                                  float (&total)[kDim], int d) {
  float from_start = r.c.start[(kBlocks - 1) * kDim + d], to_end = 1;
  for (int b = kBlocks - 1; b >= 0; --b, piece += 2) {
    const float *key = wait_for(slots, piece), *decay = wait_for(slots, piece + 1);
    float k[kBlock], e[kBlock];
#pragma unroll
    for (int m = 0; m < kBlock; ++m) k[m] = key[m * kDim + d], e[m] = decay[m * kDim + d];
#pragma unroll
    for (int m = kBlock - 1; m >= 0; --m) {
      keys[b][m * kDim + d] = mul_rn(k[m], to_end);
      to_end = flushed(mul_rn(to_end, e[m]));
    }
    if (b == kBlocks - 1) {
#pragma unroll
      for (int m = 0; m < kBlock; ++m) from_start = flushed(mul_rn(from_start, e[m]));
      total[d] = from_start;
    }
    release(slots, piece), release(slots, piece + 1);
  }
}

// S' of a thread: eight channels, and four columns at two places, so that neighbouring threads read
// neighbouring 16 bytes of n.
struct Square {
  static constexpr int kTall = 8, kWide = 4, kApart = kDim / 2;
  float sum[kTall][2][kWide];

  // What a row of the chunk brings.
  struct Part {
    float k[kTall], n[2][kWide];
    __device__ __forceinline__ void ask(const float* keys, const float* rows) {
      read(keys, k), read(rows, n[0]), read(rows + kApart, n[1]);
    }
  };
  __device__ __forceinline__ void add(const Part& r) {
#pragma unroll
    for (int a = 0; a < kTall; ++a)
#pragma unroll
      for (int v = 0; v < 2 * kWide; ++v)
        sum[a][v / kWide][v % kWide] = fused(r.k[a], r.n[v / kWide][v % kWide], sum[a][v / kWide][v % kWide]);
  }
  // 16 rows, each on its way from shared memory while the one before it is added.
  __device__ __forceinline__ void add_block(const float* keys, const float* rows) {
    Part one, other;
    one.ask(keys, rows);
#pragma unroll 1
    for (int m = 0; m < kBlock; m += 2) {
      other.ask(keys + (m + 1) * kDim, rows + (m + 1) * kDim);
      add(one);
      const int next = (m + 2) % kBlock;  // past the end for nothing
      one.ask(keys + next * kDim, rows + next * kDim);
      add(other);
    }
  }
  __device__ __forceinline__ void begin(const float* state) {
#pragma unroll
    for (int a = 0; a < kTall; ++a)
#pragma unroll
      for (int c = 0; c < 2; ++c) read(state + a * kDim + c * kApart, sum[a][c]);
  }
  __device__ __forceinline__ void scale(const float* total) {
#pragma unroll
    for (int a = 0; a < kTall; ++a)
#pragma unroll
      for (int v = 0; v < 2 * kWide; ++v)
        sum[a][v / kWide][v % kWide] = mul_rn(sum[a][v / kWide][v % kWide], total[a]);
  }
  __device__ __forceinline__ void end(float* state) const {
#pragma unroll
    for (int a = 0; a < kTall; ++a)
#pragma unroll
      for (int c = 0; c < 2; ++c) write(state + a * kDim + c * kApart, sum[a][c]);
  }
};

// `piece` is the first of the closing's, and then the first behind them: keys and decays, which the first 128
// threads read, then n. `keys` and `total` are free; `closed` is arrived at when the state is in memory;
// `sync` is a barrier of the threads.
template <class Task, class Slots, class Sync>
__device__ inline void close_chunk(const Task& r, Slots& slots, unsigned& piece,
                                   float (&keys)[kBlocks][kTile], float (&total)[kDim], std::uint64_t* closed,
                                   int thread, Sync sync) {
  const bool low = thread < kDim;
  if (low) decay_keys(r, slots, piece, keys, total, thread);
  piece += 2 * kBlocks;
  const int d = thread / 16 * Square::kTall, column = thread % 16 * Square::kWide;
  float* state = r.state + d * kDim + column;
  Square square;
  square.begin(state);
  sync();
  square.scale(total + d);
#pragma unroll 1
  for (unsigned b = 0; b < kBlocks; ++b) square.add_block(keys[b] + d, wait_for(slots, piece + b) + column);
  square.end(state);
  // The producer's copies read it next.
  asm volatile("fence.proxy.async;" ::: "memory");
  sync();
  if (thread == 0) hopper::barrier_arrive(closed);
  for (int b = 0; b < kBlocks; ++b, ++piece)
    if (low) release(slots, piece);
}

}  // namespace rlk::cuda::kda::step
