// The last step of a sum over rows on GPUs: the shares of blocks of rows, added ascending in fp64.
//
// One chain of additions a channel is long work for few threads. So a block's threads add a channel's shares side by side, their
// magnitudes too, and keep the smallest; only where these leave a doubt does one of them go through the chain.
//
// Where no addition rounds, every order gives the chain's bits: all shares are multiples of the last place of the smallest one, so
// are all sums of them, and fp64 holds such a sum exactly while the magnitudes add up to less than 2^53 of these places. And where
// additions round, orders differ by less than a bound, so that the chain's sum is stored as the same number unless a border of
// fp32's rounding lies that close.
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
  // Whether every order of so many additions has a sum that is stored as this one in any dtype: no number of fp32, and no middle of
  // two, lies between them. An addition rounds by up to 2^-53 of its sum, so two orders differ by 2^-52 of `size` a share.
  __device__ __forceinline__ bool stored_alike(int shares) const {
    const double reach = size * (shares * 0x1p-51), low = sum - reach, high = sum + reach;
    const auto single = static_cast<float>(low);
    return float_bits(single) == float_bits(static_cast<float>(high)) &&
           (static_cast<double>(single) < low || static_cast<double>(single) > high);
  }
};

// The sum of shares at `first`, `first` + step, .. `blocks` of them, for the threads of a block that begin a channel: thread %
// Channels is the channel, and thread / Channels == 0 gets the sum, or one that is stored as it is. `there`: the channel exists.
template <int Threads, int Channels = kJoinChannels>
__device__ __forceinline__ double ascending_sum(const float* first, std::int64_t step, int blocks,
                                                bool there) {
  constexpr int kRows = Threads / Channels, kAhead = 16, kStaged = 4;
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
  __shared__ bool doubts[Channels];
  if (row == 0)
    doubts[channel] = there && !parts[0][channel].exact() && !parts[0][channel].stored_alike(blocks);
  __syncthreads();
  bool doubt = false;
  for (int c = 0; c < Channels; ++c) doubt = doubt || doubts[c];
  if (!doubt) return parts[0][channel].sum;
  // The chain, of shares that all threads have brought.
  __shared__ float staged[kStaged * kRows][Channels];
  double sum = 0;
#pragma unroll 1
  for (int from = 0; from < blocks; from += kStaged * kRows) {
#pragma unroll
    for (int k = row; k < kStaged * kRows; k += kRows)
      staged[k][channel] = there && from + k < blocks ? first[(from + k) * step] : 0.0f;
    __syncthreads();
    const int count = blocks - from < kStaged * kRows ? blocks - from : kStaged * kRows;
    for (int k = 0; row == 0 && k < count; ++k) sum += static_cast<double>(staged[k][channel]);
    __syncthreads();
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
