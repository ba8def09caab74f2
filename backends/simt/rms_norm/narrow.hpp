// rms_norm of rows of whole packs of up to 128 (bf16, on 16 bytes), with a gate, a residual or neither: the norms of a layer's heads.
//
// Four lanes a row: two of a sum's steps need no shuffle, and what is done once a row serves 32 elements of a lane. All that a lane
// reads is asked for at once. With a residual eight lanes: two tensors are written, which goes best by whole lines.
#pragma once

#include "simt/rms_norm/team.hpp"
#include "simt/sigmoid.hpp"

namespace rlk::simt::rms_norm {

#if defined(__CUDA_ARCH__)
// Whether sigmoid.hpp's forms of value and slope serve a gate.
__device__ __forceinline__ bool gate_inside(bool silu, float gate) {
  const float size = fabsf(gate);
  return size <= 64.0f && (!silu || size >= 0x1p-60f);
}
__device__ __forceinline__ bool gates_inside(bool silu, const float (&gate)[kPack]) {
  bool inside = true;
#  pragma unroll
  for (int k = 0; k < kPack; ++k) inside = inside && gate_inside(silu, gate[k]);
  return inside;
}
__device__ __forceinline__ float gate_value(bool silu, float gate) {
  const float d = exp_of_minus(gate) + 1, s = inverse_of(d);
  return silu ? quotient_inside(gate, d, s) : s;
}
#endif

// v times the gate.
__device__ __forceinline__ void gate_exactly(Gate act, const float (&gate)[kPack], float (&v)[kPack]) {
#if defined(__CUDA_ARCH__)
  const bool silu = act == Gate::silu;
  if (gates_inside(silu, gate)) {
#  pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = v[k] * gate_value(silu, gate[k]);
    return;
  }
#endif
  Eight g;
#pragma unroll
  for (int k = 0; k < kPack; ++k) g.at[k] = gate[k];
  multiply(v, gate_values(act, g).at);
}

// v times the gate, or what a bf16 result rounds to the same number.
__device__ __forceinline__ void gate_for_bf16(Gate act, const float (&gate)[kPack], float (&v)[kPack]) {
#if defined(__CUDA_ARCH__)
  if (multiply_for_bf16(act == Gate::silu, gate, v)) return;
#endif
  gate_exactly(act, gate, v);
}

// What the gate multiplies by, and its slope.
__device__ __forceinline__ void gate_both(Gate act, const float (&gate)[kPack], Eight& value, Eight& slope) {
#if defined(__CUDA_ARCH__)
  const auto both = [&]<bool Silu>() {
    if (!gates_inside(Silu, gate)) return false;
#  pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float e = exp_of_minus(gate[k]), d = e + 1, s = inverse_of(d);
      value.at[k] = Silu ? quotient_inside(gate[k], d, s) : s;
      slope.at[k] = Silu ? s * fused(gate[k], e * s, 1) : s * (e * s);
    }
    return true;
  };
  if (act == Gate::silu ? both.template operator()<true>() : both.template operator()<false>()) return;
#endif
  Eight g;
#pragma unroll
  for (int k = 0; k < kPack; ++k) g.at[k] = gate[k];
  value = gate_values(act, g), slope = gate_slopes(act, g);
}

enum class Beside { nothing, gate, residual };
using Heads = Team<4>;
template <Beside Other>
using HeadsBeside = Team<Other == Beside::residual ? 8 : 4, Other == Beside::residual ? 2 : 4>;

template <Beside Other, rows::Walk By>
__global__ void __launch_bounds__(kThreads, Other == Beside::gate ? 6 : 8) narrow_forward(Problem p) {
  using rows::Whole;
  using Of = HeadsBeside<Other>;
  __shared__ Factors<Of::kMost> weights;
  const Of at(p);
  const auto row = [&](const rows::Tensor& t) { return rows::row_of<By>(p.axes, t, at.row); };
  const auto for_held = [&](auto body) {  // body(number, first element)
#pragma unroll
    for (int c = 0; c < Of::kHeld; ++c)
      if (const int i = at.first + c * Of::kStride; i < p.width) body(c, i);
  };
  rows::Bytes16 xs[Of::kHeld], others[Of::kHeld];
  const auto fetch = [&](const rows::Tensor& t, rows::Bytes16(&raw)[Of::kHeld]) {
    const RowOf of = row(t);
    for_held([&](int c, int i) { raw[c] = of.template fetch<Whole>(i, kPack).part[0]; });
  };
  fetch(p.x, xs);
  if constexpr (Other == Beside::gate) fetch(p.gate, others);
  if constexpr (Other == Beside::residual) fetch(p.residual, others);
  weights.fill(p, kThreads);
  float sums[Of::kHeld][kPack] = {};
  for_held([&](int c, int i) {
    if constexpr (Other == Beside::residual) {
      xs[c] = added(xs[c], others[c]);
      if (p.sum && at.there) row(p.sum).template put<Whole>(i, {xs[c]});
    }
    float a[kPack];
    rows::unpack<bf16>(&xs[c], a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[c][k] = fused(a[k], a[k], 0.0f);
  });
  const float r = reciprocal(at.total(sums), p.width, p.eps);
  __syncthreads();
  if (!at.there) return;
  if (p.rstd && at.first == 0) row(p.rstd).set(0, r);
  const RowOf y = row(p.y);
  for_held([&](int c, int i) {
    float out[kPack];
    rows::unpack<bf16>(&xs[c], out);
#pragma unroll
    for (int k = 0; k < kPack; ++k) out[k] = out[k] * r;
    if (p.early) rows::round_pack<Whole>(p.y.type, out);
    weights.multiply(i, out);
    if constexpr (Other == Beside::gate) {
      float gate[kPack];
      rows::unpack<bf16>(&others[c], gate);
      gate_for_bf16(p.act, gate, out);
    }
    y.template set<Whole>(i, kPack, out);
  });
}

template <Beside Other, rows::Walk By>
void launch_narrow_forward(const Problem& p, hipStream_t stream) {
  constexpr int kRows = HeadsBeside<Other>::kRows;
  const auto blocks = static_cast<unsigned>((p.axes.rows + kRows - 1) / kRows);
  hipLaunchKernelGGL((narrow_forward<Other, By>), dim3(blocks), dim3(kThreads), 0, stream, p);
}
inline void launch_narrow_forward(const Problem& p, hipStream_t stream) {
  rows::for_walk(p.axes, [&]<rows::Walk By>() {
    if (p.gate)
      launch_narrow_forward<Beside::gate, By>(p, stream);
    else if (p.residual)
      launch_narrow_forward<Beside::residual, By>(p, stream);
    else
      launch_narrow_forward<Beside::nothing, By>(p, stream);
  });
}

}  // namespace rlk::simt::rms_norm
