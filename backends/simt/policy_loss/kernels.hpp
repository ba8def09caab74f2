// The portable GPU kernels of policy_loss (arithmetic loss32/f64): the bits of the native backend on every GPU.
//
// totals    a block a sequence: its threads compute a tile of tokens, and a thread a quantity adds the tile in order while
//           they compute the next
// reduce    one block: the same with totals in fp64, and one thread finishes loss and metrics
// factors   a block a sequence, and one for the tokens of none: slopes times the sequence's share of the loss
// gradient  a thread a token
#pragma once

#include "arithmetic/policy_loss/policy.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::policy_loss {

using loss32::FactorProblem;
using loss32::kActive;
using loss32::kMetrics;
using loss32::kTotals;
using loss32::PolicyProblem;
using loss32::Weighting;

inline constexpr int kThreads = 256, kMostSums = loss32::Terms<float>::kSums, kReducers = 128;

// What the launches leave each other: the denominator, then a count for each sequence.
inline std::int64_t workspace_bytes(std::int64_t sequences) { return 8 + 4 * sequences; }
RLK_HD float* counts(void* workspace) {
  return reinterpret_cast<float*>(static_cast<double*>(workspace) + 1);
}

// What a block adds in order lies in two tiles in turn: while a thread a quantity adds one, the others fill the next.
inline constexpr int kTileStride = kThreads + 4;  // quantities in banks of their own
struct Tiles {
  float at[2][kMostSums][kTileStride];
  float total[kMostSums];
};

// `sum` and the first n of a tile's row, in order.
template <class T>
__device__ __forceinline__ T added(T sum, const T* row, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    T x[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) x[k] = row[i + k];
#pragma unroll
    for (int k = 0; k < 16; ++k) sum = sum + x[k];
  }
  for (; i < n; ++i) sum = sum + row[i];
  return sum;
}

struct Team {
  using Sum = float;
  const PolicyProblem& p;
  Tiles& tiles;

  // Every thread of the block calls this, and gets the sums.
  template <class F, int N>
  __device__ void sum(std::int64_t b, const F& f, bool keep, float (&sums)[N]) const {
    const std::int64_t last = p.last(b);
    const int thread = static_cast<int>(threadIdx.x);
    float mine = 0;
    int buffer = 0;
    for (std::int64_t first = p.first(b); first < last; first += kThreads) {
      const std::int64_t t = first + thread;
      auto& tile = tiles.at[buffer];
      buffer = 1 - buffer;
      if (t < last) {
        const loss32::Values<float, N> v = f(loss32::token_at(p, b, t));
        for (int q = 0; q < N; ++q) tile[q][thread] = v.sum[q];
        if (keep && p.factor) p.factor[t] = v.slope;
        if (keep && p.entropy_factor) p.entropy_factor[t] = v.active;
      }
      __syncthreads();
      if (thread < N)
        mine = added(mine, tile[thread], static_cast<int>(last - first < kThreads ? last - first : kThreads));
    }
    if (thread < N) tiles.total[thread] = mine;
    __syncthreads();
    for (int q = 0; q < N; ++q) sums[q] = tiles.total[q];
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kThreads) totals(PolicyProblem p, void* workspace) {
  __shared__ Tiles tiles;
  const std::int64_t b = blockIdx.x;
  const Team team{p, tiles};
  const loss32::Sequence<float> facts = loss32::facts_of(p, team, b);
  float sums[kMostSums];
  team.sum(b, loss32::Terms<float>{p, facts}, true, sums);
  if (threadIdx.x != 0) return;
  for (int q = 0; q < kTotals; ++q) p.totals[b * kTotals + q] = from_float<float>(sums[q]);
  counts(workspace)[b] = sums[kTotals];
}

// Six sums over sequences and the loss; `bad` and `denominator` may be null.
__global__ void __launch_bounds__(kReducers)
    reduce(Weighting w, const float* totals, std::int64_t sequences, float* loss, float* metrics,
           const float* bad, double* denominator) {
  __shared__ double tiles[2][kMetrics + 1][kReducers + 2], sums[kMetrics + 1];
  const int q = static_cast<int>(threadIdx.x);
  double mine = 0;
  int buffer = 0;
  for (std::int64_t first = 0; first < sequences; first += kReducers) {
    auto& tile = tiles[buffer];
    buffer = 1 - buffer;
    if (const std::int64_t b = first + q; b < sequences) {
      for (int i = 0; i < kMetrics; ++i) tile[i][q] = loss32::contribution(w, totals + b * kTotals, i);
      tile[kMetrics][q] = bad ? static_cast<double>(bad[b]) : 0;
    }
    __syncthreads();
    if (q <= kMetrics)
      mine = added(mine, tile[q],
                   static_cast<int>(sequences - first < kReducers ? sequences - first : kReducers));
  }
  if (q <= kMetrics) sums[q] = mine;
  __syncthreads();
  if (q != 0) return;
  loss32::finish(w, sums, loss, metrics);
  if (metrics && bad) metrics[kMetrics] = static_cast<float>(sums[kMetrics]);
  if (denominator) *denominator = loss32::denominator_of(w, sums);
}

__global__ void __launch_bounds__(kThreads) factors(PolicyProblem p, const void* workspace) {
  const std::int64_t b = blockIdx.x;
  if (b == p.sequences) {
    for (std::int64_t t = p.covered() + threadIdx.x; t < p.tokens; t += kThreads) {
      if (p.factor) p.factor[t] = 0;
      if (p.entropy_factor) p.entropy_factor[t] = 0;
    }
    return;
  }
  const double share =
      loss32::share_of(p.weighting, p.totals[b * kTotals + kActive], *static_cast<const double*>(workspace));
  const float by = static_cast<float>(share);
  const float of_entropy = loss32::entropy_share(p.weighting, share);
  for (std::int64_t t = p.first(b) + threadIdx.x; t < p.last(b); t += kThreads) {
    if (p.factor) {
      const float slope = p.factor[t];
      p.factor[t] = from_float<float>(slope == 0 || by == 0 ? 0.0f : slope * by);
    }
    if (p.entropy_factor) p.entropy_factor[t] = p.entropy_factor[t] != 0 ? of_entropy : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) gradient(FactorProblem p) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= p.tokens) return;
  const float d_loss = *p.d_loss;
  if (p.d_logp) p.d_logp[t] = loss32::gradient(p.factor[t], d_loss);
  if (p.d_entropy) p.d_entropy[t] = loss32::gradient(p.entropy_factor[t], d_loss);
}

inline dim3 blocks(std::int64_t n) { return dim3(static_cast<unsigned>(n)); }

inline void launch_reduce(const Weighting& w, const float* totals, std::int64_t sequences, float* loss,
                          float* metrics, hipStream_t stream) {
  hipLaunchKernelGGL(reduce, blocks(1), dim3(kReducers), 0, stream, w, totals, sequences, loss, metrics,
                     static_cast<const float*>(nullptr), static_cast<double*>(nullptr));
}
inline void launch_forward(const PolicyProblem& p, void* workspace, hipStream_t stream) {
  if (p.sequences > 0)
    hipLaunchKernelGGL(totals, blocks(p.sequences), dim3(kThreads), 0, stream, p, workspace);
  hipLaunchKernelGGL(reduce, blocks(1), dim3(kReducers), 0, stream, p.weighting, p.totals, p.sequences,
                     p.loss, p.metrics, counts(workspace), static_cast<double*>(workspace));
  if (p.factor || p.entropy_factor)
    hipLaunchKernelGGL(factors, blocks(p.sequences + 1), dim3(kThreads), 0, stream, p, workspace);
}
inline void launch_backward(const FactorProblem& p, hipStream_t stream) {
  if (p.tokens > 0)
    hipLaunchKernelGGL(gradient, blocks((p.tokens + kThreads - 1) / kThreads), dim3(kThreads), 0, stream, p);
}

}  // namespace rlk::simt::policy_loss
