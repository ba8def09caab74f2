// rms_norm's gradients of rows of whole packs of up to 128 (bf16, on 16 bytes) without a residual: d_x, d_residual, d_gate and the
// shares of d_weight in one pass.
//
// A block has the 128 rows of a share and asks for as many at once as it has room for, four lanes a row as in narrow.hpp. A thread
// reads what it asked for itself, a row as it arrives, so nothing waits for the block until the rows are done; then a thread
// goes through the chains of two channels.
#pragma once

#include "simt/async.hpp"
#include "simt/rms_norm/narrow.hpp"
#include "simt/rms_norm/share.hpp"

namespace rlk::simt::rms_norm {

// The threads of a block, and the rows that they have at a time.
inline constexpr int kHeadThreads = 256, kHeadRows = kHeadThreads / Heads::kThreadsOf;

// What lies in shared memory beside x and d_y.
enum class Third { nothing, d_sum, gate };

// So many rows in shared memory. With a gate the gradients of what it multiplies, fp32, take the places of d_y and the gates.
template <Third Of, int Rows>
struct HeadShare {
  static constexpr Third kThird = Of;
  static constexpr bool kGated = Of == Third::gate;
  static constexpr int kTensors = Of == Third::nothing ? 2 : 3, kPacks = Heads::kMost / kPack, kAhead = 8;
  static constexpr int kStep = Rows * kPacks;  // from a tensor to the next
  rows::Bytes16 packs[kTensors][Rows][kPacks];
  Factors<Heads::kMost> weights;
  alignas(16) float r[Rows];

  // Lanes of two rows meet in no bank, nor do the halves of a gradient.
  __device__ __forceinline__ rows::Bytes16& at(int tensor, int row, int pack) {
    return packs[tensor][row][pack ^ ((row ^ (kGated && tensor == 2)) & 1) << 2];
  }
  // What the first `count` rows add to two channels.
  __device__ __forceinline__ void chain(int pair, int count, float& low, float& high) {
    const int pack = pair / 4, of = pair % 4;
    const auto go_on = [&](int row, float r_of_row) {
      const std::uint32_t x2 = at(0, row, pack).word[of];
      float d[2];
      if constexpr (kGated) {
        const rows::Bytes16& four = at(of < 2 ? 1 : 2, row, pack);
#pragma unroll
        for (int k = 0; k < 2; ++k) d[k] = bits_float(four.word[of % 2 * 2 + k]);
      } else {
        const std::uint32_t d2 = at(1, row, pack).word[of];
        d[0] = bits_float(d2 << 16), d[1] = bits_float(d2 & 0xffff0000u);
      }
      low = fused(d[0], bits_float(x2 << 16) * r_of_row, low);
      high = fused(d[1], bits_float(x2 & 0xffff0000u) * r_of_row, high);
    };
    int row = 0;
    for (; row + kAhead <= count; row += kAhead) {
      rows::Bytes16 rs[kAhead / 4];
#pragma unroll
      for (int k = 0; k < kAhead / 4; ++k) rs[k] = reinterpret_cast<const rows::Bytes16*>(r + row)[k];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) go_on(row + k, bits_float(rs[k / 4].word[k % 4]));
    }
#pragma unroll 1
    for (; row < count; ++row) go_on(row, r[row]);
  }
};

// A lane's part of a row.
template <class All, rows::Walk By>
struct HeadRow {
  const Problem& p;
  All& all;
  int lane, packs;  // of a row
  std::int64_t row;
  int mine;    // of the rows in shared memory
  bool there;  // its results are written
  // Where its packs of even and of odd numbers lie, in the third tensor too: found once, and the others by what a compiler knows.
  rows::Bytes16 *first[2], *third[2];

  __device__ __forceinline__ HeadRow(const Problem& problem, All& shared, const Heads& at, std::int64_t of,
                                     int in_share, bool exists)
      : p(problem), all(shared), lane(at.lane), row(of), mine(in_share), there(exists) {
    packs = static_cast<int>(p.width) / kPack;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      first[odd] = &all.at(0, mine, pack(odd)) - pack(odd) + lane;
      third[odd] = &all.at(All::kTensors - 1, mine, pack(odd)) - pack(odd) + lane;
    }
  }
  __device__ __forceinline__ int pack(int c) const { return lane + c * Heads::kThreadsOf; }
  __device__ __forceinline__ bool has(int c) const { return pack(c) < packs; }
  __device__ __forceinline__ rows::Bytes16& at(int tensor, int c, bool odd) const {
    const int from = c * Heads::kThreadsOf;
    return tensor == 2 ? third[odd][from] : first[odd][tensor * All::kStep + from];
  }
  __device__ __forceinline__ rows::Bytes16& at(int tensor, int c) const { return at(tensor, c, c % 2 != 0); }
  __device__ __forceinline__ void get(int tensor, int c, bool odd, float (&v)[kPack]) const {
    const rows::Bytes16 raw = at(tensor, c, odd);
    rows::unpack<bf16>(&raw, v);
  }
  __device__ __forceinline__ void get(int tensor, int c, float (&v)[kPack]) const {
    get(tensor, c, c % 2 != 0, v);
  }
  // body(c) for the packs of a lane. What a row has none of is zero, so that two go without a branch between them.
  template <class Body>
  __device__ __forceinline__ void for_held(Body body) const {
#pragma unroll
    for (int c = 0; c < Heads::kHeld; c += 2)
      if (c * Heads::kThreadsOf < packs) body(c), body(c + 1);
  }
  __device__ __forceinline__ RowOf of(const rows::Tensor& t) const {
    return rows::row_of<By>(p.axes, t, row);
  }
  __device__ __forceinline__ void ask(const rows::Tensor& t, int tensor) const {
    const auto* from = static_cast<const rows::Bytes16*>(of(t).data) + lane;
    for_held([&](int c) {
      if (has(c)) send(&at(tensor, c), from + c * Heads::kThreadsOf);
    });
  }
  __device__ __forceinline__ void ask() const {
    ask(p.x, 0);
    ask(p.d_y, 1);
    if constexpr (All::kThird == Third::d_sum) ask(p.d_sum, 2);
    if constexpr (All::kThird == Third::gate) ask(p.gate, 2);
    if (packs % (2 * Heads::kThreadsOf) == 0) return;
    for_held([&](int c) {
      for (int tensor = 0; tensor < All::kTensors && !has(c); ++tensor) at(tensor, c) = rows::Bytes16{};
    });
  }

  // d_y and the gate become the gradient of what they multiply, and d_gate is written.
  __device__ __forceinline__ void through_gate(int c, bool odd, float r) const {
    if (!has(c)) return;
    float gate[kPack], d[kPack];
    get(2, c, odd, gate);
    get(1, c, odd, d);
    Eight value, slope;
    gate_both(p.act, gate, value, slope);
    if (p.d_gate && there) {
      float through[kPack];
      get(0, c, odd, through);
#pragma unroll
      for (int k = 0; k < kPack; ++k) through[k] = through[k] * r;
      all.weights.multiply(pack(c) * kPack, through);
#pragma unroll
      for (int k = 0; k < kPack; ++k) through[k] = d[k] * through[k] * slope.at[k];
      of(p.d_gate).template set<rows::Whole>(pack(c) * kPack, kPack, through);
    }
    multiply(d, value.at);
    rows::Bytes16 &low = at(1, c, odd), &high = at(2, c, odd);
#pragma unroll
    for (int k = 0; k < 4; ++k) low.word[k] = float_bits(d[k]), high.word[k] = float_bits(d[k + 4]);
  }
  // The gradient of what is weighted.
  __device__ __forceinline__ void get_d(int c, float (&d)[kPack]) const {
    if constexpr (!All::kGated) return get(1, c, d);
    const rows::Bytes16 low = at(1, c), high = at(2, c);
#pragma unroll
    for (int k = 0; k < kPack; ++k) d[k] = bits_float(k < 4 ? low.word[k] : high.word[k % 4]);
  }
  __device__ __forceinline__ float reciprocal_of_row(const Heads& team) const {
    if (p.rstd) return of(p.rstd).get(0);
    float squares[Heads::kHeld][kPack] = {};
    for_held([&](int c) {
      get(0, c, squares[c]);
#pragma unroll
      for (int k = 0; k < kPack; ++k) squares[c][k] = fused(squares[c][k], squares[c][k], 0.0f);
    });
    return reciprocal(team.total(squares), p.width, p.eps);
  }
  __device__ __forceinline__ void compute(const Heads& team) const {
    const float r = reciprocal_of_row(team);
    if (lane == 0) all.r[mine] = r;
    if constexpr (All::kGated)
#pragma unroll 1  // four packs' code would not stay in the instruction cache
      for (int c = 0; c < Heads::kHeld; c += 2) through_gate(c, false, r), through_gate(c + 1, true, r);
    float n[Heads::kHeld][kPack], g[Heads::kHeld][kPack], sums[Heads::kHeld][kPack] = {};
    for_held([&](int c) {
      get(0, c, n[c]);
      get_d(c, g[c]);
      all.weights.multiply(pack(c) * kPack, g[c]);
      const float by = has(c) ? r : 0.0f;
#pragma unroll
      for (int k = 0; k < kPack; ++k) n[c][k] = n[c][k] * by, sums[c][k] = fused(g[c][k], n[c][k], 0.0f);
    });
    const float mean = team.total(sums) / static_cast<float>(p.width);
    const RowOf one = of(p.d_x ? p.d_x : p.d_residual), more = of(p.d_sum);
    if (!there || !one) return;
    for_held([&](int c) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) g[c][k] = gradient(r, n[c][k], mean, g[c][k]);
      if (!has(c)) return;
      if constexpr (All::kThird == Third::d_sum) get(2, c, n[c]);
      if (All::kGated && more) more.template get<rows::Whole>(pack(c) * kPack, kPack, n[c]);
      if (All::kThird == Third::d_sum || (All::kGated && more))
#pragma unroll
        for (int k = 0; k < kPack; ++k) g[c][k] = g[c][k] + n[c][k];
      const rows::Raw<rows::Whole> made{packed(g[c])};
      one.template put<rows::Whole>(pack(c) * kPack, made);
      if (p.d_x && p.d_residual) of(p.d_residual).template put<rows::Whole>(pack(c) * kPack, made);
    });
  }
};

// `out`: the shares of d_weight, if they are wanted.
template <Third Of, int Rows, rows::Walk By>
__global__ void __launch_bounds__(kHeadThreads, 2) heads_backward(Problem p, float* out) {
  using All = HeadShare<Of, Rows>;
  constexpr int kSteps = Rows / kHeadRows;
  auto& all = *dynamic_shared<All>();
  const Heads at(p);
  const int thread = static_cast<int>(threadIdx.x), team = thread / Heads::kThreadsOf;
  const std::int64_t first = std::int64_t{blockIdx.x} * kBlock;
  const int count = static_cast<int>(p.axes.rows - first < kBlock ? p.axes.rows - first : kBlock);
  const auto row_at = [&](int part, int step) {  // rows past the end repeat the last one
    const int mine = step * kHeadRows + team, row = part + mine;
    return HeadRow<All, By>(p, all, at, first + (row < count ? row : count - 1), mine, row < count);
  };
  float low = 0, high = 0;
  for (int part = 0; part < count; part += Rows) {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (part + step * kHeadRows < count) row_at(part, step).ask();
      end_group();
    }
    if (part == 0) all.weights.fill(p, kHeadThreads);
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < kSteps && part + step * kHeadRows < count; ++step) {
      arrived_but<kSteps - 1>();
      row_at(part, step).compute(at);
      end_group();  // an empty one, so that as many as before may be under way
    }
    if (!out) continue;
    __syncthreads();
    if (2 * thread < p.width) all.chain(thread, count - part < Rows ? count - part : Rows, low, high);
    if (part + Rows < count) __syncthreads();
  }
  if (!out || 2 * thread >= p.width) return;
  leave_share(p, out, blockIdx.x, 2 * thread, low);
  leave_share(p, out, blockIdx.x, 2 * thread + 1, high);
}

// Whether they are under way: not where a block may not have the shared memory.
template <int Rows, Third Of, rows::Walk By>
bool launch_heads(const Problem& p, float* shares, hipStream_t stream) {
  constexpr std::size_t bytes = sizeof(HeadShare<Of, Rows>);
  if (!allow_shared(heads_backward<Of, Rows, By>, bytes)) return false;
  hipLaunchKernelGGL((heads_backward<Of, Rows, By>), dim3(static_cast<unsigned>(p.blocks())),
                     dim3(kHeadThreads), bytes, stream, p, shares);
  return true;
}
template <int Rows>
bool launch_heads(const Problem& p, float* shares, hipStream_t stream) {
  bool launched = false;
  rows::for_walk(p.axes, [&]<rows::Walk By>() {
    launched = p.gate    ? launch_heads<Rows, Third::gate, By>(p, shares, stream)
               : p.d_sum ? launch_heads<Rows, Third::d_sum, By>(p, shares, stream)
                         : launch_heads<Rows, Third::nothing, By>(p, shares, stream);
  });
  return launched;
}
// Whether the gradients and the shares of d_weight, if `shares`, are under way; `p` has whole packs.
inline bool launch_heads_backward(const Problem& p, float* shares, hipStream_t stream) {
  return p.width <= Heads::kMost &&
         (launch_heads<kBlock>(p, shares, stream) || launch_heads<kBlock / 2>(p, shares, stream));
}

}  // namespace rlk::simt::rms_norm
