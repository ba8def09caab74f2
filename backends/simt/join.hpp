// The last step of a sum over rows on GPUs: the shares of blocks of rows, added ascending in fp64.
//
// One chain of additions a channel is long work for few threads. Where no addition rounds, every order gives the chain's bits: all
// shares are multiples of the last place of the smallest one, so are all sums of them, and fp64 holds such a sum exactly while the
// magnitudes add up to less than 2^53 of these places. So a block's threads add a channel's shares side by side, their magnitudes
// too, and keep the smallest; only where that says that an addition may round does one of them go through the chain.
#pragma once

#include "simt/simt.hpp"

namespace rlk::simt {

// Neighbouring channels of a block.
inline constexpr int kJoinChannels = 8;

// What is known of some shares of a channel.
struct ShareSum {
  double sum, size;     // of them and of their magnitudes
  std::uint32_t least;  // bits of the smallest magnitude that is not zero
  __device__ __forceinline__ void add(float share) {
    const std::uint32_t bits = float_bits(share) & 0x7fffffffu;
    sum += static_cast<double>(share), size += static_cast<double>(bits_float(bits));
    least = bits != 0 && bits < least ? bits : least;
  }
  __device__ __forceinline__ void add(const ShareSum& other) {
    sum += other.sum, size += other.size;
    least = other.least < least ? other.least : least;
  }
  // Whether every order of additions has this sum; never where a share is infinite or NaN.
  __device__ __forceinline__ bool exact() const {
    if (least == ~0u) return size == 0;
    const std::uint32_t exponent =
        least >> 23;  // subnormal numbers have the last place of the smallest normal ones
    const float power = bits_float((exponent > 0 ? exponent : 1u) << 23);
    return size < static_cast<double>(power) * 0x1p30;  // 2^53 last places, of which 2^23 are the power
  }
};

// The sum of shares at `first`, `first` + step, .. `blocks` of them, for the threads of a block that begin a channel: thread %
// Channels is the channel, and thread / Channels == 0 gets the sum. `there`: the channel exists.
template <int Threads, int Channels = kJoinChannels>
__device__ __forceinline__ double ascending_sum(const float* first, std::int64_t step, int blocks,
                                                bool there) {
  constexpr int kRows = Threads / Channels, kAhead = 16;
  __shared__ ShareSum parts[kRows][Channels];
  const int thread = static_cast<int>(threadIdx.x), row = thread / Channels, channel = thread % Channels;
  ShareSum mine{0, 0, ~0u};
  for (int block = row; there && block < blocks; block += kRows * kAhead) {
    float share[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      share[k] = block + k * kRows < blocks ? first[(block + k * kRows) * step] : 0.0f;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) mine.add(share[k]);
  }
  parts[row][channel] = mine;
  for (int some = kRows / 2; some > 0; some /= 2) {
    __syncthreads();
    if (row < some) parts[row][channel].add(parts[row + some][channel]);
  }
  if (row != 0 || !there) return 0;
  mine = parts[0][channel];
  if (mine.exact()) return mine.sum;
  double sum = 0;
  for (int block = 0; block < blocks; block += kAhead) {
    float share[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) share[k] = block + k < blocks ? first[(block + k) * step] : 0.0f;
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (block + k < blocks) sum += static_cast<double>(share[k]);
  }
  return sum;
}

// Whether this block is the last of `blocks` that come to a counter, which was zero: then it sees what all of them wrote before.
__device__ __forceinline__ bool last_of(unsigned blocks, unsigned* counter) {
  __shared__ unsigned before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(counter, 1u);
  __syncthreads();
  if (before + 1 != blocks) return false;
  __threadfence();
  return true;
}

}  // namespace rlk::simt
