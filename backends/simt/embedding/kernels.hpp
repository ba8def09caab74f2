// The portable GPU kernels of embedding (arithmetic embed32): the bits of the native backend on every GPU.
//
// Forward: a block has a tile of a token's row, a thread some packs of it. Backward, in backward.hpp: tokens are sorted by row
// (order.hpp), then one kernel writes all of d_weight.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "simt/embedding/backward.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::embedding {

inline constexpr int kThreads = 128, kEach = 4, kTile = kThreads * kPack;

// A block's part of a row: its number, and the first column of this thread.
struct Place {
  std::int64_t row, column;
  __device__ __forceinline__ Place(std::int64_t width, int tile) {
    const auto across = static_cast<unsigned>(over(width, tile));
    row = blockIdx.x / across, column = std::int64_t{blockIdx.x % across} * tile + threadIdx.x * kPack;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) gather(Problem p) {
  const Place at(p.width, kEach * kTile);
  const rows::Type type = p.weight.type;
  const std::int64_t row = p.row(at.row);
  const void* from = row < 0 ? nullptr : p.weight.row(row);
  void* to = p.tokens.row(p.axes, at.row);
  rows::Raw<T> packs[kEach];
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const std::int64_t i = at.column + c * kTile;
    packs[c] = rows::fetch_pack<T>(type, from, i, row < 0 ? 0 : rows::pack_at(i, p.width));
  }
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const std::int64_t i = at.column + c * kTile;
    const int n = rows::pack_at(i, p.width);
    if (n == 0) continue;
    if (p.scale == 1 || row < 0) {
      rows::put_raw_pack<T>(type, to, i, n, packs[c]);
    } else {
      float v[kPack];
      rows::unpack<T>(type, packs[c], v);
#pragma unroll
      for (int k = 0; k < kPack; ++k) v[k] = v[k] * p.scale;
      rows::put_pack<T>(type, to, i, n, v);
    }
  }
}

// One block.
__global__ void __launch_bounds__(kThreads) count_bad(Problem p) {
  int* counts = dynamic_shared<int>();
  int mine = 0;
  for (std::int64_t t = threadIdx.x; t < p.axes.rows; t += kThreads) mine += p.bad(t);
  counts[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) mine += counts[i];
  *p.bad_count = mine;
}

inline dim3 grid(std::int64_t n) { return dim3(static_cast<unsigned>(n)); }

inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width > 0)
    rows::for_type(p.weight.type == rows::Type::bf16, [&]<class T>(T) {
      hipLaunchKernelGGL((gather<T>), grid(p.axes.rows * over(p.width, kEach * kTile)), dim3(kThreads), 0,
                         stream, p);
    });
  if (p.bad_count) hipLaunchKernelGGL(count_bad, dim3(1), dim3(kThreads), kThreads * sizeof(int), stream, p);
}

}  // namespace rlk::simt::embedding
