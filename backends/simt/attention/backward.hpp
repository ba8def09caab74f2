// The portable GPU kernels of attention_bwd (arithmetic fma32/attn128): the bits of the native backend on every GPU.
//
// stats    a block of 128 threads per query and head leaves what its row has for all keys alike in the workspace
// queries  d_q: a block per query and head, a thread per key of a tile for dS and per channel for sums
// keys     d_k and d_v: a block per key and its head, a thread per query of 128 for P and dS and per channel for sums
// sinks    d_sinks: a block per head, whose first thread adds what the others compute
//
// No sum crosses blocks, so nothing is added in an order that may change. Rows of no sequence are +0.
#pragma once

#include "arithmetic/attention/backward.hpp"
#include "simt/attention/kernels.hpp"

namespace rlk::simt::attention {

using attn128::Backward;
using attn128::Stat;

inline constexpr int kKeyChannels = (kMostWidth + kThreads - 1) / kThreads;  // of a thread, kThreads apart
inline constexpr int kMostLevels = 21;  // of a tree over the heads of a group

struct BackwardShared {
  float left[kMostWidth], right[kMostValueWidth];  // q and d_out of a row, or k and v of a key
  float weights[kTile], ds[kTile];
};

__device__ inline void load_row(const attn128::Tensor& t, const void* row, int width, float* to) {
  for (int d = static_cast<int>(threadIdx.x); d < width; d += kThreads) to[d] = rows::load(t.type, row, d);
}
__device__ inline void clear_row(const attn128::Tensor& t, std::int64_t n, std::int64_t token,
                                 std::int64_t head, int width) {
  for (int d = static_cast<int>(threadIdx.x); t && d < width; d += kThreads)
    rows::store(t.type, t.at(n, token, head), d, 0.0f);
}
__device__ inline float dot(const float* x, const attn128::Tensor& t, const void* row, int width) {
  float sum = 0;
  for (int d = 0; d < width; ++d) sum = fused(x[d], rows::load(t.type, row, d), sum);
  return sum;
}
// Of lse and d_lse.
__device__ inline float number(const attn128::Tensor& t, std::int64_t n, std::int64_t token,
                               std::int64_t head) {
  return *static_cast<const float*>(t.at(n, token, head));
}

__global__ void __launch_bounds__(kThreads) stats_kernel(Backward g, Stat* stats) {
  __shared__ float tree[kTile];
  const Problem& p = g.p;
  const Place at = place(p, blockIdx.x);
  if (!at.there) {
    clear_row(g.d_q, 0, static_cast<std::int64_t>(blockIdx.x) / g.all_heads(), at.head, p.width);
    return;
  }
  const int t = static_cast<int>(threadIdx.x);
  const void *out = p.out.at(at.n, at.token, at.head), *d_out = g.d_out.at(at.n, at.token, at.head);
  float delta = 0;
  for (int first = 0; first < p.value_width; first += kTile) {
    const int d = first + t;
    tree[t] =
        d < p.value_width ? mul_rn(rows::load(g.d_out.type, d_out, d), rows::load(p.out.type, out, d)) : 0;
    delta = add_rn(delta, fold(tree));
    __syncthreads();  // the next block of channels overwrites the tree
  }
  if (g.d_lse) delta = add_rn(delta, -number(g.d_lse, at.n, at.token, at.head));
  if (t == 0) stats[blockIdx.x] = {attn128::base_of_lse(number(p.lse, at.n, at.token, at.head)), delta};
}

__global__ void __launch_bounds__(kThreads) queries_kernel(Backward g, const Stat* stats) {
  __shared__ BackwardShared s;
  const Problem& p = g.p;
  const Place at = place(p, blockIdx.x);
  if (!at.there) return;
  const int t = static_cast<int>(threadIdx.x);
  load_row(p.q, p.q.at(at.n, at.token, at.head), p.width, s.left);
  load_row(g.d_out, g.d_out.at(at.n, at.token, at.head), p.value_width, s.right);
  __syncthreads();
  const Stat stat = stats[blockIdx.x];
  float sums[kKeyChannels] = {};
  for (std::int64_t tile = at.seen.first / kTile; tile * kTile < at.seen.last; ++tile) {
    const std::int64_t first = tile * kTile, j = first + t;
    float ds = 0;
    if (j >= at.seen.first && j < at.seen.last) {
      const float score = dot(s.left, p.k, p.key(p.k, at.n, at.rows, j, at.kv_head), p.width),
                  dp = dot(s.right, p.v, p.key(p.v, at.n, at.rows, j, at.kv_head), p.value_width);
      ds = attn128::slope_of<float>(p, score, dp, stat).ds;
    }
    s.ds[t] = rows::round_to(p.v.type, ds);
    __syncthreads();
    const std::int64_t from = at.seen.first > first ? at.seen.first : first,
                       to = at.seen.last < first + kTile ? at.seen.last : first + kTile;
#pragma unroll
    for (int u = 0; u < kKeyChannels; ++u) {
      const int d = u * kThreads + t;
      if (d >= p.width) continue;
      float part = 0;
      for (std::int64_t i = from; i < to; ++i)
        part =
            fused(s.ds[i - first], rows::load(p.k.type, p.key(p.k, at.n, at.rows, i, at.kv_head), d), part);
      sums[u] = add_rn(sums[u], part);
    }
    __syncthreads();  // the next tile overwrites what is shared
  }
  void* d_q = g.d_q.at(at.n, at.token, at.head);
#pragma unroll
  for (int u = 0; u < kKeyChannels; ++u)
    if (const int d = u * kThreads + t; d < p.width)
      rows::store(g.d_q.type, d_q, d, mul_rn(sums[u], p.scale));
}

// A row of k and its head, and the sequence and position that it is.
struct KeyPlace {
  std::int64_t n, token, head, j;
  bool there;
};
__device__ inline KeyPlace key_place(const Backward& g, std::int64_t row) {
  const Problem& p = g.p;
  KeyPlace at{};
  at.head = row % p.heads;
  const std::int64_t token = row / p.heads;
  if (p.cu_k) {
    at.token = token;
    while (at.n < p.sequences && token >= g.idle_keys(at.n).first) ++at.n;
    if (at.n == p.sequences || token < p.k_begin(at.n)) return at;
    at.j = token - p.k_begin(at.n) + g.own_keys(at.n).first;
  } else {
    at.n = token / p.room, at.token = at.j = token % p.room;
    if (at.n >= p.sequences || at.token >= p.kv_count(at.n)) return at;
  }
  at.there = true;
  return at;
}

// A thread's channels of d_k and d_v.
struct KeySums {
  float k[kKeyChannels], v[kChannels];
};
__device__ inline KeySums add(const KeySums& x, const KeySums& y) {
  KeySums sum;
#pragma unroll
  for (int u = 0; u < kKeyChannels; ++u) sum.k[u] = add_rn(x.k[u], y.k[u]);
#pragma unroll
  for (int u = 0; u < kChannels; ++u) sum.v[u] = add_rn(x.v[u], y.v[u]);
  return sum;
}

// Queries of sequence n and one head, 128 at a time.
__device__ inline void add_queries(const Backward& g, const KeyPlace& at, std::int64_t n, std::int64_t head,
                                   const Stat* stats, BackwardShared& s, KeySums& sums) {
  const Problem& p = g.p;
  const int t = static_cast<int>(threadIdx.x);
  const attn128::Visible rows = g.queries(n, at.j, at.j + 1);
  const std::int64_t q_begin = p.q_begin(n);
  for (std::int64_t first = rows.first; first < rows.last; first += kThreads) {
    const int count = static_cast<int>(rows.last - first < kThreads ? rows.last - first : kThreads);
    if (t < count) {
      const std::int64_t token = q_begin + first + t;
      const float score = dot(s.left, p.q, p.q.at(n, token, head), p.width),
                  dp = dot(s.right, g.d_out, g.d_out.at(n, token, head), p.value_width);
      const auto slope =
          attn128::slope_of<float>(p, score, dp, stats[g.row(n, first + t) * g.all_heads() + head]);
      s.weights[t] = rows::round_to(p.v.type, slope.p);
      s.ds[t] = rows::round_to(p.v.type, slope.ds);
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const void *q = p.q.at(n, q_begin + first + i, head), *d_out = g.d_out.at(n, q_begin + first + i, head);
#pragma unroll
      for (int u = 0; u < kKeyChannels; ++u)
        if (const int d = u * kThreads + t; d < p.width)
          sums.k[u] = fused(s.ds[i], rows::load(p.q.type, q, d), sums.k[u]);
#pragma unroll
      for (int u = 0; u < kChannels; ++u)
        if (const int d = u * kThreads + t; d < p.value_width)
          sums.v[u] = fused(s.weights[i], rows::load(g.d_out.type, d_out, d), sums.v[u]);
    }
    __syncthreads();  // the next queries overwrite what is shared
  }
}
// All queries of one head that see the key.
__device__ inline KeySums head_sums(const Backward& g, const KeyPlace& at, std::int64_t head,
                                    const Stat* stats, BackwardShared& s) {
  KeySums sums{};
  for (std::int64_t n = at.n; n < g.p.sequences; n = g.next_reader(at.n, n))
    add_queries(g, at, n, head, stats, s, sums);
  return add(sums, {});  // no -0
}

__global__ void __launch_bounds__(kThreads) keys_kernel(Backward g, const Stat* stats) {
  __shared__ BackwardShared s;
  const Problem& p = g.p;
  const KeyPlace at = key_place(g, blockIdx.x);
  if (!at.there) {
    clear_row(g.d_k, at.n, at.token, at.head, p.width);
    clear_row(g.d_v, at.n, at.token, at.head, p.value_width);
    return;
  }
  load_row(p.k, p.k.at(at.n, at.token, at.head), p.width, s.left);
  load_row(p.v, p.v.at(at.n, at.token, at.head), p.value_width, s.right);
  __syncthreads();
  const bool pairs = (p.group & (p.group - 1)) == 0;
  KeySums sums{}, waiting[kMostLevels];  // the left side of each level of the tree
  for (int h = 0; h < p.group; ++h) {
    sums = head_sums(g, at, at.head * p.group + h, stats, s);
    int level = 0;
    if (pairs)
      for (; (h >> level & 1) != 0; ++level) sums = add(waiting[level], sums);
    else if (h > 0)
      sums = add(waiting[0], sums);
    waiting[level] = sums;
  }
  const int t = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int u = 0; u < kKeyChannels; ++u)
    if (const int d = u * kThreads + t; g.d_k && d < p.width)
      rows::store(g.d_k.type, g.d_k.at(at.n, at.token, at.head), d, mul_rn(sums.k[u], p.scale));
#pragma unroll
  for (int u = 0; u < kChannels; ++u)
    if (const int d = u * kThreads + t; g.d_v && d < p.value_width)
      rows::store(g.d_v.type, g.d_v.at(at.n, at.token, at.head), d, sums.v[u]);
}

__global__ void __launch_bounds__(kThreads) sinks_kernel(Backward g, const Stat* stats) {
  __shared__ double terms[kTile];
  const Problem& p = g.p;
  const std::int64_t head = blockIdx.x, last = p.sequences - 1;
  const std::int64_t rows = p.sequences == 0 ? 0 : p.cu_q ? p.q_begin(last) + p.q_len(last) : g.rows();
  const int t = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (std::int64_t first = 0; first < rows; first += kThreads) {
    if (const std::int64_t r = first + t; r < rows) {
      const std::int64_t n = p.cu_q ? 0 : r / p.queries, token = p.cu_q ? r : r % p.queries;
      terms[t] = attn128::sink_term(p.sinks[head], number(p.lse, n, token, head),
                                    stats[r * g.all_heads() + head].delta);
    }
    __syncthreads();
    if (t == 0)
      for (int i = 0; i < kThreads && first + i < rows; ++i) sum += terms[i];
    __syncthreads();
  }
  if (t == 0) rows::store(rows::Type::f32, g.d_sinks, head, 0 - sum);
}

inline std::int64_t backward_bytes_of(const Backward& g) {
  return g.rows() * g.all_heads() * std::int64_t{sizeof(Stat)};
}
inline std::int64_t key_count(const Backward& g) { return g.key_batches * g.p.room * g.p.heads; }

inline void launch_backward(const Backward& g, void* workspace, hipStream_t stream) {
  auto* stats = static_cast<Stat*>(workspace);
  const dim3 queries(static_cast<unsigned>(row_count(g.p))), keys(static_cast<unsigned>(key_count(g))),
      threads(kThreads);
  if (row_count(g.p) > 0) hipLaunchKernelGGL(stats_kernel, queries, threads, 0, stream, g, stats);
  if (row_count(g.p) > 0 && g.d_q) hipLaunchKernelGGL(queries_kernel, queries, threads, 0, stream, g, stats);
  if (key_count(g) > 0 && (g.d_k || g.d_v))
    hipLaunchKernelGGL(keys_kernel, keys, threads, 0, stream, g, stats);
  if (g.d_sinks != nullptr)
    hipLaunchKernelGGL(sinks_kernel, dim3(static_cast<unsigned>(g.all_heads())), threads, 0, stream, g,
                       stats);
}

}  // namespace rlk::simt::attention
