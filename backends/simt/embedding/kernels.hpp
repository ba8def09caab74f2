// The portable GPU kernels of embedding (arithmetic embed32): the bits of the native backend on every GPU.
//
// Forward: a block has a tile of a token's row. Backward, without atomics: every token finds the first token with its row
// and how many lie before it, by looking at all tokens; then its place where tokens are sorted by that; then the first
// token of each row has a block per tile of columns that adds in the order of tokens. T^2 looks at ids, which stay in
// cache: cheap beside [T, H] up to some ten thousand tokens.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::embedding {

using embed32::Problem;

inline constexpr int kThreads = 256;

RLK_HD std::int64_t over(std::int64_t n) { return (n + kThreads - 1) / kThreads; }

// What the backward knows of the tokens; -1 is no token or no row.
struct Order {
  std::int64_t *row, *head, *before, *count, *first, *sorted;
  static constexpr int kArrays = 6;
  RLK_HD Order(void* workspace, std::int64_t tokens)
      : row(static_cast<std::int64_t*>(workspace)),
        head(row + tokens),
        before(head + tokens),
        count(before + tokens),
        first(count + tokens),
        sorted(first + tokens) {}
};

// A block's part of a row: its number, and the column of this thread.
struct Place {
  std::int64_t row, column;
  __device__ __forceinline__ explicit Place(std::int64_t width)
      : row(blockIdx.x / over(width)), column(blockIdx.x % over(width) * kThreads + threadIdx.x) {}
};

__device__ __forceinline__ void copy(rows::Type type, const void* from, void* to, std::int64_t i) {
  if (type == rows::Type::f32)
    static_cast<std::uint32_t*>(to)[i] = static_cast<const std::uint32_t*>(from)[i];
  else
    static_cast<std::uint16_t*>(to)[i] = static_cast<const std::uint16_t*>(from)[i];
}

__global__ void __launch_bounds__(kThreads) gather(Problem p) {
  const Place at(p.width);
  if (at.column >= p.width) return;
  const rows::Type type = p.weight.type;
  void* out = p.tokens.row(p.axes, at.row);
  const std::int64_t row = p.row(at.row);
  if (row < 0)
    rows::store(type, out, at.column, 0.0f);
  else if (p.scale == 1)
    copy(type, p.weight.row(row), out, at.column);
  else
    rows::store(type, out, at.column, rows::load(type, p.weight.row(row), at.column) * p.scale);
}

__global__ void __launch_bounds__(kThreads) find_rows(Problem p, Order order) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t < p.axes.rows) order.row[t] = p.gradient_row(t);
}

__global__ void __launch_bounds__(kThreads) find_heads(Order order, std::int64_t tokens) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= tokens) return;
  const std::int64_t row = order.row[t];
  std::int64_t head = -1, before = 0, count = 0;
  for (std::int64_t s = 0; s < tokens; ++s) {
    if (order.row[s] != row) continue;
    if (head < 0) head = s;
    before += s < t ? 1 : 0;
    ++count;
  }
  order.head[t] = head, order.before[t] = before, order.count[t] = count;
}

__global__ void __launch_bounds__(kThreads) sort(Order order, std::int64_t tokens) {
  const std::int64_t t = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (t >= tokens) return;
  const std::int64_t head = order.head[t];
  std::int64_t first = 0;
  for (std::int64_t s = 0; s < tokens; ++s) first += order.head[s] < head ? 1 : 0;
  order.first[t] = first;
  order.sorted[first + order.before[t]] = t;
}

__global__ void __launch_bounds__(kThreads) clear(Problem p) {
  const Place at(p.width);
  if (at.column < p.width) rows::store(p.weight.type, p.weight.row(at.row), at.column, 0.0f);
}

// The block of a token that is the first of its row.
__global__ void __launch_bounds__(kThreads) add(Problem p, Order order) {
  const Place at(p.width);
  const std::int64_t t = at.row, row = order.row[t];
  if (row < 0 || order.head[t] != t || at.column >= p.width) return;
  const std::int64_t* sorted = order.sorted + order.first[t];
  float sum = 0;
  for (std::int64_t n = 0; n < order.count[t]; ++n)
    sum = sum + rows::load(p.tokens.type, p.tokens.row(p.axes, sorted[n]), at.column);
  rows::store(p.weight.type, p.weight.row(row), at.column, sum * p.scale);
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
    hipLaunchKernelGGL(gather, grid(p.axes.rows * over(p.width)), dim3(kThreads), 0, stream, p);
  if (p.bad_count) hipLaunchKernelGGL(count_bad, dim3(1), dim3(kThreads), kThreads * sizeof(int), stream, p);
}

inline std::int64_t backward_bytes(std::int64_t tokens) {
  return Order::kArrays * tokens * std::int64_t{sizeof(std::int64_t)};
}
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream) {
  if (p.vocab * p.width == 0) return;
  const std::int64_t tokens = p.axes.rows;
  const dim3 threads(kThreads);
  hipLaunchKernelGGL(clear, grid(p.vocab * over(p.width)), threads, 0, stream, p);
  if (tokens == 0) return;
  const Order order(workspace, tokens);
  hipLaunchKernelGGL(find_rows, grid(over(tokens)), threads, 0, stream, p, order);
  hipLaunchKernelGGL(find_heads, grid(over(tokens)), threads, 0, stream, order, tokens);
  hipLaunchKernelGGL(sort, grid(over(tokens)), threads, 0, stream, order, tokens);
  hipLaunchKernelGGL(add, grid(tokens * over(p.width)), threads, 0, stream, p, order);
}

}  // namespace rlk::simt::embedding
