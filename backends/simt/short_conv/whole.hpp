// short_conv's kernels for rows of bf16 that lie on 16 bytes (rows::lies_whole), which is what models have: y and d_x in one
// walk down the rows. A thread has a few neighbouring channels and a run of rows; pointers run, the last rows stay in registers
// as fp32, and the next ones are on their way to shared memory while a few are computed. The walk is cut where a sequence begins,
// so inside it nothing asks for a row's sequence.
//
// By bytes the forward is a copy and the backward three halves of one; at 2.9 TB/s an SM of an H100 has 38 instruction slots an
// element for the first and 57 for the second. They take some 18 and 42: a forward silu is computed approximately and redone
// where its rounding to bf16 could differ (silu.hpp); a gradient is summed in fp32, where all of its bits matter.
#pragma once

#include "simt/async.hpp"
#include "simt/rows.hpp"
#include "simt/short_conv/silu.hpp"

namespace rlk::simt::short_conv::whole {

using conv32::Parameter;
using conv32::Problem;
using conv32::Span;
using conv32::State;

inline constexpr int kThreads = 128;
// Blocks that a multiprocessor has at a time, forward and backward.
inline constexpr int kBlocks = 6, kBlocksBack = 4;
// Rows that are fetched together, and channels of a thread. A ring of as many rows holds what the longest filter needs, at places
// known when it is compiled.
inline constexpr int kStep = 4, kCount = 4;
static_assert(kStep >= conv32::kMostTaps);

// Channels of one thread.
template <int Count>
struct alignas(2 * Count) Halves {
  std::uint32_t word[Count / 2];
};
template <int Count>
using Ring = float[kStep][Count];

template <int Count>
__device__ __forceinline__ Halves<Count> fetch(const char* at) {
  return *reinterpret_cast<const Halves<Count>*>(at);
}
// A word's two bf16 numbers. Of what it could compute again a compiler would keep the word, and compute it for every tap.
__device__ __forceinline__ float low_half(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  float number;
  asm("shl.b32 %0, %1, 16;" : "=f"(number) : "r"(word));
  return number;
#else
  return bits_float(word << 16);
#endif
}
__device__ __forceinline__ float high_half(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  float number;
  asm("and.b32 %0, %1, 0xffff0000;" : "=f"(number) : "r"(word));
  return number;
#else
  return bits_float(word & 0xffff0000u);
#endif
}
template <int Count>
__device__ __forceinline__ void unpack(const Halves<Count>& from, float (&to)[Count]) {
#pragma unroll
  for (int k = 0; k < Count; k += 2)
    to[k] = low_half(from.word[k / 2]), to[k + 1] = high_half(from.word[k / 2]);
}
template <int Count>
__device__ __forceinline__ void store(char* at, const float (&from)[Count]) {
  Halves<Count> packed;
#pragma unroll
  for (int k = 0; k < Count; k += 2) packed.word[k / 2] = rows::pair_of<bf16>(from[k], from[k + 1]);
  *reinterpret_cast<Halves<Count>*>(at) = packed;
}

// `Total` neighbouring numbers of bf16 or fp32, from a place that is a multiple of Count.
template <int Count, int Total>
__device__ __forceinline__ void numbers(const Parameter& from, std::int64_t at, float (&to)[Total]) {
  static_assert(Total % Count == 0 && Count % 4 == 0);
  if (from.type == rows::Type::f32) {
    const auto* words = reinterpret_cast<const rows::Bytes16*>(static_cast<const float*>(from.data) + at);
#pragma unroll
    for (int k = 0; k < Total; ++k) to[k] = bits_float(words[k / 4].word[k % 4]);
    return;
  }
  const char* halves = static_cast<const char*>(from.data) + 2 * at;
#pragma unroll
  for (int i = 0; i < Total; i += Count) {
    float some[Count];
    unpack(fetch<Count>(halves + 2 * i), some);
#pragma unroll
    for (int k = 0; k < Count; ++k) to[i + k] = some[k];
  }
}

// What a thread keeps of its channels: [tap][channel].
template <int Taps, int Count>
struct Filter {
  float w[Taps][Count], bias[Count];
  __device__ __forceinline__ Filter(const Problem& p, std::int64_t channel) {
    float flat[Taps * Count];
    numbers<Count>(p.weight, channel * Taps, flat);
#pragma unroll
    for (int t = 0; t < Taps; ++t)
#pragma unroll
      for (int k = 0; k < Count; ++k) w[t][k] = flat[k * Taps + t];
#pragma unroll
    for (int k = 0; k < Count; ++k) bias[k] = -0.0f;  // changes no number
    if (p.bias) numbers<Count>(p.bias, channel, bias);
  }
  // The argument of silu, whose newest input is at `newest` of the ring.
  template <bool Bias>
  __device__ __forceinline__ Numbers<Count> sum(const Ring<Count>& x, int newest) const {
    Numbers<Count> z;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      z.at[k] = 0;
#pragma unroll
      for (int t = 0; t < Taps; ++t)
        z.at[k] = fused(w[t][k], x[(newest + kStep - (Taps - 1) + t) % kStep][k], z.at[k]);
      if constexpr (Bias) z.at[k] = add_rn(z.at[k], bias[k]);
    }
    return z;
  }
};

// A thread's channels of a tensor's rows.
struct Column {
  char* at = nullptr;
  std::int64_t step = 0;
  __device__ __forceinline__ Column(const rows::Tensor& t, std::int64_t channel, std::int64_t row) {
    if (t) step = 2 * t.stride[0], at = static_cast<char*>(t.data) + row * step + 2 * channel;
  }
};

// Rows of some tensors' columns from their first on, `count` of them, on their way through shared memory: in groups of kStep, of
// which two are under way while one is taken. A thread reads what it sent itself.
template <int Tensors>
class Feed {
 public:
  static constexpr int kGroups = 3, kGroup = Tensors * kStep * kThreads;
  struct Room {
    Halves<kCount> piece[kGroups * kGroup];
  };
  // Asks for the first groups.
  template <class... Columns>
  __device__ __forceinline__ Feed(Room& room, int count, const Columns&... columns)
      : from_{columns...}, first_(room.piece + threadIdx.x), to_(first_), at_(first_), count_(count) {
    at_ += (kGroups - 1) * kGroup;
#pragma unroll
    for (int g = 0; g + 1 < kGroups; ++g) ask();
  }
  // The next group, which is there then; one more is asked for.
  __device__ __forceinline__ void advance() {
    ask();
    arrived_but<kGroups - 1>();
    move(at_);
  }
  // Row `a` of the group.
  __device__ __forceinline__ Halves<kCount> row(int tensor, int a) const {
    return at_.get((tensor * kStep + a) * kThreads);
  }

 private:
  __device__ __forceinline__ void move(Shelf<Halves<kCount>>& group) const {
    group += kGroup;
    if (group - first_ == kGroups * kGroup) group = first_;
  }
  __device__ __forceinline__ void ask() {
#pragma unroll
    for (int a = 0; a < kStep; ++a)
#pragma unroll
      for (int n = 0; n < Tensors; ++n) {
        if (asked_ + a < count_) to_.send((n * kStep + a) * kThreads, from_[n].at);
        from_[n].at += from_[n].step;
      }
    end_group();
    asked_ += kStep;
    move(to_);
  }
  Column from_[Tensors];
  Shelf<Halves<kCount>> first_, to_, at_;  // the first group, the next to be asked for, the one that is taken
  int count_, asked_ = 0;
};

// The inputs before `row`, placed as if the ring's next were its first.
template <int Taps, int Count>
__device__ __forceinline__ void recall(const Problem& p, const Span& s, std::int64_t row,
                                       std::int64_t channel, Ring<Count>& x) {
#pragma unroll
  for (int t = 0; t < Taps - 1; ++t) {
    float(&to)[Count] = x[kStep - (Taps - 1) + t];
    const void* from = p.input(s, row - s.begin - (Taps - 1) + t);
#pragma unroll
    for (int k = 0; k < Count; ++k) to[k] = 0;
    if (from) unpack(fetch<Count>(static_cast<const char*>(from) + 2 * channel), to);
  }
}

// A block's threads are neighbouring channels, its number along x is that of a run of rows.
__device__ __forceinline__ std::int64_t channel_of(int count) {
  return (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * count;
}
__device__ __forceinline__ std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

template <int Taps, int Count, bool Bias>
__global__ void __launch_bounds__(kThreads, kBlocks) forward(Problem p, int run) {
  __shared__ __attribute__((aligned(16))) Feed<1>::Room room;
  const std::int64_t channel = channel_of(Count), first = std::int64_t{blockIdx.x} * run,
                     last = smaller(first + run, p.axes.rows);
  if (channel >= p.width) return;
  for (std::int64_t row = first; row < last;) {
    const Span s = p.sequence_of(row);
    const int count = static_cast<int>(smaller(s.end, last) - row);
    Feed<1> x(room, count, Column(p.x, channel, row));
    const Filter<Taps, Count> f(p, channel);
    Column y(p.y, channel, row);
    Ring<Count> ring;
    recall<Taps>(p, s, row, channel, ring);
    const auto output = [&](int a) {
      unpack(x.row(0, a), ring[a]);
      Numbers<Count> z = f.template sum<Bias>(ring, a);
      silu_for_bf16(z);
      store(y.at, z.at);
      y.at += y.step;
    };
    int i = 0;
#pragma unroll 1
    for (; i + kStep <= count; i += kStep) {
      x.advance();
#pragma unroll
      for (int a = 0; a < kStep; ++a) output(a);
    }
    if (i < count) {
      x.advance();
#pragma unroll
      for (int a = 0; a < kStep; ++a) {
        if (i + a >= count) break;
        output(a);
      }
    }
    row += count;
  }
}

// One block's part of d_weight and d_bias.
template <int Taps, int Count, bool Bias>
struct Share {
  float sum[Taps + Bias][Count] = {};
  __device__ __forceinline__ void add(const Ring<Count>& x, int newest, const float (&g)[Count]) {
#pragma unroll
    for (int k = 0; k < Count; ++k) {
#pragma unroll
      for (int t = 0; t < Taps; ++t)
        sum[t][k] = fused(g[k], x[(newest + kStep - (Taps - 1) + t) % kStep][k], sum[t][k]);
      if constexpr (Bias) sum[Taps][k] = add_rn(sum[Taps][k], g[k]);
    }
  }
  __device__ __forceinline__ void write(float* to, std::int64_t width) const {
#pragma unroll
    for (int t = 0; t < Taps + Bias; ++t) {
      auto* words = reinterpret_cast<rows::Bytes16*>(to + t * width);
#pragma unroll
      for (int k = 0; k < Count; ++k) words[k / 4].word[k % 4] = float_bits(sum[t][k]);
    }
  }
};

// The gradient of an input: of its outputs the last one's is at `newest` of the ring, and the first `outputs` of them exist.
template <int Taps, int Count>
__device__ __forceinline__ void input_gradient(const Filter<Taps, Count>& f, const Ring<Count>& g, int newest,
                                               std::int64_t outputs, float (&sum)[Count]) {
#pragma unroll
  for (int j = Taps - 1; j >= 0; --j)
    if (j < outputs)
#pragma unroll
      for (int k = 0; k < Count; ++k)
        sum[k] = fused(f.w[Taps - 1 - j][k], g[(newest + kStep - (Taps - 1) + j) % kStep][k], sum[k]);
}
// The same among a sequence's last inputs, where `missing` outputs come after its end.
template <int Taps, int Count>
__device__ __forceinline__ void last_gradient(const Problem& p, const Span& s, const Filter<Taps, Count>& f,
                                              const Ring<Count>& g, int newest, int missing,
                                              std::int64_t channel, float (&sum)[Count]) {
  if (p.d_final) {
    const Parameter row{p.d_final.row(s.number, missing - 1), p.d_final.type};
    numbers<Count>(row, channel, sum);
  }
  input_gradient<Taps>(f, g, newest, Taps - missing, sum);
}

// A thread's way down the rows of one sequence that are its run's, and for the gradients of the last of them Taps - 1 further.
template <int Taps, int Count, bool Bias, bool Sums, bool Inputs>
struct Descent {
  const Problem& p;
  const Filter<Taps, Count>& f;
  Share<Taps, Count, Bias>& share;
  Span s;
  std::int64_t channel;
  int count;        // rows of the run
  int until, left;  // rows that it needs, and those of them that the sequence has
  Feed<2> feed;     // x and d_y
  Column d_x;
  Ring<Count> x = {}, g = {};

  __device__ __forceinline__ Descent(const Problem& problem, const Filter<Taps, Count>& filter,
                                     Share<Taps, Count, Bias>& sums, Feed<2>::Room& room, const Span& span,
                                     std::int64_t first, std::int64_t last, std::int64_t at)
      : p(problem),
        f(filter),
        share(sums),
        s(span),
        channel(at),
        count(static_cast<int>(smaller(s.end, last) - first)),
        until(Inputs ? count + Taps - 1 : count),
        left(static_cast<int>(smaller(s.end - first, until))),
        feed(room, left, Column(p.x, channel, first), Column(p.d_y, channel, first)),
        d_x(p.d_x, channel, first) {
    recall<Taps>(p, s, first, channel, x);
  }

  // The gradient of a row's sum, whose place in the rings is a.
  __device__ __forceinline__ void output(int a) {
    unpack(feed.row(0, a), x[a]);
    Numbers<Count> d;
    unpack(feed.row(1, a), d.at);
    d_silu_of(d, f.template sum<Bias>(x, a));
#pragma unroll
    for (int k = 0; k < Count; ++k) g[a][k] = d.at[k];
  }
  __device__ __forceinline__ void put(const float (&sum)[Count]) {
    store(d_x.at, sum);
    d_x.at += d_x.step;
  }
  // A row of the run, which the sequence has; then the gradient of the input of row i - (Taps - 1).
  __device__ __forceinline__ void inner(int i, int a) {
    output(a);
    if constexpr (Sums) share.add(x, a, g[a]);
    if constexpr (Inputs) {
      float sum[Count] = {};
      input_gradient<Taps>(f, g, a, Taps, sum);
      if (i >= Taps - 1) put(sum);
    }
  }
  // The same of a row that may be behind the run or the sequence.
  __device__ __forceinline__ void outer(int i, int a) {
    if (i < left) output(a);
    if (Sums && i < count) share.add(x, a, g[a]);
    if (!Inputs || i < Taps - 1) return;
    float sum[Count] = {};
    if (i < left)
      input_gradient<Taps>(f, g, a, Taps, sum);
    else
      last_gradient<Taps>(p, s, f, g, a, i - left + 1, channel, sum);
    put(sum);
  }
  // Rows are four at a time; those that may be outside have a loop of their own, since what asks for it is half the code.
  __device__ __forceinline__ void run() {
    const int steps = (left < count ? left : count) / kStep * kStep;
    int i = 0;
#pragma unroll 1
    for (; i < steps; i += kStep) {
      feed.advance();
#pragma unroll
      for (int a = 0; a < kStep; ++a) inner(i + a, a);
    }
#pragma unroll 1
    for (; i < until; i += kStep) {
      feed.advance();
#pragma unroll
      for (int a = 0; a < kStep; ++a) {
        if (i + a >= until) break;
        outer(i + a, a);
      }
    }
  }
};

template <int Taps, int Count, bool Bias, bool Sums, bool Inputs>
__global__ void __launch_bounds__(kThreads, kBlocksBack) backward(Problem p, int run, float* shares) {
  const std::int64_t channel = channel_of(Count), first = std::int64_t{blockIdx.x} * run,
                     last = smaller(first + run, p.axes.rows);
  if (channel >= p.width) return;
  __shared__ __attribute__((aligned(16))) Feed<2>::Room room;
  const Filter<Taps, Count> f(p, channel);
  Share<Taps, Count, Bias> share;
  for (std::int64_t row = first; row < last;) {
    Descent<Taps, Count, Bias, Sums, Inputs> d(p, f, share, room, p.sequence_of(row), row, last, channel);
    d.run();
    row += d.count;
  }
  if constexpr (Sums) share.write(shares + blockIdx.x * p.share() + channel, p.width);
}

// Whether a call's rows are what these kernels are for.
inline bool lies_whole(const State& s) {
  return !s || (reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0 && s.sequence % rows::kPack == 0 &&
                s.tap % rows::kPack == 0);
}
inline bool serves(const Problem& p) {
  const auto lies = [&](const rows::Tensor& t) { return rows::lies_whole(p.axes, t); };
  const auto starts = [](const Parameter& n) { return reinterpret_cast<std::uintptr_t>(n.data) % 16 == 0; };
  return p.axes.count == 1 && p.x.type == rows::Type::bf16 && p.width % rows::kPack == 0 &&
         p.width <= std::int64_t{1} << 24 && lies(p.x) && lies(p.y) && lies(p.d_y) && lies(p.d_x) &&
         starts(p.weight) && starts(p.bias) && lies_whole(p.initial) && lies_whole(p.d_final);
}

// f.operator()<taps, bias>()
template <class F>
void for_filter(int taps, bool bias, F f) {
  const auto with = [&]<int Taps>() {
    if (bias)
      f.template operator()<Taps, true>();
    else
      f.template operator()<Taps, false>();
  };
  if (taps == 2)
    with.template operator()<2>();
  else if (taps == 3)
    with.template operator()<3>();
  else
    with.template operator()<4>();
}

// Blocks and their threads for runs of rows.
struct Launch {
  dim3 grid, block;
  Launch(const Problem& p, int run, int count) {
    const std::int64_t lanes = p.width / count, runs = (p.axes.rows + run - 1) / run;
    block = dim3(static_cast<unsigned>(lanes < kThreads ? lanes : kThreads));
    grid = dim3(static_cast<unsigned>(runs), static_cast<unsigned>((lanes + kThreads - 1) / kThreads));
  }
};

inline void launch_forward(const Problem& p, int run, hipStream_t stream) {
  const Launch l(p, run, kCount);
  for_filter(p.taps, static_cast<bool>(p.bias), [&]<int Taps, bool Bias>() {
    hipLaunchKernelGGL((forward<Taps, kCount, Bias>), l.grid, l.block, 0, stream, p, run);
  });
}
inline void launch_backward(const Problem& p, int run, float* shares, hipStream_t stream) {
  const Launch l(p, run, kCount);
  for_filter(p.taps, p.bias || p.d_bias, [&]<int Taps, bool Bias>() {
    const auto kernel = !shares ? backward<Taps, kCount, Bias, false, true>
                        : p.d_x ? backward<Taps, kCount, Bias, true, true>
                                : backward<Taps, kCount, Bias, true, false>;
    hipLaunchKernelGGL(kernel, l.grid, l.block, 0, stream, p, run, shares);
  });
}

}  // namespace rlk::simt::short_conv::whole
