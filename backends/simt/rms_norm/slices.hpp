// d_weight of rms_norm from rows of whole packs (bf16, on 16 bytes, no gate, no residual) and their reciprocals.
//
// A block has 64 channels of the 128 rows of a share. It asks for all that it needs at once, so that memory's latency is paid
// once and not in every few rows; then a thread goes through the chains of two channels. The last rows come first: they are
// still in the cache. The block that is the last of its channels adds their shares.
#pragma once

#include "simt/join.hpp"
#include "simt/rms_norm/team.hpp"

namespace rlk::simt::rms_norm {

inline constexpr int kSliceThreads = 256, kSlice = 64;
RLK_HD std::int64_t slices(const Problem& p) { return (p.width + kSlice - 1) / kSlice; }

// Zeros for the counters of `slices` in a launch before theirs.
__device__ __forceinline__ void clear_counters(const Problem& p, unsigned* counters) {
  if (!counters || blockIdx.x != 0) return;
  for (std::int64_t i = threadIdx.x; i < slices(p); i += kThreads) counters[i] = 0;
}

// A slice of a share, in shared memory.
struct Slice {
  static constexpr int kPacks = kSlice / kPack, kPairs = kSlice / 2, kAhead = 16;
  rows::Bytes16 x[kBlock][kPacks], d_y[kBlock][kPacks];
  float r[kBlock];

  // The share of two channels.
  __device__ __forceinline__ void chain(int pair, int count, float& low, float& high) const {
    const auto* xs = reinterpret_cast<const std::uint32_t*>(x) + pair;
    const auto* ds = reinterpret_cast<const std::uint32_t*>(d_y) + pair;
    const auto go_on = [&](int row) {
      const std::uint32_t x2 = xs[row * kPairs], d2 = ds[row * kPairs];
      low = fused(bits_float(d2 << 16), bits_float(x2 << 16) * r[row], low);
      high = fused(bits_float(d2 & 0xffff0000u), bits_float(x2 & 0xffff0000u) * r[row], high);
    };
    int row = 0;
    for (; row + kAhead <= count; row += kAhead)
#pragma unroll
      for (int k = 0; k < kAhead; ++k) go_on(row + k);
    for (; row < count; ++row) go_on(row);
  }
};

template <bool Strided>  // of rows that have one stride
__global__ void __launch_bounds__(kSliceThreads, 4)
    slice_shares(Problem p, const float* r_of_row, float* shares, unsigned* counters) {
  __shared__ Slice slice;
  const int thread = static_cast<int>(threadIdx.x);
  const auto across = static_cast<unsigned>(slices(p)), which = blockIdx.x % across;
  const std::int64_t first = std::int64_t{which} * kSlice, block = p.blocks() - 1 - blockIdx.x / across;
  const std::int64_t start = block * kBlock;
  const int count = static_cast<int>(p.axes.rows - start < kBlock ? p.axes.rows - start : kBlock);
  const int pack = thread % Slice::kPacks;
  const auto from = [&](const rows::Tensor& t, int row) {
    const std::int64_t offset = Strided ? (start + row) * t.stride[0] : t.offset(p.axes, start + row);
    return reinterpret_cast<const rows::Bytes16*>(static_cast<const std::uint16_t*>(t.data) + offset +
                                                  first) +
           pack;
  };
#pragma unroll
  for (int k = 0; k < kBlock * Slice::kPacks / kSliceThreads; ++k) {
    const int row = thread / Slice::kPacks + k * (kSliceThreads / Slice::kPacks);
    if (row >= count || first + pack * kPack >= p.width) continue;
    send(&slice.x[row][pack], from(p.x, row));
    send(&slice.d_y[row][pack], from(p.d_y, row));
  }
  if (thread < count) slice.r[thread] = r_of_row[start + thread];
  arrived();
  __syncthreads();
  if (const std::int64_t i = first + 2 * thread; thread < Slice::kPairs && i < p.width) {
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
