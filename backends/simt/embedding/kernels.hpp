// The portable GPU kernels of embedding (arithmetic embed32): the bits of the native backend on every GPU.
//
// Forward: a block has a tile of a token's row, a thread some packs of it. Backward, without atomics: 32 lanes for every token
// find the first token with its row and how many lie before it, by looking at all tokens; then its place where tokens are
// sorted by that; then the first token of each row has a block per tile of columns that adds in the order of tokens. T^2
// looks at ids, which stay in cache: cheap beside [T, H] up to some ten thousand tokens.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::embedding {

using embed32::Problem;

using rows::kPack;

inline constexpr int kThreads = 128, kEach = 4, kTile = kThreads * kPack;
inline constexpr int kLanes = 32, kTokens = kThreads / kLanes;  // of a block that looks at all tokens

RLK_HD std::int64_t over(std::int64_t n, int by) { return (n + by - 1) / by; }

// What the backward knows of the tokens; -1 is no token or no row.
struct Order {
  std::int64_t* row;
  std::int32_t *head, *before, *count, *first, *sorted;
  static constexpr std::int64_t kBytes = sizeof(std::int64_t) + 5 * sizeof(std::int32_t);  // of a token
  RLK_HD Order(void* workspace, std::int64_t tokens)
      : row(static_cast<std::int64_t*>(workspace)),
        head(reinterpret_cast<std::int32_t*>(row + tokens)),
        before(head + tokens),
        count(before + tokens),
        first(count + tokens),
        sorted(first + tokens) {}
};

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

__global__ void __launch_bounds__(kThreads) find_rows(Problem p, Order order) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t < p.axes.rows) order.row[t] = p.gradient_row(t);
}

__device__ __forceinline__ std::int32_t lanes_sum(std::int32_t x) {
  for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor(x, step, kLanes);
  return x;
}
// The token of this thread's 32 lanes; the last one again behind it, since every lane must reach the shuffles.
__device__ __forceinline__ std::int32_t token_of_lanes(std::int32_t tokens) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kTokens + threadIdx.x / kLanes;
  return t < tokens ? static_cast<std::int32_t>(t) : tokens - 1;
}

__global__ void __launch_bounds__(kThreads) find_heads(Order order, std::int32_t tokens) {
  const std::int32_t t = token_of_lanes(tokens), lane = static_cast<std::int32_t>(threadIdx.x) % kLanes;
  const std::int64_t row = order.row[t];
  std::int32_t head = t, before = 0, behind = 0;
#pragma unroll 8
  for (std::int32_t s = lane; s < t; s += kLanes)
    if (order.row[s] == row) {
      head = s < head ? s : head;
      ++before;
    }
#pragma unroll 8
  for (std::int32_t s = t + 1 + lane; s < tokens; s += kLanes) behind += order.row[s] == row ? 1 : 0;
  for (int step = 1; step < kLanes; step *= 2) {
    const std::int32_t other = __shfl_xor(head, step, kLanes);
    head = other < head ? other : head;
  }
  before = lanes_sum(before), behind = lanes_sum(behind);
  if (lane == 0) order.head[t] = head, order.before[t] = before, order.count[t] = before + 1 + behind;
}

__global__ void __launch_bounds__(kThreads) sort(Order order, std::int32_t tokens) {
  const std::int32_t t = token_of_lanes(tokens), lane = static_cast<std::int32_t>(threadIdx.x) % kLanes;
  const std::int32_t head = order.head[t];
  std::int32_t first = 0;
#pragma unroll 8
  for (std::int32_t s = lane; s < tokens; s += kLanes) first += order.head[s] < head ? 1 : 0;
  first = lanes_sum(first);
  if (lane != 0) return;
  order.first[t] = first;
  order.sorted[first + order.before[t]] = t;
}

// What d_weight is added to, which only kernels of any type know; +0.
template <class T>
__device__ __forceinline__ rows::Raw<T> before_of(const Problem& p, std::int64_t row, std::int64_t i, int n) {
  if constexpr (__is_same(T, rows::Any))
    if (p.before.data) return rows::fetch_pack<T>(p.before.type, p.before.row(row), i, n);
  return rows::Raw<T>{};
}

// What rows without tokens have.
template <class T>
__global__ void __launch_bounds__(kThreads) clear(Problem p) {
  const Place at(p.width, kEach * kTile);
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const std::int64_t i = at.column + c * kTile;
    if (const int n = rows::pack_at(i, p.width); n > 0)
      rows::put_raw_pack<T>(p.weight.type, p.weight.row(at.row), i, n, before_of<T>(p, at.row, i, n));
  }
}

// The block of a token that is the first of its row.
inline constexpr int kAhead = 8;  // tokens that are read before they are added
template <class T>
__global__ void __launch_bounds__(kThreads) add(Problem p, Order order) {
  const Place at(p.width, kTile);
  const std::int64_t t = at.row, row = order.row[t];
  const int n = rows::pack_at(at.column, p.width);
  if (row < 0 || order.head[t] != t || n == 0) return;
  const std::int32_t* sorted = order.sorted + order.first[t];
  const std::int32_t count = order.count[t];
  float sum[kPack] = {};
  for (std::int32_t first = 0; first < count; first += kAhead) {
    rows::Raw<T> packs[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (first + a < count)
        packs[a] = rows::fetch_pack<T>(p.tokens.type, p.tokens.row(p.axes, sorted[first + a]), at.column, n);
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (first + a < count) {
        float v[kPack];
        rows::unpack<T>(p.tokens.type, packs[a], v);
#pragma unroll
        for (int k = 0; k < kPack; ++k) sum[k] = sum[k] + v[k];
      }
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k) sum[k] = sum[k] * p.scale;
  if (p.before.data) {
    float v[kPack];
    rows::unpack<T>(p.before.type, before_of<T>(p, row, at.column, n), v);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum[k] = sum[k] + v[k];
  }
  rows::put_pack<T>(p.weight.type, p.weight.row(row), at.column, n, sum);
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

inline std::int64_t backward_bytes(std::int64_t tokens) { return (Order::kBytes * tokens + 7) / 8 * 8; }
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream) {
  if (p.vocab * p.width == 0) return;
  const auto tokens = static_cast<std::int32_t>(p.axes.rows);
  const dim3 threads(kThreads);
  const Order order(workspace, tokens);
  rows::for_type(p.weight.type == rows::Type::bf16 && p.tokens.type == rows::Type::bf16, [&]<class T>(T) {
    if (p.before.data != p.weight.data)
      hipLaunchKernelGGL((clear<T>), grid(p.vocab * over(p.width, kEach * kTile)), threads, 0, stream, p);
    if (tokens == 0) return;
    hipLaunchKernelGGL(find_rows, grid(over(tokens, kThreads)), threads, 0, stream, p, order);
    hipLaunchKernelGGL(find_heads, grid(over(tokens, kTokens)), threads, 0, stream, order, tokens);
    hipLaunchKernelGGL(sort, grid(over(tokens, kTokens)), threads, 0, stream, order, tokens);
    hipLaunchKernelGGL((add<T>), grid(tokens * over(p.width, kTile)), threads, 0, stream, p, order);
  });
}

}  // namespace rlk::simt::embedding
