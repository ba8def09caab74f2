// The portable GPU kernels of swiglu (arithmetic act32): the bits of the native backend on every GPU. A block has a tile of
// a row, a thread some packs of it, which it reads before it computes.
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"
#include "simt/rows.hpp"
#include "simt/sigmoid.hpp"
#include "simt/swiglu/whole.hpp"

namespace rlk::simt::swiglu {

using act32::Problem;
using rows::kPack;
using rows::RowOf;

inline constexpr int kThreads = 128, kStride = kThreads * kPack;
// Packs of a thread: two at a time hide more of the memory's latency where there are many, and are late where there are few.
inline constexpr int kFew = 1, kMany = 2;
inline constexpr std::int64_t kManyTiles = 1024;

template <int Each>
RLK_HD std::int64_t tiles(const Problem& p) {
  return (p.width + Each * kStride - 1) / (Each * kStride);
}

// The packs of this thread: a row, and the first column of each.
template <int Each>
struct Place {
  std::int64_t row, first, width;
  __device__ __forceinline__ explicit Place(const Problem& p) : width(p.width) {
    const auto across = static_cast<unsigned>(tiles<Each>(p));
    row = blockIdx.x / across;
    first = std::int64_t{blockIdx.x % across} * (Each * kStride) + threadIdx.x * kPack;
  }
  __device__ __forceinline__ std::int64_t column(int c) const { return first + c * kStride; }
  __device__ __forceinline__ int count(int c) const { return rows::pack_at(column(c), width); }
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

// out = act(gate) up, which `out` is.
template <class T, bool Silu>
__device__ __forceinline__ void gate_up(const Problem& p, const Problem& a, const float (&gate)[kPack],
                                        float (&out)[kPack]) {
  float act[kPack];
#if defined(__CUDA_ARCH__)
  if constexpr (Silu && __is_same(T, bf16)) {
    if (!p.twice && multiply_for_bf16(true, gate, out)) return;
#  pragma unroll
    for (int k = 0; k < kPack; ++k) act[k] = 1;
    if (p.twice && multiply_for_bf16(true, gate, act)) {
      rows::round_pack<T>(p.gate.type, act);
#  pragma unroll
      for (int k = 0; k < kPack; ++k) out[k] = act[k] * out[k];
      return;
    }
  }
#endif
  activate<T>(p, a, gate, act);
#pragma unroll
  for (int k = 0; k < kPack; ++k) out[k] = act[k] * act32::held_up(a, out[k]);
}

template <class T, bool Silu, int Each>
__global__ void __launch_bounds__(kThreads) forward(Problem p) {
  const Place<Each> at(p);
  const Problem a = attributes<Silu>(p);
  const RowOf gates(p.axes, p.gate, at.row), ups(p.axes, p.up, at.row), outs(p.axes, p.out, at.row);
  rows::Raw<T> raw_gate[Each], raw_up[Each];
#pragma unroll
  for (int c = 0; c < Each; ++c) {
    raw_gate[c] = gates.fetch<T>(at.column(c), at.count(c));
    raw_up[c] = ups.fetch<T>(at.column(c), at.count(c));
  }
#pragma unroll
  for (int c = 0; c < Each; ++c) {
    if (at.count(c) == 0) return;
    float gate[kPack], out[kPack];
    gates.unpack<T>(raw_gate[c], gate);
    ups.unpack<T>(raw_up[c], out);
    gate_up<T, Silu>(p, a, gate, out);
    outs.set<T>(at.column(c), at.count(c), out);
  }
}

// The gradients of eight elements in place of what they are of: `gate` becomes d_gate, `up` d_up.
template <class T, bool Silu>
__device__ __forceinline__ void gradients(const Problem& p, const Problem& a, const float (&d)[kPack],
                                          float (&gate)[kPack], float (&up)[kPack]) {
  float act[kPack];
#if defined(__CUDA_ARCH__)
  if constexpr (Silu) {  // one exponential for both, where it is no special case: the same bits
    bool inside = true;
#  pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float size = fabsf(gate[k]);
      inside = inside && size <= 64.0f && size >= 0x1p-60f;
    }
    if (inside) {
#  pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const float e = exp_of_minus(gate[k]), sum = e + 1, s = inverse_of(sum);
        act[k] = quotient_inside(gate[k], sum, s);
        gate[k] = d[k] * up[k] * s * fused(gate[k], e * s, 1);
      }
      if (p.twice) rows::round_pack<T>(p.gate.type, act);
#  pragma unroll
      for (int k = 0; k < kPack; ++k) up[k] = d[k] * act[k];
      return;
    }
  }
#endif
  activate<T>(p, a, gate, act);
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    gate[k] = act32::d_gate(a, d[k], gate[k], up[k]);
    up[k] = act32::d_up(a, d[k], act[k], up[k]);
  }
}

template <class T, bool Silu, int Each>
__global__ void __launch_bounds__(kThreads) backward(Problem p) {
  const Place<Each> at(p);
  const Problem a = attributes<Silu>(p);
  const RowOf gates(p.axes, p.gate, at.row), ups(p.axes, p.up, at.row), d_outs(p.axes, p.d_out, at.row),
      d_gates(p.axes, p.d_gate, at.row), d_ups(p.axes, p.d_up, at.row);
  rows::Raw<T> raw_gate[Each], raw_up[Each], raw_d[Each];
#pragma unroll
  for (int c = 0; c < Each; ++c) {
    raw_gate[c] = gates.fetch<T>(at.column(c), at.count(c));
    raw_up[c] = ups.fetch<T>(at.column(c), at.count(c));
    raw_d[c] = d_outs.fetch<T>(at.column(c), at.count(c));
  }
#pragma unroll
  for (int c = 0; c < Each; ++c) {
    if (at.count(c) == 0) return;
    float gate[kPack], up[kPack], d[kPack];
    gates.unpack<T>(raw_gate[c], gate);
    ups.unpack<T>(raw_up[c], up);
    d_outs.unpack<T>(raw_d[c], d);
    gradients<T, Silu>(p, a, d, gate, up);
    if (d_gates) d_gates.set<T>(at.column(c), at.count(c), gate);
    if (d_ups) d_ups.set<T>(at.column(c), at.count(c), up);
  }
}

template <int Each>
dim3 grid(const Problem& p) {
  return dim3(static_cast<unsigned>(p.axes.rows * tiles<Each>(p)));
}

// f(T{}, whether it is silu, packs of a thread), as constants.
template <class F>
void for_kernel(const Problem& p, F f) {
  if (p.axes.rows * p.width == 0) return;
  const bool silu = p.act == act32::Act::silu, many = p.axes.rows * tiles<kMany>(p) >= kManyTiles;
  rows::for_type(p.gate.type == rows::Type::bf16, [&]<class T>(T) {
    const auto with = [&]<bool Silu>() {
      many ? f.template operator()<T, Silu, kMany>() : f.template operator()<T, Silu, kFew>();
    };
    silu ? with.template operator()<true>() : with.template operator()<false>();
  });
}
inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (whole::suits(p, p.gate, p.up, p.out))
    return whole::launch<whole::Forward>(p, stream, p.gate, p.up, p.out);
  for_kernel(p, [&]<class T, bool Silu, int Each>() {
    hipLaunchKernelGGL((forward<T, Silu, Each>), grid<Each>(p), dim3(kThreads), 0, stream, p);
  });
}
inline void launch_backward(const Problem& p, hipStream_t stream) {
  if (whole::suits(p, p.d_out, p.gate, p.up, p.d_gate, p.d_up))
    return whole::launch<whole::Backward>(p, stream, p.d_out, p.gate, p.up, p.d_gate, p.d_up);
  for_kernel(p, [&]<class T, bool Silu, int Each>() {
    hipLaunchKernelGGL((backward<T, Silu, Each>), grid<Each>(p), dim3(kThreads), 0, stream, p);
  });
}

}  // namespace rlk::simt::swiglu
