// The portable GPU kernels of swiglu (arithmetic act32): the bits of the native backend on every GPU. A block has a tile of
// a row, a thread one pack of it.
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::swiglu {

using act32::Problem;
using rows::kPack;
using rows::RowOf;

inline constexpr int kThreads = 128, kTile = kThreads * kPack;

RLK_HD std::int64_t tiles(const Problem& p) { return (p.width + kTile - 1) / kTile; }

// The pack of this thread: a row, its first column, and how many columns there are.
struct Place {
  std::int64_t row, column;
  int n;
  __device__ __forceinline__ explicit Place(const Problem& p) {
    const auto across = static_cast<unsigned>(tiles(p));
    row = blockIdx.x / across;
    column = std::int64_t{blockIdx.x % across} * kTile + threadIdx.x * kPack;
    n = rows::pack_at(column, p.width);
  }
};

// What the arithmetic of an element asks of the call; a kernel for silu alone knows that it is.
template <bool Silu>
__device__ __forceinline__ Problem attributes(const Problem& p) {
  Problem a;
  a.act = Silu ? act32::Act::silu : p.act;
  a.limit = p.limit, a.alpha = p.alpha, a.offset = p.offset;
  return a;
}

// act(gate) as the product takes it.
template <class T>
__device__ __forceinline__ void activate(const Problem& p, const Problem& a, const float (&gate)[kPack],
                                         float (&to)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) to[k] = act32::activated(a, gate[k]);
  if (p.twice) rows::round_pack<T>(p.gate.type, to);
}

template <class T, bool Silu>
__global__ void __launch_bounds__(kThreads) forward(Problem p) {
  const Place at(p);
  if (at.n == 0) return;
  const Problem a = attributes<Silu>(p);
  const RowOf gates(p.axes, p.gate, at.row), ups(p.axes, p.up, at.row);
  const rows::Raw<T> raw_gate = gates.fetch<T>(at.column, at.n), raw_up = ups.fetch<T>(at.column, at.n);
  float gate[kPack], up[kPack], out[kPack];
  gates.unpack<T>(raw_gate, gate);
  ups.unpack<T>(raw_up, up);
  activate<T>(p, a, gate, out);
#pragma unroll
  for (int k = 0; k < kPack; ++k) out[k] = out[k] * act32::held_up(a, up[k]);
  RowOf(p.axes, p.out, at.row).set<T>(at.column, at.n, out);
}

template <class T, bool Silu>
__global__ void __launch_bounds__(kThreads) backward(Problem p) {
  const Place at(p);
  if (at.n == 0) return;
  const Problem a = attributes<Silu>(p);
  const RowOf gates(p.axes, p.gate, at.row), ups(p.axes, p.up, at.row), d_outs(p.axes, p.d_out, at.row),
      d_gates(p.axes, p.d_gate, at.row), d_ups(p.axes, p.d_up, at.row);
  const rows::Raw<T> raw_gate = gates.fetch<T>(at.column, at.n), raw_up = ups.fetch<T>(at.column, at.n),
                     raw_d = d_outs.fetch<T>(at.column, at.n);
  float gate[kPack], up[kPack], d[kPack], out[kPack];
  gates.unpack<T>(raw_gate, gate);
  ups.unpack<T>(raw_up, up);
  d_outs.unpack<T>(raw_d, d);
  if (d_gates) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) out[k] = act32::d_gate(a, d[k], gate[k], up[k]);
    d_gates.set<T>(at.column, at.n, out);
  }
  if (d_ups) {
    activate<T>(p, a, gate, out);
#pragma unroll
    for (int k = 0; k < kPack; ++k) out[k] = act32::d_up(a, d[k], out[k], up[k]);
    d_ups.set<T>(at.column, at.n, out);
  }
}

inline dim3 grid(const Problem& p) { return dim3(static_cast<unsigned>(p.axes.rows * tiles(p))); }

inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width == 0) return;
  rows::for_type(p.gate.type == rows::Type::bf16, [&]<class T>(T) {
    if (p.act == act32::Act::silu)
      hipLaunchKernelGGL((forward<T, true>), grid(p), dim3(kThreads), 0, stream, p);
    else
      hipLaunchKernelGGL((forward<T, false>), grid(p), dim3(kThreads), 0, stream, p);
  });
}
inline void launch_backward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width == 0) return;
  rows::for_type(p.gate.type == rows::Type::bf16, [&]<class T>(T) {
    if (p.act == act32::Act::silu)
      hipLaunchKernelGGL((backward<T, true>), grid(p), dim3(kThreads), 0, stream, p);
    else
      hipLaunchKernelGGL((backward<T, false>), grid(p), dim3(kThreads), 0, stream, p);
  });
}

}  // namespace rlk::simt::swiglu
