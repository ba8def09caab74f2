// The portable GPU kernels of rms_norm (arithmetic rms32): the bits of the native backend on every GPU.
//
// rows         32 lanes a row, four rows a block; lane l has the lanes l, l + 32, .. of the sum's 1024, so the first five folds
//              are its own and the last five are shuffles. A row is read twice, the second time from cache
// shares       one thread a channel and block of 128 rows, one fp32 chain: what the block adds to d_weight
// d_weight     one thread a channel adds the shares ascending in fp64
#pragma once

#include "arithmetic/rms_norm/norm.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::rms_norm {

using namespace rlk::rms32;
using rows::RowOf;

inline constexpr int kThreads = 128;
inline constexpr int kRowLanes = 32;
inline constexpr int kFolds = 5;  // of a lane's 32 sums
inline constexpr int kRows = kThreads / kRowLanes;

// rms32 of a row: next(i, sum) adds element i to the sum of its lane. Every lane of the row gets the result. The 32 sums of
// a lane are taken in bit-reversed order, so that the two halves of every fold come one after the other: five registers hold
// what waits for its partner, and the code is that of one sum.
template <class Next>
__device__ __forceinline__ float row_sum(int lane, std::int64_t width, Next next) {
  float waiting[kFolds] = {}, total = 0;
  for (unsigned t = 0; t < kRowLanes; ++t) {
    const unsigned q = (t & 1) << 4 | (t & 2) << 2 | (t & 4) | (t & 8) >> 2 | (t & 16) >> 4;
    float sum = 0;
    for (std::int64_t i = q * kRowLanes + lane; i < width; i += kLanes) sum = next(i, sum);
    bool waits = false;
#pragma unroll
    for (int fold = 0; fold < kFolds; ++fold) {
      if (!waits && (t >> fold & 1) != 0) {
        sum = add_rn(waiting[fold], sum);
      } else if (!waits) {
        waiting[fold] = sum;
        waits = true;
      }
    }
    total = sum;
  }
#pragma unroll
  for (int h = kRowLanes / 2; h > 0; h /= 2) total = add_rn(total, __shfl_xor(total, h, kRowLanes));
  return total;
}

struct Place {
  int lane;
  std::int64_t row;
  bool there;  // rows past the end repeat the last one, since every lane must reach the shuffles
};
__device__ __forceinline__ Place place(const Problem& p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRows + threadIdx.x / kRowLanes;
  const bool there = row < p.axes.rows;
  return {static_cast<int>(threadIdx.x % kRowLanes), there ? row : p.axes.rows - 1, there};
}

__global__ void __launch_bounds__(kThreads) forward(Problem p) {
  const Place at = place(p);
  const RowOf x(p.axes, p.x, at.row), residual(p.axes, p.residual, at.row), gate(p.axes, p.gate, at.row),
      y(p.axes, p.y, at.row), sum(p.axes, p.sum, at.row), rstd(p.axes, p.rstd, at.row);
  const auto a = [&](std::int64_t i) {
    const float v = x.get(i);
    return residual ? rows::round_to(residual.type, v + residual.get(i)) : v;
  };
  const float squares = row_sum(at.lane, p.width, [&](std::int64_t i, float s) {
    const float v = a(i);
    return fused(v, v, s);
  });
  if (!at.there) return;
  const float r = reciprocal(squares, p.width, p.eps);
  if (rstd && at.lane == 0) rstd.set(0, r);
  for (std::int64_t i = at.lane; i < p.width; i += kRowLanes) {
    const float v = a(i);
    if (sum) sum.set(i, v);
    float out = v * r;
    if (p.early) out = rows::round_to(p.y.type, out);
    if (p.weight) out = out * p.weight_at(i);
    if (gate) out = out * activation::value(p.act, gate.get(i));
    y.set(i, out);
  }
}

// d_x and d_gate, and every row's r for the shares.
__global__ void __launch_bounds__(kThreads) backward(Problem p, float* r_of_row) {
  const Place at = place(p);
  const RowOf x(p.axes, p.x, at.row), d_y(p.axes, p.d_y, at.row), gate(p.axes, p.gate, at.row),
      rstd(p.axes, p.rstd, at.row), d_sum(p.axes, p.d_sum, at.row), d_x(p.axes, p.d_x, at.row),
      d_gate(p.axes, p.d_gate, at.row);
  const float squares = row_sum(at.lane, p.width, [&](std::int64_t i, float s) {
    const float v = x.get(i);
    return fused(v, v, s);
  });
  const float r = rstd ? rstd.get(0) : reciprocal(squares, p.width, p.eps);
  const auto g = [&](std::int64_t i) {
    float d = d_y.get(i);
    if (gate) d = d * activation::value(p.act, gate.get(i));
    return p.weight ? d * p.weight_at(i) : d;
  };
  const float dot =
      row_sum(at.lane, p.width, [&](std::int64_t i, float s) { return fused(g(i), x.get(i) * r, s); });
  if (!at.there) return;
  if (r_of_row && at.lane == 0) r_of_row[at.row] = r;
  const float mean = dot / static_cast<float>(p.width);
  for (std::int64_t i = at.lane; i < p.width; i += kRowLanes) {
    const float n = x.get(i) * r;
    if (d_gate) {
      const float through = p.weight ? n * p.weight_at(i) : n;
      d_gate.set(i, d_y.get(i) * through * activation::slope(p.act, gate.get(i)));
    }
    if (!d_x) continue;
    float d = gradient(r, n, mean, g(i));
    if (d_sum) d = d + d_sum.get(i);
    d_x.set(i, d);
  }
}

// Tiles of kThreads channels, one after another along the grid, then blocks of rows.
__device__ __forceinline__ std::int64_t tiles(const Problem& p) {
  return (p.width + kThreads - 1) / kThreads;
}

__global__ void __launch_bounds__(kThreads) shares(Problem p, const float* r_of_row, float* out) {
  const std::int64_t i = blockIdx.x % tiles(p) * kThreads + threadIdx.x, block = blockIdx.x / tiles(p);
  if (i >= p.width) return;
  const std::int64_t first = block * kBlock,
                     last = first + kBlock < p.axes.rows ? first + kBlock : p.axes.rows;
  float sum = 0;
  for (std::int64_t row = first; row < last; ++row) {
    float d = RowOf(p.axes, p.d_y, row).get(i);
    if (p.gate) d = d * activation::value(p.act, RowOf(p.axes, p.gate, row).get(i));
    sum = fused(d, RowOf(p.axes, p.x, row).get(i) * r_of_row[row], sum);
  }
  out[block * p.width + i] = sum;
}

__global__ void __launch_bounds__(kThreads) d_weight(Problem p, const float* shares) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.width) return;
  double sum = 0;
  for (std::int64_t block = 0; block < p.blocks(); ++block)
    sum += static_cast<double>(shares[block * p.width + i]);
  rows::store(p.d_weight_type, p.d_weight, i, sum);
}

inline dim3 grid(std::int64_t n) { return dim3(static_cast<unsigned>(n)); }
inline std::int64_t over(std::int64_t n, int by) { return (n + by - 1) / by; }

inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows == 0) return;
  hipLaunchKernelGGL(forward, grid(over(p.axes.rows, kRows)), dim3(kThreads), 0, stream, p);
}

// r of every row, then the shares of the blocks.
inline std::int64_t backward_bytes(const Problem& p) {
  return p.d_weight ? (p.axes.rows + p.blocks() * p.width) * std::int64_t{sizeof(float)} : 0;
}
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream) {
  float* r = p.d_weight ? static_cast<float*>(workspace) : nullptr;
  float* kept = p.d_weight ? r + p.axes.rows : nullptr;
  if (p.axes.rows > 0)
    hipLaunchKernelGGL(backward, grid(over(p.axes.rows, kRows)), dim3(kThreads), 0, stream, p, r);
  if (!p.d_weight) return;
  const std::int64_t across = over(p.width, kThreads);
  if (p.axes.rows > 0)
    hipLaunchKernelGGL(shares, grid(across * p.blocks()), dim3(kThreads), 0, stream, p, r, kept);
  hipLaunchKernelGGL(d_weight, grid(across), dim3(kThreads), 0, stream, p, kept);
}

}  // namespace rlk::simt::rms_norm
