// The portable GPU kernels of short_conv (arithmetic conv32): the bits of the native backend on every GPU.
//
// forward, backward    a thread has one pack of eight channels in a run of rows, and keeps the last inputs (and gradients) of its
//                      channels in registers: a row is read once, but for the W - 1 before a run. Neighbours in a wave have
//                      neighbouring packs. What is ahead in the run is read before it is computed
// states, d_states     a thread has a pack of a sequence's state
// join                 the shares of a sum over the blocks of rows are added, ascending in fp64
//
// Rows of bf16 that lie on 16 bytes have kernels of their own, in whole.hpp, and in split.hpp for sums over few of them. A run's
// length changes no bit; where sums over rows are wanted it is a block of them, in split.hpp divided among threads.
#pragma once

#include "arithmetic/short_conv/conv.hpp"
#include "simt/join.hpp"
#include "simt/rows.hpp"
#include "simt/short_conv/silu.hpp"
#include "simt/short_conv/split.hpp"
#include "simt/short_conv/sums.hpp"
#include "simt/short_conv/whole.hpp"

namespace rlk::simt::short_conv {

using namespace rlk::conv32;
using rows::kPack;
using rows::RowOf;

inline constexpr int kThreads = 128;
// Rows that are read before they are computed. What is decided as the kernel runs is much code for each of them.
template <class T>
inline constexpr int kAhead = __is_same(T, rows::Any) ? 1 : 4;

using Pack = float[kPack];

RLK_HD std::int64_t packs(const Problem& p) { return (p.width + kPack - 1) / kPack; }

// What a thread has: a pack of channels, and the run, sequence or whatever else there are many of.
struct Place {
  std::int64_t of, channel;
  int n;
  __device__ __forceinline__ explicit Place(const Problem& p) {
    const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    of = at / packs(p);
    channel = (at - of * packs(p)) * kPack;
    n = rows::pack_at(channel, p.width);
  }
};

// The filter of a thread's channels.
template <int Taps>
struct Filter {
  Pack w[Taps], bias;
  __device__ __forceinline__ Filter(const Problem& p, const Place& at) {
    // Weights of a pack are neighbours: as many packs as there are taps.
    Pack flat[Taps];
#pragma unroll
    for (int t = 0; t < Taps; ++t) {
      const int left = at.n * Taps - t * kPack;
      rows::get_pack<rows::Any>(p.weight.type, p.weight.data, at.channel * Taps + t * kPack,
                                left >= kPack ? kPack
                                : left > 0    ? left
                                              : 0,
                                flat[t]);
    }
#pragma unroll
    for (int t = 0; t < Taps; ++t)
#pragma unroll
      for (int k = 0; k < kPack; ++k) w[t][k] = flat[(k * Taps + t) / kPack][(k * Taps + t) % kPack];
    if (p.bias) rows::get_pack<rows::Any>(p.bias.type, p.bias.data, at.channel, at.n, bias);
  }
};

// An input of a sequence, wherever it lies.
template <class T>
__device__ __forceinline__ void input(const Problem& p, const Span& s, std::int64_t number, const Place& at,
                                      float* to) {
  const void* row = p.input(s, number);
  Pack x;
#pragma unroll
  for (int k = 0; k < kPack; ++k) x[k] = 0;
  if (row) rows::get_pack<T>(p.x.type, const_cast<void*>(row), at.channel, at.n, x);
#pragma unroll
  for (int k = 0; k < kPack; ++k) to[k] = x[k];
}

// The inputs of the row that comes: `x[Taps - 1]` is its own.
template <class T, int Taps>
struct Window {
  Span s;
  Pack x[Taps] = {};

  // Makes ready for a row: from memory where a run or a sequence starts.
  __device__ __forceinline__ void move_to(const Problem& p, std::int64_t row, bool start, const Place& at) {
    if (start || row >= s.end) {
      s = p.sequence_of(row);
#pragma unroll
      for (int t = 0; t < Taps - 1; ++t) input<T>(p, s, row - s.begin - (Taps - 1) + t, at, x[t]);
    } else {
#pragma unroll
      for (int t = 0; t < Taps - 1; ++t)
#pragma unroll
        for (int k = 0; k < kPack; ++k) x[t][k] = x[t + 1][k];
    }
  }
  // What goes through silu.
  __device__ __forceinline__ float sum(const Problem& p, const Filter<Taps>& f, int k) const {
    float z = 0;
#pragma unroll
    for (int t = 0; t < Taps; ++t) z = fused(f.w[t][k], x[t][k], z);
    return p.bias ? add_rn(z, f.bias[k]) : z;
  }
};

template <class T, int Taps>
__global__ void __launch_bounds__(kThreads) forward(Problem p, int run) {
  const Place at(p);
  const std::int64_t first = at.of * run, last = first + run < p.axes.rows ? first + run : p.axes.rows;
  if (first >= p.axes.rows) return;
  const Filter<Taps> f(p, at);
  Window<T, Taps> window;
  for (std::int64_t row = first; row < last; row += kAhead<T>) {
    rows::Raw<T> xs[kAhead<T>]{};
#pragma unroll
    for (int a = 0; a < kAhead<T>; ++a)
      if (row + a < last) xs[a] = RowOf(p.axes, p.x, row + a).template fetch<T>(at.channel, at.n);
#pragma unroll
    for (int a = 0; a < kAhead<T>; ++a) {
      if (row + a >= last) break;
      window.move_to(p, row + a, row + a == first, at);
      rows::unpack<T>(p.x.type, xs[a], window.x[Taps - 1]);
      Numbers<kPack> y;
#pragma unroll
      for (int k = 0; k < kPack; ++k) y.at[k] = window.sum(p, f, k);
      y = silu_of(y);
      RowOf(p.axes, p.y, row + a).template set<T>(at.channel, at.n, y.at);
    }
  }
}

// Rows ascending: where the result is the initial state itself, what is read was not written yet.
template <class T>
__global__ void __launch_bounds__(kThreads) states(Problem p) {
  const Place at(p);
  if (at.of >= p.sequences) return;
  const Span s = p.sequence(at.of);
  for (int r = 0; r < p.back(); ++r) {
    Pack x;
    input<T>(p, s, s.length() - p.back() + r, at, x);
    rows::put_pack<T>(p.final.type, p.final.row(at.of, r), at.channel, at.n, x);
  }
}

// The gradient of input `number` of a sequence: `g[j]` is that of the sum of output number + j.
template <int Taps>
__device__ __forceinline__ void input_gradient(const Problem& p, const Span& s, std::int64_t number,
                                               const Filter<Taps>& f, const Pack (&g)[Taps], const Place& at,
                                               Pack& sum) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) sum[k] = 0;
  if (const std::int64_t r = number - (s.length() - (Taps - 1)); p.d_final && r >= 0)
    rows::get_pack<rows::Any>(p.d_final.type, p.d_final.row(s.number, r), at.channel, at.n, sum);
#pragma unroll
  for (int j = Taps - 1; j >= 0; --j)
    if (number + j >= 0 && number + j < s.length())
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[k] = fused(f.w[Taps - 1 - j][k], g[j][k], sum[k]);
}

// One block's part of d_weight and d_bias.
template <int Taps>
struct Share {
  Pack sum[Taps + 1];
  __device__ __forceinline__ Share() {
#pragma unroll
    for (int t = 0; t <= Taps; ++t)
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[t][k] = 0;
  }
  __device__ __forceinline__ void add(const Pack (&x)[Taps], const Pack& g) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
#pragma unroll
      for (int t = 0; t < Taps; ++t) sum[t][k] = fused(g[k], x[t][k], sum[t][k]);
      sum[Taps][k] = add_rn(sum[Taps][k], g[k]);
    }
  }
  __device__ __forceinline__ void write(const Problem& p, float* to, const Place& at) const {
#pragma unroll
    for (int t = 0; t <= Taps; ++t)
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k < at.n) to[t * p.width + at.channel + k] = sum[t][k];
  }
};

template <class T, int Taps>
__global__ void __launch_bounds__(kThreads) backward(Problem p, int run, float* shares) {
  const Place at(p);
  const std::int64_t first = at.of * run, last = first + run < p.axes.rows ? first + run : p.axes.rows;
  if (first >= p.axes.rows) return;
  const Filter<Taps> f(p, at);
  Window<T, Taps> window;
  Span of_input;
  Share<Taps> share;
  Pack g[Taps];  // of the sums of the last rows, the newest last
#pragma unroll
  for (int t = 0; t < Taps; ++t)
#pragma unroll
    for (int k = 0; k < kPack; ++k) g[t][k] = 0;
  const std::int64_t end = p.d_x ? last + Taps - 1 : last;
  for (std::int64_t row = first; row < end; row += kAhead<T>) {
    rows::Raw<T> xs[kAhead<T>]{}, d_ys[kAhead<T>]{};
#pragma unroll
    for (int a = 0; a < kAhead<T>; ++a)
      if (row + a < end && row + a < p.axes.rows) {
        xs[a] = RowOf(p.axes, p.x, row + a).template fetch<T>(at.channel, at.n);
        d_ys[a] = RowOf(p.axes, p.d_y, row + a).template fetch<T>(at.channel, at.n);
      }
#pragma unroll
    for (int a = 0; a < kAhead<T>; ++a) {
      const std::int64_t here = row + a, number = here - (Taps - 1);
      if (here >= end) break;
#pragma unroll
      for (int t = 0; t < Taps - 1; ++t)
#pragma unroll
        for (int k = 0; k < kPack; ++k) g[t][k] = g[t + 1][k];
      if (here < p.axes.rows) {
        window.move_to(p, here, here == first, at);
        rows::unpack<T>(p.x.type, xs[a], window.x[Taps - 1]);
        rows::unpack<T>(p.d_y.type, d_ys[a], g[Taps - 1]);
#pragma unroll
        for (int k = 0; k < kPack; ++k) g[Taps - 1][k] = d_silu(g[Taps - 1][k], window.sum(p, f, k));
        if (shares && here < last) share.add(window.x, g[Taps - 1]);
      }
      if (!p.d_x || number < first) continue;
      if (number >= of_input.end) of_input = p.sequence_of(number);
      Pack sum;
      input_gradient(p, of_input, number - of_input.begin, f, g, at, sum);
      RowOf(p.axes, p.d_x, number).template set<rows::Any>(at.channel, at.n, sum);
    }
  }
  if (shares) share.write(p, shares + at.of * p.share(), at);
}

// The gradient of the sum of one output.
template <int Taps>
RLK_DEVICE_CALL void sum_gradient(const Problem& p, const Span& s, std::int64_t number, const Filter<Taps>& f,
                                  const Place& at, Pack& g) {
  Window<rows::Any, Taps> window;
  for (int t = 0; t < Taps; ++t) input<rows::Any>(p, s, number - (Taps - 1) + t, at, window.x[t]);
  RowOf(p.axes, p.d_y, s.begin + number).template get<rows::Any>(at.channel, at.n, g);
  for (int k = 0; k < kPack; ++k) g[k] = d_silu(g[k], window.sum(p, f, k));
}

template <int Taps>
__global__ void __launch_bounds__(kThreads) d_states(Problem p) {
  const Place at(p);
  if (at.of >= p.sequences) return;
  const Filter<Taps> f(p, at);
  const Span s = p.sequence(at.of);
  // Of the sums of the first outputs.
  Pack first[Taps];
#pragma unroll
  for (int j = 0; j < Taps; ++j)
#pragma unroll
    for (int k = 0; k < kPack; ++k) first[j][k] = 0;
#pragma unroll
  for (int j = 0; j < Taps - 1; ++j)
    if (j < s.length()) sum_gradient(p, s, j, f, at, first[j]);
#pragma unroll
  for (int r = 0; r < Taps - 1; ++r) {
    const int number = r - (Taps - 1);
    Pack g[Taps], sum;
#pragma unroll
    for (int j = 0; j < Taps; ++j)
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        g[j][k] = number + j >= 0 ? first[number + j < 0 ? 0 : number + j][k] : 0;
    input_gradient(p, s, number, f, g, at, sum);
    rows::put_pack<rows::Any>(p.d_initial.type, p.d_initial.row(at.of, r), at.channel, at.n, sum);
  }
}

// Few blocks: a thread a sum.
__global__ void __launch_bounds__(kThreads) join(Problem p, const float* shares) {
  constexpr int kShares = 64;  // that are read before they are added
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= sums(p) || !result_of(p, at)) return;
  double sum = 0;
  const int blocks = static_cast<int>(p.blocks());
  const float* from = shares + at;
  for (int first = 0; first < blocks; first += kShares) {
    float share[kShares];
#pragma unroll
    for (int k = 0; k < kShares; ++k, from += p.share()) share[k] = first + k < blocks ? *from : 0.0f;
#pragma unroll
    for (int k = 0; k < kShares; ++k)
      if (first + k < blocks) sum += static_cast<double>(share[k]);
  }
  store_sum(p, at, sum);
}
// Many blocks: eight sums a block.
inline constexpr int kJoinThreads = 256;
__global__ void __launch_bounds__(kJoinThreads) join_many(Problem p, const float* shares) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kJoinChannels + threadIdx.x % kJoinChannels;
  const bool there = at < sums(p) && result_of(p, at);
  const double sum = ascending_sum<kJoinThreads>(shares + at, p.share(), static_cast<int>(p.blocks()), there);
  if (there && threadIdx.x < kJoinChannels) store_sum(p, at, sum);
}
inline void launch_join(const Problem& p, const float* shares, hipStream_t stream) {
  constexpr std::int64_t kMany = 256;
  const bool many = p.blocks() > kMany;
  const int each = many ? kJoinChannels : kThreads;
  hipLaunchKernelGGL((many ? join_many : join), dim3(static_cast<unsigned>((sums(p) + each - 1) / each)),
                     dim3(many ? kJoinThreads : kThreads), 0, stream, p, shares);
}

inline dim3 grid(std::int64_t threads) {
  return dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads));
}
inline std::int64_t over(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// f.operator()<type of all tensors, taps>()
template <class F>
void for_taps(const Problem& p, bool bf16, F f) {
  rows::for_type(bf16, [&]<class T>(T) {
    if (p.taps == 2)
      f.template operator()<T, 2>();
    else if (p.taps == 3)
      f.template operator()<T, 3>();
    else
      f.template operator()<T, 4>();
  });
}

// Rows that a thread of whole.hpp goes through: as many as it takes for an H200 to have all threads at once, or `many` where these
// are more than a block's. Runs begin where groups of rows do, unless sequences are shorter.
inline int whole_run_of(const Problem& p, int blocks, int many) {
  const std::int64_t threads = std::int64_t{132} * blocks * whole::kThreads,
                     step = p.cu_seqlens || p.tokens >= whole::kStep ? whole::kStep : 1,
                     run = over(over(p.axes.rows * (p.width / whole::kCount), threads), step) * step;
  return run > kBlock ? many : static_cast<int>(run);
}
// Rows that a thread goes through: more of them read less twice, as long as there are threads enough for any GPU.
inline int run_of(const Problem& p) {
  constexpr std::int64_t kEnough = std::int64_t{1} << 19;
  int run = 64;
  while (run > 1 && over(p.axes.rows, run) * packs(p) < kEnough) run /= 2;
  return run;
}

inline void launch_rows(const Problem& p, bool bf16, hipStream_t stream) {
  if (whole::serves(p)) return whole::launch_forward(p, whole_run_of(p, whole::kBlocks, 32), stream);
  const int run = run_of(p);
  for_taps(p, bf16, [&]<class T, int Taps>() {
    hipLaunchKernelGGL((forward<T, Taps>), grid(over(p.axes.rows, run) * packs(p)), dim3(kThreads), 0, stream,
                       p, run);
  });
}
inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.width == 0) return;
  const bool bf16 = p.x.type == rows::Type::bf16;
  if (p.axes.rows > 0) launch_rows(p, bf16, stream);
  // A launch of its own: the result may be the initial state, which the others read.
  if (p.final && p.sequences > 0)
    rows::for_type(bf16, [&]<class T>(T) {
      hipLaunchKernelGGL((states<T>), grid(p.sequences * packs(p)), dim3(kThreads), 0, stream, p);
    });
}

inline std::int64_t backward_bytes(const Problem& p) {
  return p.sums() && p.width != 0 ? p.blocks() * p.share() * std::int64_t{sizeof(float)} : 0;
}
inline void launch_gradients(const Problem& p, bool bf16, float* shares, hipStream_t stream) {
  if (whole::serves(p)) {
    const int rows = shares ? kBlock : whole_run_of(p, whole::kBlocksBack, kBlock);
    return whole::launch_backward(p, rows, shares, stream);
  }
  const int run = shares ? kBlock : run_of(p);
  for_taps(p, bf16, [&]<class T, int Taps>() {
    hipLaunchKernelGGL((backward<T, Taps>), grid(over(p.axes.rows, run) * packs(p)), dim3(kThreads), 0,
                       stream, p, run, shares);
  });
}
// `walks`: from how many walks of 128 rows on they are threads enough.
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream,
                            std::int64_t walks = split::kWalks) {
  if (p.width == 0) return;
  const bool bf16 = p.x.type == rows::Type::bf16, few = split::suits(p, walks);
  float* shares = p.sums() ? static_cast<float*>(workspace) : nullptr;
  if (few)
    split::launch_backward(p, shares, stream);
  else if (p.axes.rows > 0 && (p.d_x || shares))
    launch_gradients(p, bf16, shares, stream);
  if (p.d_initial && p.sequences > 0)
    for_taps(p, false, [&]<class, int Taps>() {
      hipLaunchKernelGGL((d_states<Taps>), grid(p.sequences * packs(p)), dim3(kThreads), 0, stream, p);
    });
  if (p.sums() && !(few && p.blocks() == 1)) launch_join(p, shares, stream);
}

}  // namespace rlk::simt::short_conv
