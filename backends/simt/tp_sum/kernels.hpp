// The portable GPU kernel of tp_sum (arithmetic tree8): the bits of the native backend on every GPU. A block has a tile of a
// row, a thread kEach columns of it, kThreads apart.
#pragma once

#include "arithmetic/tp_sum/sum.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::tp_sum {

using rlk::tree8::Problem;
using rows::RowOf;

inline constexpr int kThreads = 256, kEach = 4, kTile = kThreads * kEach;

RLK_HD std::int64_t tiles(const Problem& p) { return (p.width + kTile - 1) / kTile; }

__device__ __forceinline__ float join(const Problem& p, const float* x) {
  const auto at = [&](int t) { return x[t * p.step]; };
  if (p.count == 1) return at(0);
  if (p.count == 2) return at(0) + at(1);
  if (p.count == 4) return rlk::tree8::four(at(0), at(1), at(2), at(3));
  return rlk::tree8::eight(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

__global__ void __launch_bounds__(kThreads) sum(Problem p) {
  const auto across = static_cast<unsigned>(tiles(p));
  const std::int64_t row = blockIdx.x / across;
  const std::int64_t first = std::int64_t{blockIdx.x % across} * kTile + threadIdx.x;
  const auto* partials = static_cast<const float*>(p.partials.row(p.axes, row));
  const RowOf residual(p.axes, p.residual, row);
  RowOf y(p.axes, p.y, row);
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t i = first + k * kThreads;
    if (i >= p.width) break;
    float x = join(p, partials + i);
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

}  // namespace rlk::simt::tp_sum
