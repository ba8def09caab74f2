// attention on Hopper (arithmetic sm90/t25k16/ex2/h8/attn128/s<S>): scores and weighted values by wgmma, a tile of 128 keys at
// a time; weights by the special function units' ex2.
//
// A block is a producer warpgroup and one to three consumers of 64 rows; a row is a query of one of the heads that share keys,
// so that several heads fill a tile. Many rows: an item is 128 rows, or 192 of up to 64 channels, with all of their keys,
// whose splits are joined in shared memory, or above 128 channels in the workspace; each SM has one block, which takes items
// by turns, and its producer is ahead of the consumers by the next item's keys and queries. Few rows: each block takes one
// split of 64 rows and leaves its sums in the workspace, a second kernel joins them, ascending; attention_part is the first
// of the two, for any rows, and leaves its sums in the result. At most 16 rows a sequence, as when decoding, have a kernel of
// their own (few_rows.cuh), and another where such sequences are few (few_rows_cluster.cuh).
// Latent heads, 576 and 512: two consumers share 64 rows, each with half of the values' channels, which is what registers
// hold; both compute all scores. A tile of keys fills shared memory, and where v is a view of k, as it is meant to be, it is
// read once; else v takes its place.
//
// Operations: 2 (D + Dv) per query head and key. Traffic: q, out and lse once, the keys and values that a tile sees for
// every 192, 128 or 64 rows. Grids come from shapes; lengths, bounds and pages are read here, so a captured graph may be replayed with
// others.
#include <algorithm>

#include "cuda/attention/block.cuh"
#include "cuda/attention/few_rows.h"
#include "cuda/attention/forward.h"

namespace rlk::cuda::attention {
namespace {

// A row's splits joined ascending, a block a row, a thread a channel.
__global__ void __launch_bounds__(512)
    join_kernel(const __grid_constant__ Problem p, const float* parts, int splits) {
  const std::int64_t heads = std::int64_t{p.heads} * p.group, head = blockIdx.x % heads;
  std::int64_t i = blockIdx.x / heads, n = 0, token = i;
  if (p.cu_q) {
    int tile = static_cast<int>(i);
    const auto queries_in = [&](std::int64_t sequence) { return static_cast<int>(p.q_len(sequence)); };
    if (!find_tile(p.sequences, queries_in, n, tile)) return;
    i = tile;
  } else {
    n = i / p.queries, i %= p.queries, token = i;
  }
  const std::int64_t keys = p.kv_count(n);
  const attn128::Visible seen = p.visible(keys - p.q_len(n) + i, keys);
  const int d = static_cast<int>(threadIdx.x);
  const bool here = d < p.value_width;
  float m = -__builtin_inff(), l = 0, o = 0;
  // For the parts. What is read before is older than the kernel that they come from: it lets this one start once its own wait,
  // if it has one, is over.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (seen.first < seen.last) {
    const std::int64_t begin = p.split_of(seen.first / kTile), end = p.split_of((seen.last - 1) / kTile) + 1;
    const float* from =
        parts + (blockIdx.x * static_cast<std::int64_t>(splits) + begin) * (p.value_width + 2);
    constexpr int kAhead = 8;  // parts on their way at once
    const std::int64_t step = p.value_width + 2;
    for (std::int64_t split = begin; split < end; split += kAhead, from += kAhead * step) {
      float x[kAhead], parts_m[kAhead], parts_l[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (split + i >= end) break;
        x[i] = here ? from[i * step + 2 + d] : 0, parts_m[i] = from[i * step],
        parts_l[i] = from[i * step + 1];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (split + i >= end) break;
        const attn128::Join j = attn128::join(m, parts_m[i]);
        const bool first = split + i == begin;
        l = first ? parts_l[i] : attn128::joined(l, j.a, parts_l[i], j.b);
        o = first ? x[i] : attn128::joined(o, j.a, x[i], j.b);
        m = first ? parts_m[i] : j.m;
      }
    }
  }
  const bool none = l == 0;
  float lse = p.sinks != nullptr ? p.sinks[head] : -__builtin_inff();
  if (!none) {
    if (p.sinks != nullptr) {
      const attn128::Join j = attn128::join(m, __fmul_rn(lse, attn128::kLog2e));
      m = j.m, l = attn128::joined(l, j.a, 1.0f, j.b), o = attn128::joined(o, j.a, 0.0f, j.b);
    }
    lse = attn128::lse_of(m, l);
  }
  const std::int64_t at = p.cu_q ? p.q_begin(n) + i : token;
  if (here) rows::store(p.out.type, p.out.at(n, at, head), d, none ? 0.0f : __fmul_rn(o, __fdiv_rn(1.0f, l)));
  if (p.lse && d == 0) rows::store(rows::Type::f32, p.lse.at(n, at, head), 0, lse);
}

// ---- which blocks there are

constexpr std::int64_t kFewBlocks = 256, kManyBlocks = 1056, kMultiprocessors = 132;

std::int64_t row_count(const Problem& p) {
  return p.queries * (p.cu_q ? 1 : p.sequences) * p.heads * p.group;
}
std::int64_t splits_of(const Problem& p) {
  return p.split == 0 || p.room <= p.split ? 1 : (p.room + p.split - 1) / p.split;
}

// Splits that a block each takes; 1: blocks take whole rows. Where rows alone make blocks enough, or make too many parts,
// splits stay together; those of latent heads never do.
std::int64_t spread(const Problem& p) {
  const std::int64_t splits = splits_of(p);
  if (is_latent(p)) return splits;
  if (p.prefix_of) return 1;
  if (splits < 2 || splits > kMostSplits || row_count(p) * splits > kMostParts / p.value_width) return 1;
  return p.queries * p.group <= 64 || tiles_at_most(p, 128) * p.heads < kFewBlocks ? splits : 1;
}
bool has_parts(const Problem& p, std::int64_t splits) { return splits > 1 || is_latent(p); }

// Few rows: blocks that share the splits of a sequence and head, so many that all SMs are busy and none for long. A block that
// has all splits joins them in registers, without a second kernel, and memory is read 8% faster: so where blocks are many, or
// are about as many as there is room for at once, one or two an SM, and end together, since sequences have one length.
std::int64_t few_rows_blocks(const Problem& p) {
  const std::int64_t splits = splits_of(p), rows = std::max<std::int64_t>(1, p.sequences * p.heads);
  if (splits < 2 || row_count(p) * splits > kMostParts / p.value_width) return 1;
  const bool equal = !p.kv_len && !p.cu_k;
  for (const std::int64_t full : {kMultiprocessors, 2 * kMultiprocessors})
    if (equal && rows <= full && rows > full - full / 7) return 1;
  if (equal && rows > 3 * kMultiprocessors + kMultiprocessors / 4) return 1;
  return std::max<std::int64_t>(1, std::min(splits, kManyBlocks / rows));
}

// Few rows, and few splits of all sequences and heads: blocks of a cluster, which has one of them; else 0. Splits are then so
// few that few_rows_blocks is their number, and workspace_bytes has room for their parts.
int cluster_blocks(const Problem& p) {
  if (p.split == 0 || p.k.f8) return 0;
  const std::int64_t clusters = p.sequences * p.heads * splits_of(p);
  return clusters <= 16 ? 8 : clusters <= 32 ? 4 : 0;
}

// Blocks that take whole rows of wide heads keep the sums of other splits in memory: as many floats.
std::int64_t totals_of(const Problem& p) {
  if (std::max(p.width, p.value_width) <= kNarrow || splits_of(p) == 1) return 0;
  const bool middle = !p.k.f8 && p.width <= 192 && p.value_width <= 128;
  return std::min<std::int64_t>(tiles_at_most(p, 128) * p.heads, kMostBlocks) * 128 * (middle ? 128 : 256);
}

cudaError_t start_tiles(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  const bool half = p.q.type == rows::Type::f16, wide = std::max(p.width, p.value_width) > kNarrow;
  const auto start = p.k.f8 ? half ? start_f8<__half> : start_f8<__nv_bfloat16>
                     : wide ? half ? start_wide<__half> : start_wide<__nv_bfloat16>
                     : half ? start_forward<__half>
                            : start_forward<__nv_bfloat16>;
  return start(p, parts, splits, stream);
}

cudaError_t launch_join(const Problem& p, const float* parts, std::int64_t splits, cudaStream_t stream) {
  return launch_early(join_kernel, row_count(p), (p.value_width + 127) / 128 * 128, 0, stream, p, parts,
                      static_cast<int>(splits));
}

}  // namespace

std::int64_t latent_parts(const Problem& p) {
  if (!is_latent(p)) return 0;
  const std::int64_t splits = splits_of(p);
  return splits > kMostSplits ? INT64_MAX : row_count(p) * splits * p.value_width;
}

std::int64_t workspace_bytes(const Problem& p) {
  std::int64_t splits = spread(p);
  if (few_rows(p) != 0 && few_rows_blocks(p) > 1) splits = splits_of(p);
  constexpr std::int64_t kFloat = sizeof(float);
  return has_parts(p, splits) ? row_count(p) * splits * (p.value_width + 2) * kFloat : totals_of(p) * kFloat;
}

cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (row_count(p) == 0) return cudaSuccess;
  auto* const parts = static_cast<float*>(workspace);
  const bool half = p.q.type == rows::Type::f16;
  if (few_rows(p) != 0) {
    const std::int64_t splits = splits_of(p), blocks = few_rows_blocks(p);
    if (const int in_cluster = cluster_blocks(p); in_cluster != 0) {
      const auto start = half ? start_clusters<__half> : start_clusters<__nv_bfloat16>;
      const cudaError_t e = start(p, parts, splits, in_cluster, stream);
      return e != cudaSuccess || splits == 1 ? e : launch_join(p, parts, splits, stream);
    }
    const Maps maps = few_rows_maps(p);
    if (maps.box != 0) {
      const auto start = p.k.f8 ? half ? start_few_f8<__half> : start_few_f8<__nv_bfloat16>
                         : half ? start_few<__half>
                                : start_few<__nv_bfloat16>;
      const cudaError_t e = start(p, maps, parts, splits, blocks, stream);
      return e != cudaSuccess || blocks == 1 ? e : launch_join(p, parts, splits, stream);
    }
  }
  const std::int64_t splits = spread(p);
  const cudaError_t e = start_tiles(p, parts, splits, stream);
  return e != cudaSuccess || !has_parts(p, splits) ? e : launch_join(p, parts, splits, stream);
}
cudaError_t launch_part(const Problem& p, cudaStream_t stream) {
  if (row_count(p) == 0 || p.splits() == 0) return cudaSuccess;
  return start_tiles(p, p.partials, p.splits(), stream);
}

}  // namespace rlk::cuda::attention
