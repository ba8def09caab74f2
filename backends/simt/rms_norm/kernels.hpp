// The portable GPU kernels of rms_norm (arithmetic rms32): the bits of the native backend on every GPU.
//
// rows          a team of 32 lanes has a row of up to 1024 elements, one of 128 a wider row or one of few, and one of 4, 8 or 16
//               a row of whole packs of up to 128, 256 or 512. A thread takes packs of eight neighbours, so it has eight of
//               the sum's 1024 lanes, or 32; what it read first stays in registers
// shares        one thread eight channels of a block of 128 rows, one fp32 chain each: what the block adds to d_weight
// d_weight      the shares of a channel are added, ascending in fp64. Up to 128 rows are one share, which is d_weight
//
// Of rows of whole packs:
//
// held.hpp       x, or x + residual, of rows at one stride that their threads hold
// added.hpp      x + residual, which is made once, of other rows
// narrow.hpp     up to 128 wide, as heads have: a gate too; heads.hpp: all their gradients in one pass
// gradients.hpp  d_x, up to 4096 wide, and slices.hpp the shares and their sum: two launches
// wide.hpp       these gradients in one pass, of many rows or very few
#pragma once

#include "simt/join.hpp"
#include "simt/rms_norm/added.hpp"
#include "simt/rms_norm/gradients.hpp"
#include "simt/rms_norm/heads.hpp"
#include "simt/rms_norm/held.hpp"
#include "simt/rms_norm/narrow.hpp"
#include "simt/rms_norm/slices.hpp"
#include "simt/rms_norm/wide.hpp"

namespace rlk::simt::rms_norm {

template <class T, class Of>
__global__ void __launch_bounds__(kThreads, __is_same(T, rows::Any) ? 3 : 6) forward(Problem p) {
  const Of at(p);
  const RowOf x(p.axes, p.x, at.row), residual(p.axes, p.residual, at.row), gate(p.axes, p.gate, at.row),
      y(p.axes, p.y, at.row), sum(p.axes, p.sum, at.row), rstd(p.axes, p.rstd, at.row);
  rows::Raw<T> xs[Of::kHeld], residuals[Of::kHeld];
  const auto read = [&](int c, std::int64_t i, int n) {
    xs[c] = x.fetch<T>(i, n);
    if (kGeneral<T> && residual) residuals[c] = residual.fetch<T>(i, n);
  };
  const auto normalised = [&](int c, float(&a)[kPack]) {
    x.unpack<T>(xs[c], a);
    if (!kGeneral<T> || !residual) return;
    float r[kPack];
    residual.unpack<T>(residuals[c], r);
#pragma unroll
    for (int k = 0; k < kPack; ++k) a[k] = a[k] + r[k];
    rows::round_pack<T>(residual.type, a);
  };
  float sums[Of::kSums][kPack] = {};
  at.for_packs(p.width, false, read, [&](int lane, int c, std::int64_t, int) {
    float a[kPack];
    normalised(c, a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[lane][k] = fused(a[k], a[k], sums[lane][k]);  // absent: + 0
  });
  const float r = reciprocal(at.total(sums), p.width, p.eps);
  if (!at.there) return;
  if (rstd && at.first == 0) rstd.set(0, r);
  at.for_packs(p.width, true, read, [&](int, int c, std::int64_t i, int n) {
    float out[kPack];
    normalised(c, out);
    if (kGeneral<T> && sum) sum.set<T>(i, n, out);
    normalise<T>(p, i, n, r, out);
    if (kGeneral<T> && gate) {
      Eight g;
      gate.get<T>(i, n, g.at);
      multiply(out, gate_values(p.act, g).at);
    }
    y.set<T>(i, n, out);
  });
}

// d_x, d_residual and d_gate, and for the shares every row's r and, if there are, zeros in their counters. A residual is read
// again by each pass, where it is cached: its packs would take registers of every call.
template <class T, class Of>
__global__ void __launch_bounds__(kThreads, __is_same(T, rows::Any) ? 3 : 5)
    backward(Problem p, float* r_of_row, unsigned* counters) {
  clear_counters(p, counters);
  const Of at(p);
  const RowOf x(p.axes, p.x, at.row), residual(p.axes, p.residual, at.row), d_y(p.axes, p.d_y, at.row),
      gate(p.axes, p.gate, at.row), rstd(p.axes, p.rstd, at.row), d_sum(p.axes, p.d_sum, at.row),
      d_x(p.axes, p.d_x, at.row), d_residual(p.axes, p.d_residual, at.row), d_gate(p.axes, p.d_gate, at.row);
  rows::Raw<T> xs[Of::kHeld], d_ys[Of::kHeld];
  const auto read = [&](int c, std::int64_t i, int n) {
    xs[c] = x.fetch<T>(i, n);
    d_ys[c] = d_y.fetch<T>(i, n);
  };
  const auto normalised = [&](int c, std::int64_t i, int n, float(&a)[kPack]) {
    x.unpack<T>(xs[c], a);
    add_residual<T>(residual, i, n, a);
  };
  float sums[Of::kSums][kPack] = {};
  at.for_packs(p.width, false, read, [&](int lane, int c, std::int64_t i, int n) {
    float a[kPack];
    normalised(c, i, n, a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[lane][k] = fused(a[k], a[k], sums[lane][k]);
  });
  const float r = rstd ? rstd.get(0) : reciprocal(at.total(sums), p.width, p.eps);
  // The gradient of the normalised value.
  const auto inner = [&](int c, std::int64_t i, int n, float(&d)[kPack]) {
    d_y.unpack<T>(d_ys[c], d);
    if (kGeneral<T> && gate) {
      Eight g;
      gate.get<T>(i, n, g.at);
      multiply(d, gate_values(p.act, g).at);
    }
    if (p.weight) {
      float w[kPack];
      weights<T>(p, i, n, w);
      multiply(d, w);
    }
  };
#pragma unroll
  for (int c = 0; c < at.kSums; ++c)
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[c][k] = 0;
  at.for_packs(p.width, true, read, [&](int lane, int c, std::int64_t i, int n) {
    float a[kPack], d[kPack];
    normalised(c, i, n, a);
    inner(c, i, n, d);
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (k < n) sums[lane][k] = fused(d[k], a[k] * r, sums[lane][k]);
  });
  const float mean = at.total(sums) / static_cast<float>(p.width);
  if (!at.there) return;
  if (r_of_row && at.first == 0) r_of_row[at.row] = r;
  at.for_packs(p.width, true, read, [&](int, int c, std::int64_t i, int n) {
    float a[kPack], d[kPack];
    normalised(c, i, n, a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) a[k] = a[k] * r;
    if (kGeneral<T> && d_gate) {
      Eight g;
      gate.get<T>(i, n, g.at);
      float through[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) through[k] = a[k];
      if (p.weight) {
        weights<T>(p, i, n, d);
        multiply(through, d);
      }
      d_y.unpack<T>(d_ys[c], d);
      multiply(d, through);
      multiply(d, gate_slopes(p.act, g).at);
      d_gate.set<T>(i, n, d);
    }
    if (!d_x && !d_residual) return;
    inner(c, i, n, d);
#pragma unroll
    for (int k = 0; k < kPack; ++k) d[k] = gradient(r, a[k], mean, d[k]);
    if (d_sum) {
      d_sum.get<T>(i, n, a);
#pragma unroll
      for (int k = 0; k < kPack; ++k) d[k] = d[k] + a[k];
    }
    if (d_x) d_x.set<T>(i, n, d);
    if (d_residual) d_residual.set<T>(i, n, d);
  });
}

// Tiles of channels, one after another along the grid, then blocks of rows.
inline constexpr int kShareThreads = 32, kTile = kShareThreads * kPack;
inline constexpr int kAhead = 8;  // rows that are read before they are added
__device__ __forceinline__ std::int64_t tiles(const Problem& p) { return (p.width + kTile - 1) / kTile; }

template <class T>
__global__ void __launch_bounds__(kShareThreads) shares(Problem p, const float* r_of_row, float* out) {
  const std::int64_t i = blockIdx.x % tiles(p) * kTile + threadIdx.x * kPack, block = blockIdx.x / tiles(p);
  const int n = rows::pack_at(i, p.width);
  if (n == 0) return;
  const std::int64_t first = block * kBlock,
                     last = first + kBlock < p.axes.rows ? first + kBlock : p.axes.rows;
  float sum[kPack] = {};
  for (std::int64_t row = first; row < last; row += kAhead) {
    rows::Raw<T> xs[kAhead], d_ys[kAhead];
    float r[kAhead];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead)
      if (const std::int64_t at = row + ahead; at < last) {
        xs[ahead] = RowOf(p.axes, p.x, at).fetch<T>(i, n);
        d_ys[ahead] = RowOf(p.axes, p.d_y, at).fetch<T>(i, n);
        r[ahead] = r_of_row[at];
      }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead)
      if (const std::int64_t at = row + ahead; at < last) {
        float a[kPack], d[kPack];
        rows::unpack<T>(p.x.type, xs[ahead], a);
        rows::unpack<T>(p.d_y.type, d_ys[ahead], d);
        add_residual<T>(RowOf(p.axes, p.residual, at), i, n, a);
        if (p.gate) {
          Eight g;
          RowOf(p.axes, p.gate, at).get<T>(i, n, g.at);
          multiply(d, gate_values(p.act, g).at);
        }
#pragma unroll
        for (int k = 0; k < kPack; ++k) sum[k] = fused(d[k], a[k] * r[ahead], sum[k]);
      }
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < n) leave_share(p, out, block, i + k, sum[k]);
}

// Blocks of rows from which on few channels have more threads each.
inline constexpr std::int64_t kManyBlocks = 512;
template <int Threads>
__global__ void __launch_bounds__(Threads) d_weight(Problem p, const float* shares) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kJoinChannels + threadIdx.x % kJoinChannels;
  const double sum = ascending_sum<Threads>(shares + i, p.width, static_cast<int>(p.blocks()), i < p.width);
  if (i < p.width && threadIdx.x < kJoinChannels) rows::store(p.d_weight_type, p.d_weight, i, sum);
}

inline dim3 grid(std::int64_t n) { return dim3(static_cast<unsigned>(n)); }
inline std::int64_t over(std::int64_t n, int by) { return (n + by - 1) / by; }

inline bool narrow(const Problem& p) { return p.width <= kLanes; }
// A gate only where rows are narrow and nothing is added.
template <class... Tensors>
bool whole(const Problem& p, const Tensors&... tensors) {
  const bool weight = p.weight == nullptr || (p.weight_type == rows::Type::bf16 &&
                                              reinterpret_cast<std::uintptr_t>(p.weight) % 16 == 0);
  return p.width % kPack == 0 && weight && (!p.gate || (p.width <= Heads::kMost && !p.residual)) &&
         rows::lies_whole(p.axes, p.gate) && (rows::lies_whole(p.axes, tensors) && ...);
}

// f(a type of team): what suits the rows.
template <class T, class F>
void for_team(const Problem& p, F f) {
  if constexpr (!kGeneral<T>) {
    if (p.width <= Team<8>::kMost) return f.template operator()<Team<8>>();
    if (p.width <= Team<16>::kMost) return f.template operator()<Team<16>>();
  }
  if (narrow(p))
    f.template operator()<Wave>();
  else
    f.template operator()<Waves>();
}
// Where two tensors are written: short rows by two packs a thread, so that a team's packs are whole lines.
template <class F>
void for_writing_team(const Problem& p, F f) {
  if (p.width <= Team<16, 2>::kMost) return f.template operator()<Team<16, 2>>();
  if (p.width <= Team<kWave, 2>::kMost) return f.template operator()<Team<kWave, 2>>();
  for_team<bf16>(p, f);
}
template <class Of>
dim3 grid_of(const Problem& p) {
  return grid(over(p.axes.rows, Of::kRows));
}

// Rows that leave most of a GPU idle, as when decoding: more threads each, for the time of one row.
inline constexpr std::int64_t kFewRows = 256;
inline bool few(const Problem& p) { return p.axes.rows <= kFewRows && p.width > Team<8>::kMost; }

template <class Of>
void launch_forward_by(void (*kernel)(Problem), const Problem& p, hipStream_t stream) {
  hipLaunchKernelGGL(kernel, grid_of<Of>(p), dim3(kThreads), kSumBytes, stream, p);
}
template <class Of>
bool holds(const Problem& p) {
  return p.axes.count == 1 && p.width <= Of::kMost;
}
template <class T>
void launch_rows(const Problem& p, hipStream_t stream) {
  const auto plain = [&]<class Of>() {
    if constexpr (!kGeneral<T>)
      if (holds<Of>(p)) return launch_forward_by<Of>(held_forward<Of, false>, p, stream);
    launch_forward_by<Of>(forward<T, Of>, p, stream);
  };
  const auto with_residual = [&]<class Of>() {
    launch_forward_by<Of>(holds<Of>(p) ? held_forward<Of, true> : added_forward<Of>, p, stream);
  };
  if constexpr (!kGeneral<T>)
    if (p.residual)
      return few(p) ? with_residual.template operator()<Waves>() : for_writing_team(p, with_residual);
  if (few(p))
    plain.template operator()<Waves>();
  else
    for_team<T>(p, plain);
}
inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows == 0) return;
  if ((p.residual || !p.sum) && whole(p, p.x, p.residual, p.y, p.sum))
    return p.width <= Heads::kMost ? launch_narrow_forward(p, stream) : launch_rows<rows::Whole>(p, stream);
  rows::for_type(rows::all_of(rows::Type::bf16, p.x, p.residual, p.gate, p.y, p.sum),
                 [&]<class T>(T) { launch_rows<T>(p, stream); });
}

// What the launches of a call with d_weight leave each other: r of every row, the shares of the blocks, the slices' counters.
struct Scratch {
  float *r = nullptr, *shares = nullptr;
  unsigned* counters = nullptr;
  Scratch(const Problem& p, void* workspace) {
    if (!p.d_weight) return;
    r = static_cast<float*>(workspace);
    shares = r + p.axes.rows;
    counters = reinterpret_cast<unsigned*>(shares + p.blocks() * p.width);
  }
};
inline std::int64_t backward_bytes(const Problem& p) {
  const std::int64_t words = p.axes.rows + p.blocks() * p.width + slices(p);
  return p.d_weight ? words * std::int64_t{sizeof(float)} : 0;
}
template <class T, class Of>
void launch_team(const Problem& p, const Scratch& s, hipStream_t stream) {
  hipLaunchKernelGGL((backward<T, Of>), grid_of<Of>(p), dim3(kThreads), kSumBytes, stream, p, s.r,
                     kGeneral<T> ? nullptr : s.counters);
}
inline void launch_whole(const Problem& p, const Scratch& s, hipStream_t stream) {
  if (p.width > Waves::kMost) return launch_team<rows::Whole, Waves>(p, s, stream);
  const auto launch = [&]<class Of>() { launch_held_backward<Of>(p, s.r, s.counters, stream); };
  if (few(p)) return launch.template operator()<Waves>();
  for_team<rows::Whole>(p, launch);
}
// Whether nothing is left to do: d_weight is not wanted, or is under way.
inline bool launch_gradients(const Problem& p, const Scratch& s, hipStream_t stream,
                             std::int64_t wide_blocks) {
  const bool alone = !p.d_weight || p.axes.rows <= kBlock;
  if (!p.residual && whole(p, p.x, p.d_y, p.d_sum, p.d_x, p.d_residual, p.d_gate)) {
    if (launch_heads_backward(p, s.shares, stream) || launch_wide_backward(p, s.shares, stream, wide_blocks))
      return alone;
    if (!p.gate) {
      launch_whole(p, s, stream);
      if (p.d_weight) launch_slices(p, s.r, s.shares, s.counters, stream);
      return true;
    }
  }
  rows::for_type(
      rows::all_of(rows::Type::bf16, p.x, p.residual, p.d_y, p.gate, p.d_sum, p.d_x, p.d_residual, p.d_gate),
      [&]<class T>(T) {
        for_team<T>(p, [&]<class Of>() { launch_team<T, Of>(p, s, stream); });
        if (p.d_weight)
          hipLaunchKernelGGL((shares<T>), grid(over(p.width, kTile) * p.blocks()), dim3(kShareThreads), 0,
                             stream, p, s.r, s.shares);
      });
  return alone;
}
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream,
                            std::int64_t wide_blocks = kWideBlocks) {
  const Scratch s(p, workspace);
  if (p.axes.rows > 0 && launch_gradients(p, s, stream, wide_blocks)) return;
  if (!p.d_weight) return;
  if (p.width <= Heads::kMost && p.blocks() > kManyBlocks)
    hipLaunchKernelGGL((d_weight<1024>), grid(over(p.width, kJoinChannels)), dim3(1024), 0, stream, p,
                       s.shares);
  else
    hipLaunchKernelGGL((d_weight<256>), grid(over(p.width, kJoinChannels)), dim3(256), 0, stream, p,
                       s.shares);
}

}  // namespace rlk::simt::rms_norm
