// The portable GPU kernels of attention (arithmetic fma32/attn128/s<S>): the bits of the native backend on every GPU.
//
// rows    a block of 128 threads per query and head, a thread per key of a tile for scores and per channel of Dv for
//         weighted values. Its splits one after another, joined in registers
// splits  where queries are few, as in decoding: a block per query, head and split leaves its sums in the workspace
// joins   joins these ascending, a block per query and head
// merge   the same of what several ranks left (attention_merge); attention_part is splits alone
//
// Grids come from shapes; lengths, bounds and pages are read on the device, so that a captured graph may be replayed with
// others. What they say is held to the memory there is.
#pragma once

#include "simt/attention/launchers.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::attention {

using attn128::kTile;

inline constexpr int kThreads = kTile;
inline constexpr int kMostWidth = 576, kMostValueWidth = 512;
inline constexpr int kChannels = kMostValueWidth / kThreads;  // of a thread, kThreads apart
inline constexpr std::int64_t kFewRows = 2048;

struct Shared {
  float q[kMostWidth];
  float scores[kTile], weights[kTile], tree[kTile];
  const void* value[kTile];
};

// A query and head, and what it sees.
struct Place {
  std::int64_t n, token, head, kv_head;
  attn128::KeyRows rows;
  std::int64_t first;  // of the keys that are here
  attn128::Visible seen;
  bool there;
};

__device__ inline Place place(const Problem& p, std::int64_t row) {
  const std::int64_t heads = std::int64_t{p.heads} * p.group;
  Place at{};
  at.head = row % heads, at.kv_head = at.head / p.group;
  std::int64_t i = row / heads;
  if (p.cu_q) {
    at.token = i;
    while (at.n < p.sequences && i >= p.q_begin(at.n) + p.q_len(at.n)) ++at.n;
    if (at.n == p.sequences || i < p.q_begin(at.n)) return at;
    i -= p.q_begin(at.n);
  } else {
    at.n = i / p.queries, i %= p.queries, at.token = i;
  }
  const attn128::Visible here = p.here(at.n);
  at.rows = p.key_rows(at.n), at.first = here.first;
  at.seen = p.visible(p.keys(at.n) - p.q_len(at.n) + i, here);
  at.there = true;
  return at;
}

// The sums of a split, or of all so far; o has channels t, t + kThreads, ..
struct Sums {
  float m, l, o[kChannels];
};
__device__ inline Sums no_sums() { return {-__builtin_inff(), 0, {}}; }

__device__ inline void join(int width, Sums& all, const Sums& part) {
  const attn128::Join j = attn128::join(all.m, part.m);
  all.m = j.m, all.l = attn128::joined(all.l, j.a, part.l, j.b);
#pragma unroll
  for (int u = 0; u < kChannels; ++u)
    if (u * kThreads < width) all.o[u] = attn128::joined(all.o[u], j.a, part.o[u], j.b);
}
__device__ inline void join(int width, Sums& all, const Sums& part, bool& begun) {
  if (begun)
    join(width, all, part);
  else
    all = part;
  begun = true;
}

__device__ inline void load_query(const Problem& p, const Place& at, Shared& s) {
  const void* q = p.q.at(at.n, at.token, at.head);
  for (int d = static_cast<int>(threadIdx.x); d < p.width; d += kThreads) s.q[d] = rows::load(p.q.type, q, d);
  __syncthreads();
}

// The sum of a tile's numbers, of which every thread has written its own; in the rule's order.
__device__ inline float fold(float* tree) {
  const int t = static_cast<int>(threadIdx.x);
  constexpr int kBits[] = {6, 3, 0, 1, 2, 4, 5};
  int folded = 0;
#pragma unroll
  for (int bit : kBits) {
    __syncthreads();
    folded |= 1 << bit;
    if ((t & folded) == 0) tree[t] = add_rn(tree[t], tree[t + (1 << bit)]);
  }
  __syncthreads();
  return tree[0];
}

// One tile of keys; every thread of the block takes part.
__device__ inline void add_tile(const Problem& p, const Place& at, std::int64_t tile, Shared& s, Sums& sums) {
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t first = tile * kTile, j = first + t;
  const bool visible = j >= at.seen.first && j < at.seen.last;
  float score = -__builtin_inff();
  if (visible) {
    const void* k = p.key(p.k, at.n, at.rows, j - at.first, at.kv_head);
    s.value[t] = p.key(p.v, at.n, at.rows, j - at.first, at.kv_head);
    score = 0;
    const float factor = p.k_scale.of(at.kv_head);
    for (int d = 0; d < p.width; ++d) score = fused(s.q[d], attn128::element(p.k, k, d, factor), score);
    score = attn128::capped(p, score);
  }
  s.scores[t] = score;
  __syncthreads();
  float top = -__builtin_inff();
  for (int i = 0; i < kTile; ++i) top = s.scores[i] > top ? s.scores[i] : top;
  const float scaled = top * p.c, m = scaled > sums.m ? scaled : sums.m, base = attn128::base_of(m);
  const float weight = visible ? attn128::weight(score, p.c, -base) : 0;
  s.tree[t] = weight;
  s.weights[t] = rows::round_to(p.v.type, weight);
  const float sum = fold(s.tree);
  const float a = simt::exp2(sums.m - base);
  sums.l = fused(sums.l, a, sum);
  sums.m = m;
  const int from = static_cast<int>(at.seen.first > first ? at.seen.first - first : 0),
            to = static_cast<int>(at.seen.last < first + kTile ? at.seen.last - first : kTile);
  const float factor = p.v_scale.of(at.kv_head);
#pragma unroll
  for (int u = 0; u < kChannels; ++u) {
    const int d = u * kThreads + t;
    if (d >= p.value_width) continue;
    float o = mul_rn(sums.o[u], a);
    for (int i = from; i < to; ++i) o = fused(s.weights[i], attn128::element(p.v, s.value[i], d, factor), o);
    sums.o[u] = add_rn(o, 0.0f);  // no -0
  }
  __syncthreads();  // the next tile overwrites what is shared
}

// The tiles of one split that the row sees a key of.
__device__ inline Sums split_sums(const Problem& p, const Place& at, std::int64_t split, Shared& s) {
  Sums sums = no_sums();
  for (std::int64_t tile = at.seen.first / kTile; tile * kTile < at.seen.last; ++tile)
    if (p.split_of(tile) == split) add_tile(p, at, tile, s, sums);
  return sums;
}

// The first and the last split with a visible key, where there is one.
__device__ inline std::int64_t first_split(const Problem& p, const Place& at) {
  return p.split_of(at.seen.first / kTile);
}
__device__ inline std::int64_t last_split(const Problem& p, const Place& at) {
  return p.split_of((at.seen.last - 1) / kTile);
}

// Of a row whose sums are those of all its splits; `none`: it has none.
__device__ inline void finish(Sums sums, bool none, const float* sinks, std::int64_t head, rows::Type type,
                              void* out, void* lse_out, int width) {
  const int t = static_cast<int>(threadIdx.x);
  none = none || sums.l == 0;
  float lse = sinks != nullptr ? sinks[head] : -__builtin_inff();
  if (!none) {
    if (sinks != nullptr) join(width, sums, {lse * attn128::kLog2e, 1, {}});
    lse = attn128::lse_of(sums.m, sums.l);
  }
  const float inverse = 1 / sums.l;
#pragma unroll
  for (int u = 0; u < kChannels; ++u)
    if (const int d = u * kThreads + t; d < width)
      rows::store(type, out, d, none ? 0.0f : mul_rn(sums.o[u], inverse));
  if (lse_out != nullptr && t == 0) rows::store(rows::Type::f32, lse_out, 0, lse);
}
__device__ inline void finish(const Problem& p, const Place& at, const Sums& sums, bool begun) {
  finish(sums, !begun, p.sinks, at.head, p.out.type, p.out.at(at.n, at.token, at.head),
         p.lse ? p.lse.at(at.n, at.token, at.head) : nullptr, p.value_width);
}

__global__ void __launch_bounds__(kThreads) rows_kernel(Problem p) {
  __shared__ Shared s;
  const Place at = place(p, blockIdx.x);
  if (!at.there) return;
  load_query(p, at, s);
  Sums all = no_sums();
  bool begun = false;
  if (at.seen.first < at.seen.last)
    for (std::int64_t split = first_split(p, at); split <= last_split(p, at); ++split)
      join(p.value_width, all, split_sums(p, at, split, s), begun);
  finish(p, at, all, begun);
}

// m, l and O of a split, as they lie in memory.
__device__ inline void put_sums(float* to, const Sums& sums, int width) {
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) to[0] = sums.m, rows::store(rows::Type::f32, to, 1, sums.l);
#pragma unroll
  for (int u = 0; u < kChannels; ++u)
    if (const int d = u * kThreads + t; d < width) rows::store(rows::Type::f32, to, 2 + d, sums.o[u]);
}
__device__ inline Sums sums_at(const float* from, int width) {
  Sums sums{from[0], from[1], {}};
#pragma unroll
  for (int u = 0; u < kChannels; ++u)
    if (const int d = u * kThreads + static_cast<int>(threadIdx.x); d < width) sums.o[u] = from[2 + d];
  return sums;
}

// The split blockIdx.y of those here; in attention_part one without a visible key is marked so.
__global__ void __launch_bounds__(kThreads) splits_kernel(Problem p, float* parts) {
  __shared__ Shared s;
  const Place at = place(p, blockIdx.x);
  if (!at.there) return;
  const std::int64_t split = p.split_of(at.first / kTile) + blockIdx.y;
  float* to = p.part(parts, blockIdx.x, blockIdx.y);
  if (at.seen.first >= at.seen.last || split < first_split(p, at) || split > last_split(p, at)) {
    if (p.partials != nullptr) put_sums(to, {-__builtin_inff(), attn128::kNoKey, {}}, p.value_width);
    return;
  }
  load_query(p, at, s);
  put_sums(to, split_sums(p, at, split, s), p.value_width);
}

__global__ void __launch_bounds__(kThreads) joins_kernel(Problem p, float* parts) {
  const Place at = place(p, blockIdx.x);
  if (!at.there) return;
  Sums all = no_sums();
  bool begun = false;
  if (at.seen.first < at.seen.last)
    for (std::int64_t split = first_split(p, at); split <= last_split(p, at); ++split)
      join(p.value_width, all, sums_at(p.part(parts, blockIdx.x, split), p.value_width), begun);
  finish(p, at, all, begun);
}

__global__ void __launch_bounds__(kThreads) merge_kernel(attn128::Merge g) {
  const attn128::MergeRow at = attn128::merge_row(g, blockIdx.x);
  Sums all = no_sums();
  bool begun = false;
  for (std::int64_t i = 0; i < g.parts * g.splits; ++i)
    if (const float* part = attn128::split_at(g, at, i); part[1] != attn128::kNoKey)
      join(g.width, all, sums_at(part, g.width), begun);
  finish(all, !begun, g.sinks, at.head, g.out.type, g.out.at(at.n, at.token, at.head),
         g.lse ? g.lse.at(at.n, at.token, at.head) : nullptr, g.width);
}

inline std::int64_t row_count(const Problem& p) {
  return p.queries * (p.cu_q ? 1 : p.sequences) * p.heads * p.group;
}
// Splits that are worth a block each; 1: all of a row's are one block's.
inline std::int64_t spread(const Problem& p) {
  if (row_count(p) > kFewRows) return 1;
  const std::int64_t splits = p.splits();
  return splits < 1 || splits > kMostSplits ? 1 : splits;
}
inline std::int64_t workspace_bytes_of(const Problem& p) {
  const std::int64_t splits = spread(p);
  return splits == 1 ? 0 : row_count(p) * splits * (p.value_width + 2) * std::int64_t{sizeof(float)};
}

inline void launch_forward(const Problem& p, void* workspace, hipStream_t stream) {
  const std::int64_t count = row_count(p), splits = spread(p);
  if (count == 0) return;
  const dim3 blocks(static_cast<unsigned>(count));
  if (splits == 1) {
    hipLaunchKernelGGL(rows_kernel, blocks, dim3(kThreads), 0, stream, p);
    return;
  }
  hipLaunchKernelGGL(splits_kernel, dim3(static_cast<unsigned>(count), static_cast<unsigned>(splits)),
                     dim3(kThreads), 0, stream, p, static_cast<float*>(workspace));
  hipLaunchKernelGGL(joins_kernel, blocks, dim3(kThreads), 0, stream, p, static_cast<float*>(workspace));
}

inline void launch_part(const Problem& p, hipStream_t stream) {
  const std::int64_t count = row_count(p), splits = p.splits();
  if (count == 0 || splits == 0) return;
  hipLaunchKernelGGL(splits_kernel, dim3(static_cast<unsigned>(count), static_cast<unsigned>(splits)),
                     dim3(kThreads), 0, stream, p, p.partials);
}

inline void launch_merge(const attn128::Merge& g, hipStream_t stream) {
  if (g.rows() == 0) return;
  hipLaunchKernelGGL(merge_kernel, dim3(static_cast<unsigned>(g.rows())), dim3(kThreads), 0, stream, g);
}

}  // namespace rlk::simt::attention
