// d_x and d_residual of rms_norm from rows of whole packs (bf16, on 16 bytes, no gate, no residual) that their threads hold, and
// the rows' reciprocals for the shares of d_weight.
//
// All that a thread reads of its row is asked for at once and lies in shared memory, where no other thread looks at it: a
// multiprocessor has as many rows under way as that holds, and few registers each.
#pragma once

#include "simt/async.hpp"
#include "simt/rms_norm/slices.hpp"
#include "simt/rms_norm/team.hpp"

namespace rlk::simt::rms_norm {

// What a block's threads have of a row's tensors. A team of more than a wave has its sums before it.
template <class Of>
struct Held {
  static constexpr std::size_t kBefore = Of::kThreadsOf > kWave ? kSumBytes : 0;
  static std::size_t bytes(int tensors) {
    return kBefore + sizeof(rows::Bytes16) * static_cast<std::size_t>(tensors * Of::kHeld * kThreads);
  }
  rows::Bytes16* mine;
  __device__ __forceinline__ Held()
      : mine(dynamic_shared<rows::Bytes16>() + kBefore / sizeof(rows::Bytes16) + threadIdx.x) {}
  __device__ __forceinline__ rows::Bytes16& operator()(int tensor, int c) const {
    return mine[(tensor * Of::kHeld + c) * kThreads];
  }
};

template <class Of, bool Sum, rows::Walk By>
__global__ void __launch_bounds__(kThreads, 8) held_backward(Problem p, float* r_of_row, unsigned* counters) {
  const Of at(p);
  const auto row = [&](const rows::Tensor& t) { return rows::row_of<By>(p.axes, t, at.row); };
  const Held<Of> held;
  const bool down = p.d_x || p.d_residual;
  const auto for_held = [&](auto body) {  // body(number, first element)
#pragma unroll
    for (int c = 0; c < Of::kHeld; ++c)
      if (const int i = at.first + c * Of::kStride; i < p.width) body(c, i);
  };
  const auto ask = [&](const rows::Tensor& t, int tensor) {
    const auto* from = static_cast<const std::uint16_t*>(row(t).data);
    for_held([&](int c, int i) { send(&held(tensor, c), reinterpret_cast<const rows::Bytes16*>(from + i)); });
  };
  if (down || !p.rstd) ask(p.x, 0);
  if (down) ask(p.d_y, 1);
  if constexpr (Sum) ask(p.d_sum, 2);
  clear_counters(p, counters);
  // Kept from before the sums, but where a thread has 32 of their lanes and no registers for weights.
  constexpr bool kKept = Of::kSums <= 2;
  rows::Raw<rows::Whole> kept[Of::kHeld];
  if constexpr (kKept)
    if (down && p.weight)
      for_held(
          [&](int c, int i) { kept[c] = rows::fetch_pack<rows::Whole>(p.weight_type, p.weight, i, kPack); });
  float r = p.rstd ? row(p.rstd).get(0) : 0;
  arrived();
  const auto get = [&](int tensor, int c, float(&v)[kPack]) {
    const rows::Bytes16 raw = held(tensor, c);
    rows::unpack<bf16>(&raw, v);
  };
  if (!p.rstd) {
    float squares[Of::kSums][kPack] = {};
    for_held([&](int c, int) {
      float a[kPack];
      get(0, c, a);
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        squares[c % Of::kSums][k] = fused(a[k], a[k], squares[c % Of::kSums][k]);
    });
    r = reciprocal(at.total(squares), p.width, p.eps);
  }
  if (r_of_row && at.there && at.first == 0) r_of_row[at.row] = r;
  if (!down) return;
  // The normalised value, and its gradient.
  const auto both = [&](int c, int i, float(&a)[kPack], float(&g)[kPack]) {
    get(0, c, a);
    get(1, c, g);
#pragma unroll
    for (int k = 0; k < kPack; ++k) a[k] = a[k] * r;
    if (!p.weight) return;
    float w[kPack];
    if constexpr (kKept)
      rows::unpack<bf16>(kept[c].part, w), add_offset(p, w);
    else
      weights<rows::Whole>(p, i, kPack, w);
    multiply(g, w);
  };
  float sums[Of::kSums][kPack] = {};
  for_held([&](int c, int i) {
    float a[kPack], g[kPack];
    both(c, i, a, g);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[c % Of::kSums][k] = fused(g[k], a[k], sums[c % Of::kSums][k]);
  });
  const float mean = at.total(sums) / static_cast<float>(p.width);
  if (!at.there) return;
  const RowOf d_x = row(p.d_x), d_residual = row(p.d_residual);
  for_held([&](int c, int i) {
    float a[kPack], g[kPack];
    both(c, i, a, g);
#pragma unroll
    for (int k = 0; k < kPack; ++k) g[k] = gradient(r, a[k], mean, g[k]);
    if constexpr (Sum) {
      get(2, c, a);
#pragma unroll
      for (int k = 0; k < kPack; ++k) g[k] = g[k] + a[k];
    }
    if (d_x) d_x.set<rows::Whole>(i, kPack, g);
    if (d_residual) d_residual.set<rows::Whole>(i, kPack, g);
  });
}

template <class Of>
void launch_held_backward(const Problem& p, float* r, unsigned* counters, hipStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.axes.rows + Of::kRows - 1) / Of::kRows);
  const auto launch = [&]<rows::Walk By>() {
    const auto kernel = p.d_sum ? held_backward<Of, true, By> : held_backward<Of, false, By>;
    hipLaunchKernelGGL(kernel, dim3(blocks), dim3(kThreads), Held<Of>::bytes(p.d_sum ? 3 : 2), stream, p, r,
                       counters);
  };
  if (p.axes.count == 1)
    launch.template operator()<rows::Walk::line>();
  else
    launch.template operator()<rows::Walk::any>();
}

}  // namespace rlk::simt::rms_norm
