// The portable GPU kernels of tp_sum and its gradients (arithmetic tree8): the bits of the native backend on every GPU. A block has a tile of a
// row, a thread kEach columns of it, kThreads apart.
#pragma once

#include "arithmetic/math.hpp"
#include "arithmetic/tp_sum/sum.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::tp_sum {

using rlk::tree8::Problem;
using rlk::tree8::Spread;
using rows::RowOf;

inline constexpr int kThreads = 256, kEach = 4, kTile = kThreads * kEach;

RLK_HD std::int64_t tiles(const Problem& p) { return (p.width + kTile - 1) / kTile; }

// at(t): the t-th partial sum
template <class At>
__device__ __forceinline__ float join(const Problem& p, At at) {
  if (p.count == 1) return at(0);
  if (p.count == 2) return at(0) + at(1);
  if (p.count == 4) return rlk::tree8::four(at(0), at(1), at(2), at(3));
  return rlk::tree8::eight(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

__global__ void __launch_bounds__(kThreads) sum(Problem p) {
  const auto across = static_cast<unsigned>(tiles(p));
  const std::int64_t row = blockIdx.x / across;
  const std::int64_t first = std::int64_t{blockIdx.x % across} * kTile + threadIdx.x;
  const float* partials[rlk::tree8::kMost];
  RLK_UNROLL(8)
  for (int t = 0; t < rlk::tree8::kMost; ++t)
    partials[t] = t < p.count ? static_cast<const float*>(p.partials[t].row(p.axes, row)) : nullptr;
  const RowOf residual(p.axes, p.residual, row);
  RowOf y(p.axes, p.y, row);
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t i = first + k * kThreads;
    if (i >= p.width) break;
    float x = join(p, [&](int t) { return partials[t][i]; });
    if (p.bias != nullptr) x = rows::round_to(p.y.type, x) + rows::load(p.bias_type, p.bias, i);
    if (residual) x = rows::round_to(p.y.type, x) + residual.get(i);
    y.set(i, x);
  }
}

inline void launch(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width > 0)
    hipLaunchKernelGGL(sum, dim3(static_cast<unsigned>(p.axes.rows * tiles(p))), dim3(kThreads), 0, stream,
                       p);
}

// The gradients of a row of every partial sum, and of the residual.
__global__ void __launch_bounds__(kThreads) spread(Spread p) {
  const auto across = static_cast<unsigned>((p.width + kTile - 1) / kTile);
  const std::int64_t row = blockIdx.x / across;
  const std::int64_t first = std::int64_t{blockIdx.x % across} * kTile + threadIdx.x;
  const bool summed = p.summed(row);
  const void* d_y = summed ? rlk::tree8::line(p.d_y, row - p.first) : nullptr;
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t i = first + k * kThreads;
    if (i >= p.width) break;
    const float d = summed ? rlk::rows::load(p.d_y.type, d_y, i) : 0.0f;
    RLK_UNROLL(8)
    for (int t = 0; t < rlk::tree8::kMost; ++t)
      if (t < p.results) rlk::rows::store(rlk::Float::f32, rlk::tree8::line(p.d_partials[t], row), i, d);
    if (summed && p.d_residual)
      rlk::rows::store(p.d_residual.type, rlk::tree8::line(p.d_residual, row - p.first), i, d);
  }
}

inline void launch(const Spread& p, hipStream_t stream) {
  if (p.rows * p.width > 0)
    hipLaunchKernelGGL(spread, dim3(static_cast<unsigned>(p.rows * ((p.width + kTile - 1) / kTile))),
                       dim3(kThreads), 0, stream, p);
}

}  // namespace rlk::simt::tp_sum
