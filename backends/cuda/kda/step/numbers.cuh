// kda_step on Hopper: sizes, what a block works at, and numbers between shared or global memory and registers.
#pragma once

#include "arithmetic/kda/step.hpp"
#include "simt/simt.hpp"

namespace rlk::cuda::kda::step {

using ::rlk::Float;
using ::rlk::kda::Step;
using ::rlk::kda::chunked::flushed;
using ::rlk::kda::chunked::kBlock;
using ::rlk::kda::chunked::kRows;
using ::rlk::simt::fused;
using ::rlk::simt::mul_rn;

inline constexpr int kDim = 128;             // K and V
inline constexpr int kTile = kBlock * kDim;  // 16 rows
inline constexpr int kBlocks = kRows / kBlock;

// A (sequence, value head), and the row that its token is.
struct Task {
  ::rlk::kda::chunked::OpenChunk c;
  float* state = nullptr;
  int n, hv, i = 0;

  __device__ Task(const ::rlk::kda::chunked::OpenChunk& chunk, int sequence, int head)
      : c(chunk), n(sequence), hv(head) {}
  __device__ int own() const { return i % kBlock; }   // rows of its block before it
  __device__ int first() const { return i - own(); }  // that block's first row
  __device__ int block() const { return i / kBlock; }
};

// Neighbours, aligned to as many bytes (16 at most).
template <int Count>
__device__ __forceinline__ void read(const float* from, float (&x)[Count]) {
  if constexpr (Count % 4 == 0) {
#pragma unroll
    for (int a = 0; a < Count; a += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + a);
      x[a] = v.x, x[a + 1] = v.y, x[a + 2] = v.z, x[a + 3] = v.w;
    }
  } else {
    static_assert(Count == 2);
    const float2 v = *reinterpret_cast<const float2*>(from);
    x[0] = v.x, x[1] = v.y;
  }
}
template <int Count>
__device__ __forceinline__ void write(float* to, const float (&x)[Count]) {
  if constexpr (Count % 4 == 0) {
#pragma unroll
    for (int a = 0; a < Count; a += 4)
      *reinterpret_cast<float4*>(to + a) = make_float4(x[a], x[a + 1], x[a + 2], x[a + 3]);
  } else {
    static_assert(Count == 2);
    *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
  }
}

}  // namespace rlk::cuda::kda::step
