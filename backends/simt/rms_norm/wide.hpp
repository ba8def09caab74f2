// rms_norm's gradients of rows of whole packs of more than 128 (bf16, on 16 bytes, with a weight, one stride a row, no gate, no
// residual), where rows are many: d_x, d_residual and the shares of d_weight in one pass, so that x and d_y come from memory once;
// and d_x alone where the widths suit a row's threads. Also of so few rows that a block has them all at a time: one launch.
//
// A block has the 128 rows of a share, 4 or 16 of them at a time, which lie in shared memory: the next ones are on their way
// while these are computed. What a row's threads know of the normalised value and of its gradient stays in registers from one
// sum to the next; when the sums are there, a thread goes on with the chains of its channels.
#pragma once

#include "simt/async.hpp"
#include "simt/rms_norm/share.hpp"

namespace rlk::simt::rms_norm {

// A block whose rows have `Threads` each, of which each holds `Held` packs, and its shared memory: two halves of rows of x, of d_y
// and, with Sum, of d_sum.
template <int Threads, int Held, bool Sum>
struct Wide {
  static constexpr int kThreadsOf = Threads < kWave ? 256 : 512;
  static constexpr int kRows = kThreadsOf / Threads, kStride = Threads * kPack;
  static constexpr int kSums = Threads > kWave ? 1 : Held;
  static constexpr int kMost = Held * kStride;                       // channels
  static constexpr int kPairs = (kMost / 2 - 1) / kThreadsOf + 1;    // of channels, of a thread's chains
  static constexpr int kRoom = Threads > kWave ? kRows* kLanes : 0;  // floats for a sum over rows
  static constexpr int kTensors = Sum ? 3 : 2;

  rows::Bytes16* tiles;
  float *room, *r;  // two of each
  int packs;

  __device__ __forceinline__ explicit Wide(const Problem& p) : packs(static_cast<int>(p.width) / kPack) {
    tiles = dynamic_shared<rows::Bytes16>();
    room = reinterpret_cast<float*>(tiles + 2 * kTensors * kRows * packs);
    r = room + 2 * kRoom;
  }
  static std::size_t bytes(const Problem& p) {
    return static_cast<std::size_t>(2 * kTensors * kRows) * static_cast<std::size_t>(p.width) * 2 +
           (2 * kRoom + 2 * kRows) * sizeof(float);
  }
  // A row of one of the tensors.
  __device__ __forceinline__ rows::Bytes16* row(int which, int tensor, int of) const {
    return tiles + ((which * kTensors + tensor) * kRows + of) * packs;
  }

  // rms32 from the sums of a row's threads. A block's sums take the two rooms in turn, so one barrier each is enough.
  __device__ __forceinline__ float total(float (&sums)[kSums][kPack], int which) const {
    const int thread = static_cast<int>(threadIdx.x) % Threads;
    [[maybe_unused]] const int lane = thread % kWave;
    float v[kPack];
    if constexpr (Threads > kWave) {
      float* all = room + which * kRoom + static_cast<int>(threadIdx.x) / Threads * kLanes;
#pragma unroll
      for (int k = 0; k < kPack; ++k) all[k * Threads + thread] = sums[0][k];
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const float* of = all + k * Threads + lane;
        v[k] = add_rn(add_rn(of[0], of[2 * kWave]), add_rn(of[kWave], of[3 * kWave]));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {  // lanes that are not there are +0
        const auto at = [&](int c) { return c < kSums ? sums[c < kSums ? c : 0][k] : 0.0f; };
        v[k] = add_rn(add_rn(at(0), at(2)), add_rn(at(1), at(3)));
      }
    }
    if constexpr (Threads >= kWave)
      return fold<kWave>(v, lane);
    else
      return add_rn(fold<Threads>(v, lane), 0.0f);  // as with the empty lanes: no -0
  }
};

__device__ __forceinline__ void widen(const rows::Bytes16& raw, float (&v)[kPack]) {
  rows::unpack<bf16>(&raw, v);
}
// The row of a tensor of one stride.
__device__ __forceinline__ rows::Bytes16* row_of(const rows::Tensor& t, std::int64_t row) {
  return reinterpret_cast<rows::Bytes16*>(static_cast<std::uint16_t*>(t.data) + row * t.stride[0]);
}

// What a thread has of d_weight: two channels at a time.
template <class W>
struct Chains {
  float low[W::kPairs] = {}, high[W::kPairs] = {};

  // They go on with the first `there` rows of this half.
  __device__ __forceinline__ void add(const W& wide, int half, int there) {
    const auto* xs = reinterpret_cast<const std::uint32_t*>(wide.row(half, 0, 0));
    const auto* ds = reinterpret_cast<const std::uint32_t*>(wide.row(half, 1, 0));
    const float* rs = wide.r + half * W::kRows;
    const int pairs = wide.packs * (kPack / 2);
#pragma unroll
    for (int pair = 0; pair < W::kPairs; ++pair) {
      const int i = static_cast<int>(threadIdx.x) + pair * W::kThreadsOf;
      if (i >= pairs) continue;
      const auto go_on = [&](int k) {
        const std::uint32_t x2 = xs[k * pairs + i], d2 = ds[k * pairs + i];
        low[pair] = fused(bits_float(d2 << 16), bits_float(x2 << 16) * rs[k], low[pair]);
        high[pair] = fused(bits_float(d2 & 0xffff0000u), bits_float(x2 & 0xffff0000u) * rs[k], high[pair]);
      };
      if (there == W::kRows) {
#pragma unroll
        for (int k = 0; k < W::kRows; ++k) go_on(k);
      } else {
        for (int k = 0; k < there; ++k) go_on(k);
      }
    }
  }
  __device__ __forceinline__ void store(const Problem& p, const W& wide, float* out) const {
#pragma unroll
    for (int pair = 0; pair < W::kPairs; ++pair) {
      const int i = static_cast<int>(threadIdx.x) + pair * W::kThreadsOf;
      if (2 * i >= wide.packs * kPack) continue;
      leave_share(p, out, blockIdx.x, 2 * i, low[pair]);
      leave_share(p, out, blockIdx.x, 2 * i + 1, high[pair]);
    }
  }
};

template <int Threads, int Held, bool Sum>
__global__ void __launch_bounds__((Wide<Threads, Held, Sum>::kThreadsOf),
                                  Threads >= kWave && Held == 4 ? 1 : 2)
    wide_backward(Problem p, float* out) {
  using W = Wide<Threads, Held, Sum>;
  W wide(p);
  const int team = static_cast<int>(threadIdx.x) / Threads, thread = static_cast<int>(threadIdx.x) % Threads;
  const std::int64_t start = std::int64_t{blockIdx.x} * kBlock;
  const int count = static_cast<int>(p.axes.rows - start < kBlock ? p.axes.rows - start : kBlock);
  const auto row_at = [&](int step) {  // rows past the end repeat the last one
    return start + (step + team < count ? step + team : count - 1);
  };
  const auto ask = [&](int step, int which) {
    const std::int64_t row = row_at(step);
    const rows::Bytes16 *x = row_of(p.x, row), *d_y = row_of(p.d_y, row);
#pragma unroll
    for (int c = 0; c < Held; ++c)
      if (const int i = thread + c * Threads; i < wide.packs) {
        send(wide.row(which, 0, team) + i, x + i);
        send(wide.row(which, 1, team) + i, d_y + i);
        if constexpr (Sum) send(wide.row(which, 2, team) + i, row_of(p.d_sum, row) + i);
      }
  };
  rows::Bytes16 w[Held] = {};
#pragma unroll
  for (int c = 0; c < Held; ++c)
    if (const int i = thread + c * Threads; i < wide.packs)
      w[c] = static_cast<const rows::Bytes16*>(p.weight)[i];
  const float offset = p.offset ? 1.0f : 0.0f;
  Chains<W> chains;
  ask(0, 0);
  for (int step = 0; step < count; step += W::kRows) {
    const std::int64_t row = row_at(step);
    const int half = step / W::kRows % 2;
    arrived();
    __syncthreads();  // and the other half was read
    if (step + W::kRows < count) ask(step + W::kRows, 1 - half);
    const rows::Bytes16 *x = wide.row(half, 0, team), *d_y = wide.row(half, 1, team);
    float a[Held][kPack], g[Held][kPack], sums[W::kSums][kPack] = {};
#pragma unroll
    for (int c = 0; c < Held; ++c) {
      const int i = thread + c * Threads;
      widen(i < wide.packs ? x[i] : rows::Bytes16{}, a[c]);
    }
    float r;
    if (p.rstd) {
      r = rows::load(p.rstd.type, p.rstd.row(p.axes, row), 0);
    } else {
#pragma unroll
      for (int c = 0; c < Held; ++c)
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          sums[c % W::kSums][k] = fused(a[c][k], a[c][k], sums[c % W::kSums][k]);
      r = reciprocal(wide.total(sums, 0), p.width, p.eps);
#pragma unroll
      for (int c = 0; c < W::kSums; ++c)
#pragma unroll
        for (int k = 0; k < kPack; ++k) sums[c][k] = 0;
    }
    if (thread == 0) wide.r[half * W::kRows + team] = r;
#pragma unroll
    for (int c = 0; c < Held; ++c) {
      const int i = thread + c * Threads;
      float weight[kPack];
      widen(w[c], weight);
      widen(i < wide.packs ? d_y[i] : rows::Bytes16{}, g[c]);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        a[c][k] = a[c][k] * r;
        g[c][k] = g[c][k] * (p.offset ? offset + weight[k] : weight[k]);
        const float more = fused(g[c][k], a[c][k], sums[c % W::kSums][k]);
        sums[c % W::kSums][k] = i < wide.packs ? more : sums[c % W::kSums][k];
      }
    }
    const float mean = wide.total(sums, 1) / static_cast<float>(p.width);
    if (step + team < count) {
#pragma unroll
      for (int c = 0; c < Held; ++c) {
        const int i = thread + c * Threads;
        if (i >= wide.packs) continue;
#pragma unroll
        for (int k = 0; k < kPack; ++k) g[c][k] = gradient(r, a[c][k], mean, g[c][k]);
        if constexpr (Sum) {
          float more[kPack];
          widen(wide.row(half, 2, team)[i], more);
#pragma unroll
          for (int k = 0; k < kPack; ++k) g[c][k] = g[c][k] + more[k];
        }
        if (p.d_x) row_of(p.d_x, row)[i] = packed(g[c]);
        if (p.d_residual) row_of(p.d_residual, row)[i] = packed(g[c]);
      }
    }
    if (!out) continue;
    if constexpr (Threads <= kWave) __syncthreads();
    chains.add(wide, half, count - step < W::kRows ? count - step : W::kRows);
  }
  if (out) chains.store(p, wide, out);
}

// Blocks that are enough for a GPU, each of which takes as long for its 128 rows as a whole one for few. Of short rows a block
// has as many steps, for less.
inline constexpr std::int64_t kWideBlocks = 96, kShort = 512;

template <int Threads, int Held, bool Sum>
bool launch_wide(const Problem& p, float* shares, hipStream_t stream) {
  const std::size_t bytes = Wide<Threads, Held, Sum>::bytes(p);
  if (!allow_shared(wide_backward<Threads, Held, Sum>, bytes)) return false;
  hipLaunchKernelGGL((wide_backward<Threads, Held, Sum>), dim3(static_cast<unsigned>(p.blocks())),
                     dim3(Wide<Threads, Held, Sum>::kThreadsOf), bytes, stream, p, shares);
  return true;
}
// Whether the shares of d_weight, if `shares`, and all else are under way; `p` has whole packs.
inline bool launch_wide_backward(const Problem& p, float* shares, hipStream_t stream,
                                 std::int64_t blocks = kWideBlocks) {
  if (p.gate || !p.weight || p.axes.count != 1) return false;
  const bool suits = p.width <= kShort || (p.width > kLanes && p.width <= Wide<128, 2, false>::kMost);
  if (!p.d_weight && !suits) return false;
  const bool once = p.d_weight && p.axes.rows <= (p.width > kLanes ? Wide<128, 4, false>::kRows
                                                                   : Wide<kWave, 4, false>::kRows);
  if (!once && p.blocks() < (p.width < kShort ? 3 * blocks : blocks)) return false;
  const auto with = [&]<int Threads, int Held>() {
    return p.d_sum ? launch_wide<Threads, Held, true>(p, shares, stream)
                   : launch_wide<Threads, Held, false>(p, shares, stream);
  };
  if (p.width <= Wide<8, 4, false>::kMost) return with.template operator()<8, 4>();
  if (p.width <= Wide<16, 4, false>::kMost) return with.template operator()<16, 4>();
  if (p.width <= Wide<kWave, 4, false>::kMost) return with.template operator()<kWave, 4>();
  if (p.width <= Wide<128, 2, false>::kMost) return with.template operator()<128, 2>();
  return p.width <= Wide<128, 4, false>::kMost && with.template operator()<128, 4>();
}

}  // namespace rlk::simt::rms_norm
