// The portable GPU kernels of tp_sum and its gradients (arithmetic tree8): the bits of the native backend on every GPU. A
// block has a tile of a row, a thread kEach columns of it, kThreads apart; of rows that lie in whole fours a thread has one
// to four fours.
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

// at(t): the t-th partial sum of `count`
template <class At>
__device__ __forceinline__ float join(int count, At at) {
  if (count == 1) return at(0);
  if (count == 2) return at(0) + at(1);
  if (count == 4) return rlk::tree8::four(at(0), at(1), at(2), at(3));
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
    float x = join(p.count, [&](int t) { return partials[t][i]; });
    if (p.bias != nullptr) x = rows::round_to(p.y.type, x) + rows::load(p.bias_type, p.bias, i);
    if (residual) x = rows::round_to(p.y.type, x) + residual.get(i);
    y.set(i, x);
  }
}

// Four neighbours of a row of any type that lie on as many bytes as they have.
inline constexpr int kFour = 4;
__device__ __forceinline__ void get_four(const RowOf& row, std::int64_t i, float (&v)[kFour]) {
  if (row.type == rows::Type::f32) {
    const auto raw = *reinterpret_cast<const rows::Bytes16*>(static_cast<const float*>(row.data) + i);
    RLK_UNROLL(4)
    for (int k = 0; k < kFour; ++k) v[k] = simt::bits_float(raw.word[k]);
  } else {
    RLK_UNROLL(4)
    for (int k = 0; k < kFour; ++k) v[k] = row.get(i + k);
  }
}
__device__ __forceinline__ void set_four(const RowOf& row, std::int64_t i, const float (&v)[kFour]) {
  struct alignas(8) Bytes8 {
    std::uint32_t word[2];
  };
  if (row.type == rows::Type::f32) {
    rows::Bytes16 raw;
    RLK_UNROLL(4)
    for (int k = 0; k < kFour; ++k) raw.word[k] = simt::float_bits(simt::from_float<float>(v[k]));
    *reinterpret_cast<rows::Bytes16*>(static_cast<float*>(row.data) + i) = raw;
  } else {
    const bool brain = row.type == rows::Type::bf16;
    Bytes8 raw;
    RLK_UNROLL(2)
    for (int k = 0; k < 2; ++k)
      raw.word[k] = brain ? rows::pair_of<rows::bf16>(v[2 * k], v[2 * k + 1])
                          : rows::pair_of<rows::fp16>(v[2 * k], v[2 * k + 1]);
    *reinterpret_cast<Bytes8*>(static_cast<std::uint16_t*>(row.data) + i) = raw;
  }
}

inline bool lies_in_fours(const Problem& p) {
  const auto lies = [](const rows::Tensor& t) {
    const auto bytes = static_cast<std::uintptr_t>(kFour * rows::size_of(t.type));
    return !t || (reinterpret_cast<std::uintptr_t>(t.data) % bytes == 0 && t.stride[0] % kFour == 0);
  };
  bool all = p.axes.count == 1 && p.width % kFour == 0 && lies(p.residual) && lies(p.y);
  for (int t = 0; t < p.count; ++t) all = all && lies(p.partials[t]);
  return all;
}

// All that a thread reads of partial sums is on its way before the first is added.
template <int Count, int Each>
__global__ void __launch_bounds__(kThreads) sum_fours(Problem p) {
  constexpr int kColumns = kThreads * kFour;
  const auto across = static_cast<unsigned>((p.width + Each * kColumns - 1) / (Each * kColumns));
  const std::int64_t row = blockIdx.x / across,
                     first = std::int64_t{blockIdx.x % across} * Each * kColumns + threadIdx.x * kFour;
  rows::Bytes16 raw[Each][Count];
  RLK_UNROLL(4)
  for (int e = 0; e < Each; ++e) {
    const std::int64_t i = first + e * kColumns;
    RLK_UNROLL(8)
    for (int t = 0; t < Count; ++t)
      if (i < p.width)
        raw[e][t] = *reinterpret_cast<const rows::Bytes16*>(static_cast<const float*>(p.partials[t].data) +
                                                            row * p.partials[t].stride[0] + i);
  }
  const RowOf residual = rows::row_of<rows::Walk::line>(p.axes, p.residual, row),
              y = rows::row_of<rows::Walk::line>(p.axes, p.y, row);
  RLK_UNROLL(4)
  for (int e = 0; e < Each; ++e) {
    const std::int64_t i = first + e * kColumns;
    if (i >= p.width) break;
    float v[kFour], r[kFour] = {};
    if (residual) get_four(residual, i, r);
    RLK_UNROLL(4)
    for (int k = 0; k < kFour; ++k) {
      v[k] = join(Count, [&](int t) { return simt::bits_float(raw[e][t < Count ? t : 0].word[k]); });
      if (p.bias != nullptr) v[k] = rows::round_to(p.y.type, v[k]) + rows::load(p.bias_type, p.bias, i + k);
      if (residual) v[k] = rows::round_to(p.y.type, v[k]) + r[k];
    }
    set_four(y, i, v);
  }
}

template <int Count, int Each>
void launch_fours(const Problem& p, hipStream_t stream) {
  constexpr std::int64_t kSpan = Each * kThreads * kFour;
  const std::int64_t blocks = p.axes.rows * ((p.width + kSpan - 1) / kSpan);
  hipLaunchKernelGGL((sum_fours<Count, Each>), dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                     p);
}

inline void launch(const Problem& p, hipStream_t stream) {
  if (p.axes.rows * p.width <= 0) return;
  const bool wide = p.width > kThreads * kFour;
  if (!lies_in_fours(p))
    hipLaunchKernelGGL(sum, dim3(static_cast<unsigned>(p.axes.rows * tiles(p))), dim3(kThreads), 0, stream,
                       p);
  else if (p.count == 1)
    launch_fours<1, 1>(p, stream);
  else if (p.count == 2)
    wide ? launch_fours<2, 4>(p, stream) : launch_fours<2, 1>(p, stream);
  else if (p.count == 4)
    wide ? launch_fours<4, 2>(p, stream) : launch_fours<4, 1>(p, stream);
  else
    launch_fours<8, 1>(p, stream);
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
