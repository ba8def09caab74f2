// The backward with sums over rows where walks of 128 rows are too few threads to fill a GPU: a share of d_weight is one chain over
// 128 rows, but only its additions need that order. So a block has the 128 rows of a share and a few channels. Its threads compute
// the gradients of the sums side by side, a few rows each, and leave them in shared memory with the inputs; from there they compute
// d_x, and one thread a channel adds its shares, row by row.
//
// An element costs some 50 instructions (whole.hpp's walk 42), a row of a chain 7; shared memory 25 KB.
#pragma once

#include "simt/short_conv/sums.hpp"
#include "simt/short_conv/whole.hpp"

namespace rlk::simt::short_conv::split {

using conv32::kBlock;
using conv32::Problem;
using conv32::Span;
using whole::Halves;
using whole::kCount;
using whole::kStep;
using whole::smaller;

inline constexpr int kThreads = 128, kChannels = 32, kLanes = kChannels / kCount;  // of a block
inline constexpr int kRows = kBlock + conv32::kMostTaps - 1;  // those behind a block are d_x's

// What a block's threads tell each other: rows are counted from the block's first.
struct Tile {
  float g[kRows][kChannels];
  std::uint16_t x[kRows][kChannels];
};

// A block's rows, and those of a thread, counted from the block's first.
struct Rows {
  std::int64_t block;
  int count, first, last;
  __device__ __forceinline__ Rows(const Problem& p, int run) : block(std::int64_t{blockIdx.x} * kBlock) {
    count = static_cast<int>(smaller(kBlock, p.axes.rows - block));
    first = static_cast<int>(threadIdx.x) / kLanes * run;
    first = first < count ? first : count;
    last = first + run < count ? first + run : count;
  }
  // How far a sequence reaches, or `most`.
  __device__ __forceinline__ int end_of(const Span& s, int most) const {
    return static_cast<int>(smaller(s.end - block, most));
  }
};

template <int Taps>
using Filter = whole::Filter<Taps, kCount>;
using Ring = whole::Ring<kCount>;

// Rows of a column from its first on, `count` of them: each is asked for kStep rows before it is taken.
struct Ahead {
  whole::Column from;
  Halves<kCount> row[kStep] = {};
  __device__ __forceinline__ Ahead(const whole::Column& column, int count) : from(column) {
#pragma unroll
    for (int a = 0; a < kStep; ++a) ask(a, a < count);
  }
  __device__ __forceinline__ void ask(int a, bool more) {
    if (more) row[a] = whole::fetch<kCount>(from.at);
    from.at += from.step;
  }
  __device__ __forceinline__ void take(int a, bool more, float (&to)[kCount]) {
    whole::unpack(row[a], to);
    ask(a, more);
  }
};

// The gradients of sums, and the inputs; the block's last rows are followed by those that d_x needs.
template <int Taps, bool Bias, bool Inputs>
__device__ __forceinline__ void outputs(const Problem& p, const Filter<Taps>& f, const Rows& rows,
                                        std::int64_t channel, int lane, Tile& tile) {
  // As far as the block's rows go: what is behind them is one sequence's.
  for (int at = rows.first; at < rows.last;) {
    const std::int64_t row = rows.block + at;
    const Span s = p.sequence_of(row);
    const int end = rows.end_of(s, Inputs && rows.last == rows.count ? rows.last + Taps - 1 : rows.last),
              count = end - at;
    Ahead xs(whole::Column(p.x, channel, row), count), d_ys(whole::Column(p.d_y, channel, row), count);
    Ring x;
    whole::recall<Taps>(p, s, row, channel, x);
#pragma unroll 1
    for (int i = 0; i < count; i += kStep) {
#pragma unroll
      for (int a = 0; a < kStep; ++a) {
        if (i + a >= count) break;
        const bool more = i + a + kStep < count;
        Numbers<kCount> d;
        *reinterpret_cast<Halves<kCount>*>(&tile.x[at + i + a][lane * kCount]) = xs.row[a];
        xs.take(a, more, x[a]);
        d_ys.take(a, more, d.at);
        d_silu_of(d, f.template sum<Bias>(x, a));
        rows::Bytes16 words;
#pragma unroll
        for (int k = 0; k < kCount; ++k) words.word[k] = float_bits(d.at[k]);
        *reinterpret_cast<rows::Bytes16*>(&tile.g[at + i + a][lane * kCount]) = words;
      }
    }
    at = end;
  }
}

template <int Taps>
__device__ __forceinline__ void inputs(const Problem& p, const Filter<Taps>& f, const Rows& rows,
                                       std::int64_t channel, int lane, const Tile& tile) {
  if (rows.first >= rows.last) return;
  const int until = rows.last + Taps - 1;
  Span s = p.sequence_of(rows.block + rows.first);
  int end = rows.end_of(s, kRows);
  whole::Column d_x(p.d_x, channel, rows.block + rows.first);
  Ring g;
#pragma unroll 1
  for (int i = rows.first; i < until; i += kStep) {
#pragma unroll
    for (int a = 0; a < kStep; ++a) {
      const int row = i + a - (Taps - 1);
      if (row >= rows.last) break;
#pragma unroll
      for (int k = 0; k < kCount; ++k) g[a][k] = tile.g[i + a][lane * kCount + k];
      if (row < rows.first) continue;
      if (row >= end) s = p.sequence_of(rows.block + row), end = rows.end_of(s, kRows);
      float sum[kCount] = {};
      if (end - row >= Taps)
        whole::input_gradient<Taps>(f, g, a, Taps, sum);
      else
        whole::last_gradient<Taps>(p, s, f, g, a, Taps - (end - row), channel, sum);
      whole::store(d_x.at, sum);
      d_x.at += d_x.step;
    }
  }
}

// A channel's shares, and the inputs of the row that was added last.
template <int Taps, bool Bias>
struct Chain {
  float sum[Taps + Bias] = {}, x[Taps] = {};
  __device__ __forceinline__ void add(float g, std::uint16_t input) {
#pragma unroll
    for (int t = 0; t + 1 < Taps; ++t) x[t] = x[t + 1];
    x[Taps - 1] = to_float(bf16{input});
#pragma unroll
    for (int t = 0; t < Taps; ++t) sum[t] = fused(g, x[t], sum[t]);
    if constexpr (Bias) sum[Taps] = add_rn(sum[Taps], g);
  }
  // The inputs before a row of a sequence.
  __device__ __forceinline__ void recall(const Problem& p, const Span& s, std::int64_t row,
                                         std::int64_t channel) {
#pragma unroll
    for (int t = 1; t < Taps; ++t) {
      const void* from = p.input(s, row - s.begin - Taps + t);
      x[t] = from ? to_float(bf16{static_cast<const std::uint16_t*>(from)[channel]}) : 0.0f;
    }
  }
};

template <int Taps, bool Bias>
__device__ __forceinline__ void add(const Problem& p, const Rows& rows, const Tile& tile,
                                    std::int64_t channel, float* shares) {
  constexpr int kAhead = 16;  // rows that are read before they are added
  const int thread = static_cast<int>(threadIdx.x);
  Chain<Taps, Bias> chain;
  for (int i = 0; i < rows.count;) {
    const Span s = p.sequence_of(rows.block + i);
    const int end = rows.end_of(s, rows.count);
    chain.recall(p, s, rows.block + i, channel);
#pragma unroll 1
    for (; i + kAhead <= end; i += kAhead) {
      float g[kAhead];
      std::uint16_t x[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) g[a] = tile.g[i + a][thread], x[a] = tile.x[i + a][thread];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) chain.add(g[a], x[a]);
    }
#pragma unroll 1
    for (; i < end; ++i) chain.add(tile.g[i][thread], tile.x[i][thread]);
  }
#pragma unroll
  for (int t = 0; t < Taps + Bias; ++t) {
    const std::int64_t at = t * p.width + channel;
    if (shares)
      shares[blockIdx.x * p.share() + at] = chain.sum[t];
    else if (result_of(p, at))
      store_sum(p, at, 0.0 + static_cast<double>(chain.sum[t]));
  }
}

// Without `shares` the call has one block of rows, whose sums are the results.
template <int Taps, bool Bias, bool Inputs>
__global__ void __launch_bounds__(kThreads, 5) backward(Problem p, int run, float* shares) {
  __shared__ __attribute__((aligned(16))) Tile tile;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first = std::int64_t{blockIdx.y} * kChannels, channel = first + lane * kCount,
                     own = first + threadIdx.x;
  const bool there = channel < p.width;
  const Filter<Taps> f(p, there ? channel : 0);
  const Rows rows(p, run);
  if (there) outputs<Taps, Bias, Inputs>(p, f, rows, channel, lane, tile);
  __syncthreads();
  if (Inputs && there) inputs<Taps>(p, f, rows, channel, lane, tile);
  if (threadIdx.x < kChannels && own < p.width) add<Taps, Bias>(p, rows, tile, own, shares);
}

// From this many walks on, a warp for more than half of an H200's schedulers, the walk has threads enough.
inline constexpr std::int64_t kWalks = 9 << 10;
inline bool suits(const Problem& p, std::int64_t walks) {
  return whole::serves(p) && p.sums() && p.axes.rows > 0 && p.blocks() * (p.width / kCount) < walks;
}

inline void launch_backward(const Problem& p, float* shares, hipStream_t stream) {
  const int rows = p.axes.rows < kBlock ? static_cast<int>(p.axes.rows) : kBlock;
  const int run = (rows * kLanes + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(p.blocks()),
                  static_cast<unsigned>((p.width + kChannels - 1) / kChannels));
  whole::for_filter(p.taps, p.bias || p.d_bias, [&]<int Taps, bool Bias>() {
    const auto kernel = p.d_x ? backward<Taps, Bias, true> : backward<Taps, Bias, false>;
    hipLaunchKernelGGL(kernel, grid, dim3(kThreads), 0, stream, p, run, p.blocks() > 1 ? shares : nullptr);
  });
}

}  // namespace rlk::simt::short_conv::split
