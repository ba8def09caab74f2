// The end of a chunk: S' = eg_last S + (k el)^T n, in the state's place, before the call's token begins the next chunk.
#pragma once

#include "cuda/kda/step/block.cuh"

namespace rlk::cuda::kda::step {

// Keys decayed to the chunk's end, and the whole decay into `k_start`: a thread of the low half a channel.
__device__ inline void decay_keys(const Row& r, Shared& s, unsigned piece, const Here& h) {
  const int d = h.half;
  float from_start = r.c.start[(kRows / kBlock - 1) * kDim + d], to_end = 1;
  for (int b = kRows / kBlock - 1; b >= 0; --b, piece += 2) {
    const float *key = wait_for(s, piece), *decay = wait_for(s, piece + 1);
    float k[kBlock], e[kBlock];
#pragma unroll
    for (int m = 0; m < kBlock; ++m) k[m] = key[m * kDim + d], e[m] = decay[m * kDim + d];
    release(s, piece), release(s, piece + 1);
#pragma unroll
    for (int m = kBlock - 1; m >= 0; --m) {
      s.keys[b][m * kDim + d] = mul_rn(k[m], to_end);
      to_end = flushed(mul_rn(to_end, e[m]));
    }
    if (b < kRows / kBlock - 1) continue;
#pragma unroll
    for (int m = 0; m < kBlock; ++m) from_start = flushed(mul_rn(from_start, e[m]));
    s.k_start[d] = from_start;
  }
}

// `piece` is the first of the closing's, and then the first behind them.
__device__ inline void close_chunk(const Row& r, Shared& s, unsigned& piece, const Here& h) {
  constexpr int kTall = 8, kWide = 8;  // of S', a thread's
  if (h.low) decay_keys(r, s, piece, h);
  piece += 2 * kRows / kBlock;
  sync_consumers();
  const int d = h.thread / 16 * kTall, column = h.thread % 16 * kWide;
  float* state = r.state + d * kDim + column;
  float sum[kTall][kWide];
#pragma unroll
  for (int a = 0; a < kTall; ++a) read(state + a * kDim, sum[a]);
#pragma unroll
  for (int a = 0; a < kTall; ++a)
#pragma unroll
    for (int v = 0; v < kWide; ++v) sum[a][v] = mul_rn(sum[a][v], s.k_start[d + a]);
  for (int first = 0; first < kRows; first += kBlock) {
    const float* rows = wait_for(s, piece + static_cast<unsigned>(first / kBlock)) + column;
    const float* keys = &s.keys[0][0] + first * kDim + d;
#pragma unroll 2
    for (int m = 0; m < kBlock; ++m) {
      float n[kWide], k[kTall];
      read(keys + m * kDim, k);
      read(rows + m * kDim, n);
#pragma unroll
      for (int a = 0; a < kTall; ++a)
#pragma unroll
        for (int v = 0; v < kWide; ++v) sum[a][v] = fused(k[a], n[v], sum[a][v]);
    }
  }
#pragma unroll
  for (int a = 0; a < kTall; ++a) write(state + a * kDim, sum[a]);
  // The producer's copies read it next.
  asm volatile("fence.proxy.async;" ::: "memory");
  sync_consumers();
  if (h.thread == 0) barrier_arrive(&s.closed);
  for (int first = 0; first < kRows; first += kBlock, ++piece)
    if (h.low) release(s, piece);
}

}  // namespace rlk::cuda::kda::step
