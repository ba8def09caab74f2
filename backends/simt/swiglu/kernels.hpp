// The portable GPU kernels of swiglu (arithmetic act32): the bits of the native backend on every GPU. A block has a tile of
// a row, a thread kEach columns of it, kThreads apart.
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::swiglu {

using act32::Problem;
using rows::RowOf;

inline constexpr int kThreads = 256, kEach = 4, kTile = kThreads * kEach;

RLK_HD std::int64_t tiles(const Problem& p) { return (p.width + kTile - 1) / kTile; }

// body(row, column) for the columns of this thread.
template <class Body>
__device__ __forceinline__ void for_columns(const Problem& p, Body body) {
  const auto across = static_cast<unsigned>(tiles(p));
  const std::int64_t row = blockIdx.x / across;
  const std::int64_t first = std::int64_t{blockIdx.x % across} * kTile + threadIdx.x;
  for (int k = 0; k < kEach; ++k)
    if (const std::int64_t i = first + k * kThreads; i < p.width) body(row, i);
}

// act(gate) as the product takes it.
__device__ __forceinline__ float activate(const Problem& p, float gate) {
  const float x = act32::activated(p, gate);
  return p.twice ? rows::round_to(p.gate.type, x) : x;
}

__global__ void __launch_bounds__(kThreads) forward(Problem p) {
  for_columns(p, [&](std::int64_t row, std::int64_t i) {
    const float gate = RowOf(p.axes, p.gate, row).get(i), up = RowOf(p.axes, p.up, row).get(i);
    RowOf(p.axes, p.out, row).set(i, activate(p, gate) * act32::held_up(p, up));
  });
}

__global__ void __launch_bounds__(kThreads) backward(Problem p) {
  for_columns(p, [&](std::int64_t row, std::int64_t i) {
    const float gate = RowOf(p.axes, p.gate, row).get(i), up = RowOf(p.axes, p.up, row).get(i),
                d = RowOf(p.axes, p.d_out, row).get(i);
    if (p.d_gate) RowOf(p.axes, p.d_gate, row).set(i, act32::d_gate(p, d, gate, up));
    if (p.d_up) RowOf(p.axes, p.d_up, row).set(i, act32::d_up(p, d, activate(p, gate), up));
  });
}

inline dim3 grid(const Problem& p) { return dim3(static_cast<unsigned>(p.axes.rows * tiles(p))); }

inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width > 0) hipLaunchKernelGGL(forward, grid(p), dim3(kThreads), 0, stream, p);
}
inline void launch_backward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width > 0) hipLaunchKernelGGL(backward, grid(p), dim3(kThreads), 0, stream, p);
}

}  // namespace rlk::simt::swiglu
