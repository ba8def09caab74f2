// Tokens in the order in which the gradient of embedding adds them: sorted by row, those of a row as they come. The result has one
// form, so it depends on no scheduling: integers are counted by atomics, but every token's place follows from its row and number.
//
// Few tokens: one launch in which every token counts those before it, T^2 looks at keys in shared memory. Many: a radix sort from
// the lowest digit on. A block has a chunk of neighbours; it counts digits (the next digit's are counted while this one is placed),
// and finds where each of its digits begins by adding up the counts of all chunks. 64 chunks at most, so that this stays linear.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::embedding {

using embed32::Problem;

inline constexpr int kBlock = 256;  // threads of the backward's blocks
inline constexpr int kMostBits = 10, kMostDigits = 1 << kMostBits, kMostChunks = 64;
inline constexpr std::uint32_t kFew = 4096;

RLK_HD std::int64_t over(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// A token's key is its row of d_weight, or `vocab` for those that have none.
struct Sorted {
  std::uint32_t* keys = nullptr;
  std::int32_t* tokens = nullptr;
  std::uint32_t count = 0;  // less than 2^31, so that places behind the last have numbers too

  // Whether a place is there and has this key.
  __device__ __forceinline__ bool has(std::uint32_t at, std::uint32_t key) const {
    return at < count && keys[at] == key;
  }
};

// The workspace, and how a sort of many tokens is cut. Each pass reads one side and writes the other.
struct Order {
  Sorted side[2];
  std::uint32_t* counts = nullptr;  // of every pass, chunk and digit
  int bits, passes, chunk, chunks;

  Order(std::int64_t tokens, std::int64_t vocab) {
    int wide = 1;
    while (vocab >> wide > 0) ++wide;
    passes = (wide + kMostBits - 1) / kMostBits, bits = (wide + passes - 1) / passes;
    chunk = static_cast<int>(over(tokens, kMostChunks * kBlock)) * kBlock;
    chunks = chunk == 0 ? 0 : static_cast<int>(over(tokens, chunk));
    for (Sorted& s : side) s.count = static_cast<std::uint32_t>(tokens);
  }
  // Of bytes() bytes.
  Order& in(void* workspace) {
    auto* words = static_cast<std::uint32_t*>(workspace);
    const std::size_t tokens = side[0].count;
    for (Sorted& s : side) {
      s.keys = words, s.tokens = reinterpret_cast<std::int32_t*>(words + tokens);
      words += 2 * tokens;
    }
    counts = words;
    return *this;
  }
  std::int64_t bytes() const {
    const std::int64_t of_counts = std::int64_t{passes} * chunks << bits;
    return (4 * std::int64_t{side[0].count} + of_counts) * std::int64_t{sizeof(std::uint32_t)};
  }

  RLK_HD int digits() const { return 1 << bits; }
  RLK_HD int digit(std::uint32_t key, int pass) const {
    return static_cast<int>(key >> pass * bits) & (digits() - 1);
  }
  RLK_HD std::uint32_t* counts_of(int pass, int part) const {
    return counts + ((std::int64_t{pass} * chunks + part) << bits);
  }
};

__device__ __forceinline__ std::uint32_t key_of(const Problem& p, std::int64_t token) {
  const std::int64_t row = p.gradient_row(token);
  return static_cast<std::uint32_t>(row < 0 ? p.vocab : row);
}

// ---- few tokens

inline constexpr int kLanes = 8, kTokens = kBlock / kLanes;  // lanes of a token, tokens of a block
__global__ void __launch_bounds__(kBlock) rank_all(Problem p, Sorted sorted) {
  auto* keys = dynamic_shared<std::uint32_t>();
  const std::int32_t count = static_cast<std::int32_t>(sorted.count),
                     thread = static_cast<std::int32_t>(threadIdx.x);
#pragma unroll 4
  for (std::int32_t s = thread; s < count; s += kBlock) keys[s] = key_of(p, s);
  __syncthreads();
  // The last token again behind it, since every lane must reach the shuffles.
  std::int32_t t = static_cast<std::int32_t>(blockIdx.x) * kTokens + thread / kLanes, before = 0;
  t = t < count ? t : count - 1;
  const std::int32_t lane = thread % kLanes;
  const std::uint32_t key = keys[t];
#pragma unroll 8
  for (std::int32_t s = lane; s < t; s += kLanes) before += keys[s] <= key ? 1 : 0;
#pragma unroll 8
  for (std::int32_t s = t + 1 + lane; s < count; s += kLanes) before += keys[s] < key ? 1 : 0;
  for (int step = 1; step < kLanes; step *= 2) before += __shfl_xor(before, step, kLanes);
  if (lane == 0) sorted.keys[before] = key, sorted.tokens[before] = t;
}

// ---- many tokens

// The keys, and the first digits of every chunk; the counts of later digits start at 0.
__global__ void __launch_bounds__(kBlock) count_digits(Problem p, Order order) {
  __shared__ std::uint32_t counts[kMostDigits];
  const int thread = static_cast<int>(threadIdx.x), part = static_cast<int>(blockIdx.x);
  for (int d = thread; d < order.digits(); d += kBlock) {
    counts[d] = 0;
    for (int pass = 1; pass < order.passes; ++pass) order.counts_of(pass, part)[d] = 0;
  }
  __syncthreads();
  const std::uint32_t first = blockIdx.x * static_cast<unsigned>(order.chunk) + threadIdx.x;
#pragma unroll 2
  for (int i = 0; i < order.chunk; i += kBlock)
    if (first + i < order.side[0].count) {
      const std::uint32_t key = key_of(p, first + i);
      order.side[0].keys[first + i] = key;
      atomicAdd(&counts[order.digit(key, 0)], 1u);
    }
  __syncthreads();
  for (int d = thread; d < order.digits(); d += kBlock) order.counts_of(0, part)[d] = counts[d];
}

// The sum over the threads of this block before this one.
__device__ __forceinline__ std::uint32_t sum_before(std::uint32_t mine) {
  __shared__ std::uint32_t sums[kBlock];
  const int thread = static_cast<int>(threadIdx.x);
  std::uint32_t sum = mine;
  sums[thread] = sum;
  for (int step = 1; step < kBlock; step *= 2) {
    __syncthreads();
    const std::uint32_t other = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] = sum += other;
  }
  return sum - mine;
}

// Where each digit of this block's chunk begins: behind all smaller digits, and behind the same one of the chunks before.
__device__ __forceinline__ void find_begins(const Order& order, int pass, std::uint32_t* begins) {
  constexpr int kEach = kMostDigits / kBlock;
  const int each = (order.digits() + kBlock - 1) / kBlock, first = static_cast<int>(threadIdx.x) * each;
  std::uint32_t before[kEach] = {}, all[kEach] = {}, sum = 0;
#pragma unroll 8
  for (int part = 0; part < order.chunks; ++part) {
    const std::uint32_t* counts = order.counts_of(pass, part);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const std::uint32_t n = e < each && first + e < order.digits() ? counts[first + e] : 0;
      all[e] += n, before[e] += part < static_cast<int>(blockIdx.x) ? n : 0;
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) sum += all[e];
  sum = sum_before(sum);
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e < each && first + e < order.digits()) begins[first + e] = sum + before[e];
    sum += all[e];
  }
}

// A thread takes a token a round, and finds its place among the equal digits of its round by looking at those before it.
__global__ void __launch_bounds__(kBlock) place(Order order, Sorted from, Sorted to, int pass) {
  __shared__ std::uint32_t begins[kMostDigits];
  __shared__ int digits[kBlock];
  find_begins(order, pass, begins);
  const int thread = static_cast<int>(threadIdx.x);
  std::uint32_t t = blockIdx.x * static_cast<unsigned>(order.chunk) + threadIdx.x;
  for (int i = 0; i < order.chunk; i += kBlock, t += kBlock) {
    const bool there = t < from.count;
    const std::uint32_t key = there ? from.keys[t] : 0;
    const int digit = there ? order.digit(key, pass) : -1;
    digits[thread] = digit;
    __syncthreads();
    std::uint32_t before = 0;
#pragma unroll 8
    for (int s = 0; s < thread; ++s) before += digits[s] == digit ? 1u : 0u;
    const std::uint32_t at = there ? begins[digit] + before : 0;
    __syncthreads();
    if (!there) continue;
    atomicAdd(&begins[digit], 1u);
    to.keys[at] = key, to.tokens[at] = pass == 0 ? static_cast<std::int32_t>(t) : from.tokens[t];
    if (pass + 1 < order.passes)
      atomicAdd(order.counts_of(pass + 1, static_cast<int>(at) / order.chunk) + order.digit(key, pass + 1),
                1u);
  }
}

// Launches what sorts; where the result will be.
inline Sorted launch_sort(const Problem& p, const Order& order, std::uint32_t few, hipStream_t stream) {
  const std::uint32_t tokens = order.side[0].count;
  const dim3 threads(kBlock), chunks(static_cast<unsigned>(order.chunks));
  if (tokens == 0) return order.side[0];
  if (tokens <= few) {
    hipLaunchKernelGGL(rank_all, dim3(static_cast<unsigned>(over(tokens, kTokens))), threads,
                       std::size_t{tokens} * sizeof(std::uint32_t), stream, p, order.side[0]);
    return order.side[0];
  }
  hipLaunchKernelGGL(count_digits, chunks, threads, 0, stream, p, order);
  for (int pass = 0; pass < order.passes; ++pass)
    hipLaunchKernelGGL(place, chunks, threads, 0, stream, order, order.side[pass % 2],
                       order.side[1 - pass % 2], pass);
  return order.side[order.passes % 2];
}

}  // namespace rlk::simt::embedding
