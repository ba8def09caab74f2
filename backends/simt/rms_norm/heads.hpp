// rms_norm's gradients of rows of whole packs of up to 128 (bf16, on 16 bytes) without a gate, a residual or d_sum: d_x, d_residual
// and the shares of d_weight in one pass.
//
// A block has the 128 rows of a share and asks for all of them at once, 16 lanes a row as in narrow.hpp. A thread reads what it
// asked for itself, a row as it arrives, so nothing waits for the block until the rows are done; then a thread goes through
// the chains of two channels.
#pragma once

#include "simt/async.hpp"
#include "simt/rms_norm/narrow.hpp"
#include "simt/rms_norm/share.hpp"

namespace rlk::simt::rms_norm {

inline constexpr int kHeadSteps = kBlock / kBackRows;

// `out`: the shares of d_weight, if they are wanted.
template <rows::Walk By>
__global__ void __launch_bounds__(kBackThreads, 3) heads_backward(Problem p, float* out) {
  auto& all = *dynamic_shared<ShareRows<Sixteen::kThreadsOf>>();
  const Sixteen at(p);
  const int thread = static_cast<int>(threadIdx.x), team = thread / Sixteen::kThreadsOf;
  const int n = rows::pack_at(at.first, p.width);
  const std::int64_t first = std::int64_t{blockIdx.x} * kBlock;
  const int count = static_cast<int>(p.axes.rows - first < kBlock ? p.axes.rows - first : kBlock);
  const auto row_at = [&](int step) {  // rows past the end repeat the last one
    const int row = step * kBackRows + team;
    return first + (row < count ? row : count - 1);
  };
  const auto pack_of = [&](const rows::Tensor& t, std::int64_t row) {
    const std::int64_t offset = rows::offset_of<By>(p.axes, t, row) + at.first;
    return reinterpret_cast<const rows::Bytes16*>(static_cast<const std::uint16_t*>(t.data) + offset);
  };
#pragma unroll
  for (int step = 0; step < kHeadSteps; ++step) {
    rows::Bytes16 &x = all.x[step * kBackRows + team][at.lane],
                  &d_y = all.d_y[step * kBackRows + team][at.lane];
    if (n == 0)
      x = d_y = rows::Bytes16{};
    else if (step * kBackRows < count)
      send(&x, pack_of(p.x, row_at(step))), send(&d_y, pack_of(p.d_y, row_at(step)));
    end_group();
  }
  float w[kPack], given = 0;  // a lane of a team: of the row that has its number
  if (p.weight) weights<rows::Whole>(p, at.first, n, w);
  if (p.rstd) given = row_of<By>(p.axes, p.rstd, row_at(at.lane % kHeadSteps)).get(0);
#pragma unroll 1
  for (int step = 0; step * kBackRows < count; ++step) {
    const int mine = step * kBackRows + team;
    arrived_but<kHeadSteps - 1>();
    float a[kPack], d[kPack], sums[1][kPack];
    const rows::Bytes16 x = all.x[mine][at.lane], d_y = all.d_y[mine][at.lane];
    rows::unpack<bf16>(&x, a);
    rows::unpack<bf16>(&d_y, d);
    float r;
    if (p.rstd) {
      r = __shfl(given, thread % kWave / Sixteen::kThreadsOf * Sixteen::kThreadsOf + step, kWave);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) sums[0][k] = fused(a[k], a[k], 0.0f);
      r = reciprocal(at.total(sums), p.width, p.eps);
    }
    if (at.lane == 0) all.r[mine] = r;
    if (p.weight) multiply(d, w);
#pragma unroll
    for (int k = 0; k < kPack; ++k) a[k] = a[k] * r;
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[0][k] = k < n ? fused(d[k], a[k], 0.0f) : 0.0f;
    const float mean = at.total(sums) / static_cast<float>(p.width);
#pragma unroll
    for (int k = 0; k < kPack; ++k) d[k] = gradient(r, a[k], mean, d[k]);
    NarrowRow<false, By>{p, row_at(step), at.first, n, mine < count}.write(d);
    end_group();  // an empty one, so that as many as before may be under way
  }
  if (!out) return;
  __syncthreads();
  const int i = 2 * thread;
  if (i >= p.width) return;
  float low = 0, high = 0;
  all.chain(thread, count, low, high);
  leave_share(p, out, blockIdx.x, i, low);
  leave_share(p, out, blockIdx.x, i + 1, high);
}

// Whether the gradients and the shares of d_weight, if `shares`, are under way; `p` has whole packs.
inline bool launch_heads_backward(const Problem& p, float* shares, hipStream_t stream) {
  if (p.gate || p.d_sum) return false;
  constexpr std::size_t bytes = sizeof(ShareRows<Sixteen::kThreadsOf>);
  bool launched = false;
  rows::for_walk(p.axes, [&]<rows::Walk By>() {
    launched = allow_shared(heads_backward<By>, bytes);
    if (launched)
      hipLaunchKernelGGL((heads_backward<By>), narrow_grid(p, kBlock), dim3(kBackThreads), bytes, stream, p,
                         shares);
  });
  return launched;
}

}  // namespace rlk::simt::rms_norm
