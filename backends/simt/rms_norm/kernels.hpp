// The portable GPU kernels of rms_norm (arithmetic rms32): the bits of the native backend on every GPU.
//
// rows         a team of 32 lanes has a row of up to 1024 elements, one of 128 a wider row or one of few, and one of 16 a row
//              of whole packs of up to 128. A thread takes packs of eight neighbours, so it has eight of the sum's 1024
//              lanes, or 32; what it read first stays in registers
// shares       one thread eight channels of a block of 128 rows, or two where rows are whole packs, one fp32 chain each: what
//              the block adds to d_weight. The last rows come first: they are still in the cache
// added.hpp    x + residual in rows of whole packs, which is made once
// narrow.hpp   rows of whole packs of up to 128, as heads have: a gate too, and all gradients in one pass
// d_weight     the shares of a channel are added, ascending in fp64
#pragma once

#include "simt/join.hpp"
#include "simt/rms_norm/added.hpp"
#include "simt/rms_norm/narrow.hpp"
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

// d_x, d_residual and d_gate, and every row's r for the shares. A residual is read again by each pass, where it is cached: its
// packs would take registers of every call.
template <class T, class Of>
__global__ void __launch_bounds__(kThreads, __is_same(T, rows::Any) ? 3 : 5)
    backward(Problem p, float* r_of_row) {
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
    if (k < n) out[block * p.width + i + k] = sum[k];
}

// The same for two channels a thread of rows that are whole packs.
inline constexpr int kPairThreads = 64, kPairTile = 2 * kPairThreads, kPairAhead = 16;
template <bool Strided>  // of rows that have one stride, so that nothing stands between reads
__global__ void __launch_bounds__(kPairThreads) pair_shares(Problem p, const float* r_of_row, float* out) {
  const auto across = static_cast<unsigned>((p.width + kPairTile - 1) / kPairTile);
  const std::int64_t i = std::int64_t{blockIdx.x % across} * kPairTile + 2 * threadIdx.x;
  const std::int64_t block = p.blocks() - 1 - blockIdx.x / across;
  if (i >= p.width) return;
  const std::int64_t first = block * kBlock;
  const int n = static_cast<int>(p.axes.rows - first < kBlock ? p.axes.rows - first : kBlock);
  const auto word = [&](const rows::Tensor& t, int row) {
    const std::int64_t offset = Strided ? (first + row) * t.stride[0] : t.offset(p.axes, first + row);
    return *reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(t.data) + offset + i);
  };
  float low = 0, high = 0;
  for (int at = 0; at < n; at += kPairAhead) {
    std::uint32_t x[kPairAhead], d[kPairAhead];
    float r[kPairAhead];
#pragma unroll
    for (int k = 0; k < kPairAhead; ++k) {
      const int row = at + k < n ? at + k : n - 1;
      x[k] = word(p.x, row), d[k] = word(p.d_y, row), r[k] = r_of_row[first + row];
    }
#pragma unroll
    for (int k = 0; k < kPairAhead; ++k) {
      if (at + k >= n) continue;
      low = fused(bits_float(d[k] << 16), bits_float(x[k] << 16) * r[k], low);
      high = fused(bits_float(d[k] & 0xffff0000u), bits_float(x[k] & 0xffff0000u) * r[k], high);
    }
  }
  out[block * p.width + i] = low, out[block * p.width + i + 1] = high;
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
  return p.width % kPack == 0 && weight && (!p.gate || (p.width <= Sixteen::kStride && !p.residual)) &&
         rows::lies_whole(p.axes, p.gate) && (rows::lies_whole(p.axes, tensors) && ...);
}
inline constexpr std::size_t kSharedBytes = kLanes * sizeof(float);

// f(a type of team): what suits the rows.
template <class T, class F>
void for_team(const Problem& p, F f) {
  if constexpr (!kGeneral<T>) {
    if (p.width <= Wave1::kStride) return f.template operator()<Wave1>();
    if (p.width <= Wave2::kStride * Wave2::kHeld) return f.template operator()<Wave2>();
  }
  if (narrow(p))
    f.template operator()<Wave>();
  else
    f.template operator()<Waves>();
}
template <class Of>
dim3 grid_of(const Problem& p) {
  return grid(over(p.axes.rows, Of::kRows));
}

// Rows that leave most of a GPU idle, as when decoding: more threads each, for the time of one row.
inline constexpr std::int64_t kFewRows = 256;

template <class T>
void launch_rows(const Problem& p, hipStream_t stream) {
  const auto with = [&]<class Of>() {
    const auto launch = [&](auto kernel) {
      hipLaunchKernelGGL(kernel, grid_of<Of>(p), dim3(kThreads), kSharedBytes, stream, p);
    };
    if constexpr (!kGeneral<T>)
      if (p.residual) return launch(added_forward<Of>);
    launch(forward<T, Of>);
  };
  if (p.axes.rows <= kFewRows && p.width > Wave::kStride) return with.template operator()<Waves>();
  for_team<T>(p, with);
}
inline void launch_forward(const Problem& p, hipStream_t stream) {
  if (p.axes.rows == 0) return;
  if ((p.residual || !p.sum) && whole(p, p.x, p.residual, p.y, p.sum))
    return p.width <= Sixteen::kStride ? launch_narrow_forward(p, stream)
                                       : launch_rows<rows::Whole>(p, stream);
  rows::for_type(rows::all_of(rows::Type::bf16, p.x, p.residual, p.gate, p.y, p.sum),
                 [&]<class T>(T) { launch_rows<T>(p, stream); });
}

// r of every row, then the shares of the blocks.
inline std::int64_t backward_bytes(const Problem& p) {
  return p.d_weight ? (p.axes.rows + p.blocks() * p.width) * std::int64_t{sizeof(float)} : 0;
}
template <class T>
void launch_row_gradients(const Problem& p, float* r, hipStream_t stream) {
  for_team<T>(p, [&]<class Of>() {
    hipLaunchKernelGGL((backward<T, Of>), grid_of<Of>(p), dim3(kThreads), kSharedBytes, stream, p, r);
  });
}
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream,
                            std::int64_t wide_blocks = kWideBlocks) {
  float* r = p.d_weight ? static_cast<float*>(workspace) : nullptr;
  float* kept = p.d_weight ? r + p.axes.rows : nullptr;
  if (p.axes.rows > 0) {
    const bool in_packs = !p.residual && whole(p, p.x, p.d_y, p.d_sum, p.d_x, p.d_residual, p.d_gate);
    if (in_packs && p.width <= Sixteen::kStride) {
      launch_narrow_backward(p, kept, stream);
    } else if (in_packs && launch_wide_backward(p, kept, stream, wide_blocks)) {
      // and there is nothing else
    } else if (in_packs) {
      launch_row_gradients<rows::Whole>(p, r, stream);
      if (!p.d_weight) return;
      const auto kernel = p.axes.count == 1 ? pair_shares<true> : pair_shares<false>;
      hipLaunchKernelGGL(kernel, grid(over(p.width, kPairTile) * p.blocks()), dim3(kPairThreads), 0, stream,
                         p, r, kept);
    } else {
      rows::for_type(rows::all_of(rows::Type::bf16, p.x, p.residual, p.d_y, p.gate, p.d_sum, p.d_x,
                                  p.d_residual, p.d_gate),
                     [&]<class T>(T) {
                       launch_row_gradients<T>(p, r, stream);
                       if (p.d_weight)
                         hipLaunchKernelGGL((shares<T>), grid(over(p.width, kTile) * p.blocks()),
                                            dim3(kShareThreads), 0, stream, p, r, kept);
                     });
    }
  }
  if (!p.d_weight) return;
  if (p.width <= Sixteen::kStride && p.blocks() > kManyBlocks)
    hipLaunchKernelGGL((d_weight<1024>), grid(over(p.width, kJoinChannels)), dim3(1024), 0, stream, p, kept);
  else
    hipLaunchKernelGGL((d_weight<256>), grid(over(p.width, kJoinChannels)), dim3(256), 0, stream, p, kept);
}

}  // namespace rlk::simt::rms_norm
