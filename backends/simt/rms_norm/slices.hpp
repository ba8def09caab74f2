// d_weight of rms_norm from rows of whole packs (bf16, on 16 bytes, no gate, no residual) and their reciprocals.
//
// A block has 64 channels of the 128 rows of a share. It asks for all that it needs at once, so that memory's latency is paid
// once and not in every few rows; then a thread goes through the chains of two channels. The last rows come first: they are
// still in the cache. The block that is the last of its channels adds their shares.
#pragma once

#include "simt/async.hpp"
#include "simt/join.hpp"
#include "simt/rms_norm/share.hpp"

namespace rlk::simt::rms_norm {

inline constexpr int kSliceThreads = 256, kSlice = 64, kSlicePacks = kSlice / kPack;
RLK_HD std::int64_t slices(const Problem& p) { return (p.width + kSlice - 1) / kSlice; }

// Zeros for the counters of `slices` in a launch before theirs.
__device__ __forceinline__ void clear_counters(const Problem& p, unsigned* counters) {
  if (!counters || blockIdx.x != 0) return;
  for (std::int64_t i = threadIdx.x; i < slices(p); i += kThreads) counters[i] = 0;
}

template <bool Strided>  // of rows that have one stride
__global__ void __launch_bounds__(kSliceThreads, 4)
    slice_shares(Problem p, const float* r_of_row, float* shares, unsigned* counters) {
  __shared__ ShareRows<kSlicePacks> slice;
  const int thread = static_cast<int>(threadIdx.x);
  const auto across = static_cast<unsigned>(slices(p)), which = blockIdx.x % across;
  const std::int64_t first = std::int64_t{which} * kSlice, block = p.blocks() - 1 - blockIdx.x / across;
  const std::int64_t start = block * kBlock;
  const int count = static_cast<int>(p.axes.rows - start < kBlock ? p.axes.rows - start : kBlock);
  const int pack = thread % kSlicePacks;
  const auto from = [&](const rows::Tensor& t, int row) {
    const std::int64_t offset = Strided ? (start + row) * t.stride[0] : t.offset(p.axes, start + row);
    return reinterpret_cast<const rows::Bytes16*>(static_cast<const std::uint16_t*>(t.data) + offset +
                                                  first) +
           pack;
  };
#pragma unroll
  for (int k = 0; k < kBlock * kSlicePacks / kSliceThreads; ++k) {
    const int row = thread / kSlicePacks + k * (kSliceThreads / kSlicePacks);
    if (row >= count || first + pack * kPack >= p.width) continue;
    send(&slice.x[row][pack], from(p.x, row));
    send(&slice.d_y[row][pack], from(p.d_y, row));
  }
  if (thread < count) slice.r[thread] = r_of_row[start + thread];
  arrived();
  __syncthreads();
  if (const std::int64_t i = first + 2 * thread; thread < kSlice / 2 && i < p.width) {
    float low = 0, high = 0;
    slice.chain(thread, count, low, high);
    leave_share(p, shares, block, i, low);
    leave_share(p, shares, block, i + 1, high);
  }
  const auto blocks = static_cast<unsigned>(p.blocks());
  if (blocks == 1 || !last_of(blocks, counters + which)) return;
  const std::int64_t mine = first + thread % kSlice;
  const bool there = mine < p.width;
  const double sum =
      ascending_sum<kSliceThreads, kSlice>(shares + mine, p.width, static_cast<int>(blocks), there);
  if (there && thread < kSlice) rows::store(p.d_weight_type, p.d_weight, mine, sum);
}

inline void launch_slices(const Problem& p, const float* r_of_row, float* shares, unsigned* counters,
                          hipStream_t stream) {
  const auto kernel = p.axes.count == 1 ? slice_shares<true> : slice_shares<false>;
  hipLaunchKernelGGL(kernel, dim3(static_cast<unsigned>(slices(p) * p.blocks())), dim3(kSliceThreads), 0,
                     stream, p, r_of_row, shares, counters);
}

}  // namespace rlk::simt::rms_norm
