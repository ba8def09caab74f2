// rms_norm of rows of whole packs of up to 128 (bf16, on 16 bytes), with a gate, a residual or neither: the norms of a layer's heads.
//
// forward     16 lanes a row, two or four rows a thread, all asked for at once; each of as many lanes computes the reciprocal of
//             one of them
// backward    d_x, d_residual, d_gate and the shares of d_weight in one pass: a block has the 128 rows of a share, sixteen at a
//             time, and while they are there a thread a channel goes on with its chain
#pragma once

#include "simt/rms_norm/share.hpp"
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
  const bool silu = act == Gate::silu;
  if (gates_inside(silu, gate)) {
#  pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float e = exp_of_minus(gate[k]), d = e + 1, s = inverse_of(d);
      value.at[k] = silu ? quotient_inside(gate[k], d, s) : s;
      slope.at[k] = silu ? s * fused(gate[k], e * s, 1) : s * (e * s);
    }
    return;
  }
#endif
  Eight g;
#pragma unroll
  for (int k = 0; k < kPack; ++k) g.at[k] = gate[k];
  value = gate_values(act, g), slope = gate_slopes(act, g);
}

// Lanes without a pack have a gate that is no special case.
__device__ __forceinline__ void unpack_gate(const Problem& p, const rows::Raw<rows::Whole>& raw, int n,
                                            float (&gate)[kPack]) {
  rows::unpack<rows::Whole>(p.gate.type, raw, gate);
#pragma unroll
  for (int k = 0; k < kPack; ++k) gate[k] = n > 0 ? gate[k] : 1.0f;
}

// `Rows` of a thread. Added: with a residual.
template <bool Gated, bool Added, int Rows, rows::Walk By>
__global__ void __launch_bounds__(kThreads, 8) narrow_forward(Problem p) {
  using Raw = rows::Raw<rows::Whole>;
  const Sixteen at(p);
  const int n = rows::pack_at(at.first, p.width), team = static_cast<int>(threadIdx.x) / Sixteen::kThreadsOf;
  const std::int64_t first = std::int64_t{blockIdx.x} * (Rows * Sixteen::kRows) + team;
  std::int64_t row[Rows];  // rows past the end repeat the last one, since every lane must reach the shuffles
  Raw xs[Rows], others[Rows];  // the gates, or the residuals
#pragma unroll
  for (int c = 0; c < Rows; ++c) {
    row[c] = first + c * Sixteen::kRows < p.axes.rows ? first + c * Sixteen::kRows : p.axes.rows - 1;
    xs[c] = row_of<By>(p.axes, p.x, row[c]).template fetch<rows::Whole>(at.first, n);
    if constexpr (Gated || Added)
      others[c] =
          row_of<By>(p.axes, Gated ? p.gate : p.residual, row[c]).template fetch<rows::Whole>(at.first, n);
  }
  float w[kPack], squares = 0;
  if (p.weight) weights<rows::Whole>(p, at.first, n, w);
#pragma unroll
  for (int c = 0; c < Rows; ++c) {
    float a[kPack], sums[1][kPack];
    if constexpr (Added) {
      xs[c].part[0] = added(xs[c].part[0], others[c].part[0]);
      if (p.sum && n > 0 && first + c * Sixteen::kRows < p.axes.rows)
        row_of<By>(p.axes, p.sum, row[c]).template put<rows::Whole>(at.first, xs[c]);
    }
    rows::unpack<rows::Whole>(p.x.type, xs[c], a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[0][k] = fused(a[k], a[k], 0.0f);
    const float total = at.total(sums);
    squares = at.lane % Rows == c ? total : squares;
  }
  const float mine = reciprocal(squares, p.width, p.eps);
#pragma unroll
  for (int c = 0; c < Rows; ++c) {
    const float r = __shfl(
        mine, static_cast<int>(threadIdx.x) % kWave / Sixteen::kThreadsOf * Sixteen::kThreadsOf + c, kWave);
    if (first + c * Sixteen::kRows >= p.axes.rows) continue;
    float out[kPack];
    rows::unpack<rows::Whole>(p.x.type, xs[c], out);
#pragma unroll
    for (int k = 0; k < kPack; ++k) out[k] = out[k] * r;
    if (p.early) rows::round_pack<rows::Whole>(p.y.type, out);
    if (p.weight) multiply(out, w);
    if constexpr (Gated) {
      float g[kPack];
      unpack_gate(p, others[c], n, g);
      gate_for_bf16(p.act, g, out);
    }
    if (p.rstd && at.first == 0) row_of<By>(p.axes, p.rstd, row[c]).set(0, r);
    row_of<By>(p.axes, p.y, row[c]).template set<rows::Whole>(at.first, n, out);
  }
}

// The threads of a block of the backward, and the rows that they have at a time.
inline constexpr int kBackThreads = 256, kBackRows = kBackThreads / Sixteen::kThreadsOf;

// Rows for the chains of d_weight: x, and the gradient of the weighted value.
struct Tile {
  alignas(16) float d[kBackRows][Sixteen::kStride];
  rows::Bytes16 x[kBackRows][Sixteen::kThreadsOf];
  float r[kBackRows];
};
__device__ __forceinline__ float bf16_at(const rows::Bytes16* row, int i) {
  return simt::to_float(reinterpret_cast<const simt::bf16*>(row)[i]);
}

// What a thread has of a row, and the gradients that it writes.
template <bool Gated, rows::Walk By>
struct NarrowRow {
  const Problem& p;
  std::int64_t row;
  int first, n;
  bool there;

  // d becomes the gradient of what the gate multiplies, and d_gate is written.
  __device__ __forceinline__ void through_gate(const rows::Raw<rows::Whole>& raw,
                                               const float (&normal)[kPack], const float (&w)[kPack],
                                               float (&d)[kPack]) const {
    float g[kPack];
    unpack_gate(p, raw, n, g);
    Eight value, slope;
    gate_both(p.act, g, value, slope);
    if (p.d_gate && there) {
      float through[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) through[k] = normal[k];
      if (p.weight) multiply(through, w);
#pragma unroll
      for (int k = 0; k < kPack; ++k) through[k] = d[k] * through[k] * slope.at[k];
      row_of<By>(p.axes, p.d_gate, row).template set<rows::Whole>(first, n, through);
    }
    multiply(d, value.at);
  }
  __device__ __forceinline__ void write(float (&d)[kPack]) const {
    if (!there) return;
    if (const RowOf d_sum = row_of<By>(p.axes, p.d_sum, row)) {
      float a[kPack];
      d_sum.get<rows::Whole>(first, n, a);
#pragma unroll
      for (int k = 0; k < kPack; ++k) d[k] = d[k] + a[k];
    }
    if (const RowOf d_x = row_of<By>(p.axes, p.d_x, row)) d_x.set<rows::Whole>(first, n, d);
    if (const RowOf d_residual = row_of<By>(p.axes, p.d_residual, row))
      d_residual.set<rows::Whole>(first, n, d);
  }
};

// `out`: the shares of d_weight, if they are wanted.
template <bool Gated, rows::Walk By>
__global__ void __launch_bounds__(kBackThreads, 3) narrow_backward(Problem p, float* out) {
  using Raw = rows::Raw<rows::Whole>;
  __shared__ Tile tiles[2];
  const Sixteen at(p);
  const int channel = static_cast<int>(threadIdx.x), team = channel / Sixteen::kThreadsOf;
  const int n = rows::pack_at(at.first, p.width);
  const std::int64_t first = std::int64_t{blockIdx.x} * kBlock;
  const int count = static_cast<int>(p.axes.rows - first < kBlock ? p.axes.rows - first : kBlock);
  float w[kPack], sum = 0;
  if (p.weight) weights<rows::Whole>(p, at.first, n, w);
  Raw x, d_y, gate{};
  const auto row_at = [&](int step) {  // rows past the end repeat the last one
    const int row = step + team;
    return first + (row < count ? row : count - 1);
  };
  const auto fetch = [&](int step) {
    x = row_of<By>(p.axes, p.x, row_at(step)).template fetch<rows::Whole>(at.first, n);
    d_y = row_of<By>(p.axes, p.d_y, row_at(step)).template fetch<rows::Whole>(at.first, n);
    if constexpr (Gated)
      gate = row_of<By>(p.axes, p.gate, row_at(step)).template fetch<rows::Whole>(at.first, n);
  };
  fetch(0);
  for (int step = 0; step < count; step += kBackRows) {
    Tile& tile = tiles[step / kBackRows % 2];
    const NarrowRow<Gated, By> row{p, row_at(step), at.first, n, step + team < count};
    float a[kPack], d[kPack], sums[1][kPack];
    rows::unpack<rows::Whole>(p.x.type, x, a);
    rows::unpack<rows::Whole>(p.d_y.type, d_y, d);
    tile.x[team][at.lane] = x.part[0];
    [[maybe_unused]] const Raw of_gate = gate;
    if (step + kBackRows < count) fetch(step + kBackRows);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[0][k] = fused(a[k], a[k], 0.0f);
    const RowOf rstd = row_of<By>(p.axes, p.rstd, row.row);
    const float r = rstd ? rstd.get(0) : reciprocal(at.total(sums), p.width, p.eps);
    if (at.lane == 0) tile.r[team] = r;
#pragma unroll
    for (int k = 0; k < kPack; ++k) a[k] = a[k] * r;
    if constexpr (Gated) row.through_gate(of_gate, a, w, d);
#pragma unroll
    for (int k = 0; k < kPack; ++k) tile.d[team][at.first + k] = d[k];
    if (p.weight) multiply(d, w);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[0][k] = k < n ? fused(d[k], a[k], 0.0f) : 0.0f;
    const float mean = at.total(sums) / static_cast<float>(p.width);
#pragma unroll
    for (int k = 0; k < kPack; ++k) d[k] = gradient(r, a[k], mean, d[k]);
    row.write(d);
    if (!out) continue;
    __syncthreads();
    if (channel >= Sixteen::kStride) continue;
#pragma unroll
    for (int k = 0; k < kBackRows; ++k)
      if (step + k < count) sum = fused(tile.d[k][channel], bf16_at(tile.x[k], channel) * tile.r[k], sum);
  }
  if (out && channel < p.width) leave_share(p, out, blockIdx.x, channel, sum);
}

inline dim3 narrow_grid(const Problem& p, int rows) {
  return dim3(static_cast<unsigned>((p.axes.rows + rows - 1) / rows));
}
inline void launch_narrow_forward(const Problem& p, hipStream_t stream) {
  const int each = p.gate || p.residual ? 2 : 4;
  rows::for_walk(p.axes, [&]<rows::Walk By>() {
    const auto kernel = p.gate       ? narrow_forward<true, false, 2, By>
                        : p.residual ? narrow_forward<false, true, 2, By>
                                     : narrow_forward<false, false, 4, By>;
    hipLaunchKernelGGL(kernel, narrow_grid(p, each * Sixteen::kRows), dim3(kThreads), 0, stream, p);
  });
}
inline void launch_narrow_backward(const Problem& p, float* shares, hipStream_t stream) {
  rows::for_walk(p.axes, [&]<rows::Walk By>() {
    const auto kernel = p.gate ? narrow_backward<true, By> : narrow_backward<false, By>;
    hipLaunchKernelGGL(kernel, narrow_grid(p, kBlock), dim3(kBackThreads), 0, stream, p, shares);
  });
}

}  // namespace rlk::simt::rms_norm
