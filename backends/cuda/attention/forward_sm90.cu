// attention on Hopper (arithmetic sm90/t25k16/attn128/s<S>): scores and weighted values by wgmma, a tile of 128 keys at a
// time; weights by the library's own exp2.
//
// A block is a producer warpgroup and one or two consumers of 64 rows; a row is a query of one of the heads that share keys,
// so that decoding fills a tile with heads. Many rows: a block takes all keys of its 128 (D and Dv above 192 and 128: of its
// 64, whose sums are what shared memory holds), and joins splits in shared memory. Few rows: a block takes one split and
// leaves its sums in the workspace, a second kernel joins them, ascending.
// Latent heads, 576 and 512: two consumers share 64 rows, each with half of the values' channels, which is what registers
// hold; both compute all scores. A tile of keys fills shared memory, and where v is a view of k, as it is meant to be, it is
// read once; else v takes its place.
//
// Operations: 2 (D + Dv) per query head and key. Traffic: q, out and lse once, the keys and values that a tile sees for
// every 128 rows, or 64. Grids come from shapes; lengths, bounds and pages are read here, so a captured graph may be replayed with
// others.
#include <algorithm>

#include "cuda/attention/block.cuh"
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
    // Rows of one query each: the tiles of find_sequence.
    Problem one = p;
    one.group = 1;
    if (!find_sequence(one, 1, n, tile)) return;
    i = tile;
  } else {
    n = i / p.queries, i %= p.queries, token = i;
  }
  const std::int64_t keys = p.kv_count(n);
  const attn128::Visible seen = p.visible(keys - p.q_len(n) + i, keys);
  const int d = static_cast<int>(threadIdx.x);
  const bool here = d < p.value_width;
  float m = -__builtin_inff(), l = 0, o = 0;
  if (seen.first < seen.last) {
    const std::int64_t begin = p.split_of(seen.first / kTile), end = p.split_of((seen.last - 1) / kTile) + 1;
    const float* from =
        parts + (blockIdx.x * static_cast<std::int64_t>(splits) + begin) * (p.value_width + 2);
    for (std::int64_t split = begin; split < end; ++split, from += p.value_width + 2) {
      const float x = here ? from[2 + d] : 0;
      if (split == begin) {
        m = from[0], l = from[1], o = x;
        continue;
      }
      const attn128::Join j = attn128::join(m, from[0]);
      m = j.m, l = attn128::joined(l, j.a, from[1], j.b), o = attn128::joined(o, j.a, x, j.b);
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

constexpr std::int64_t kFewBlocks = 256, kMostSplits = 65535;

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
  if (splits < 2 || splits > kMostSplits || row_count(p) * splits > kMostParts / p.value_width) return 1;
  return p.queries * p.group <= 64 || tiles_at_most(p, 128) * p.heads < kFewBlocks ? splits : 1;
}
bool has_parts(const Problem& p, std::int64_t splits) { return splits > 1 || is_latent(p); }

}  // namespace

std::int64_t latent_parts(const Problem& p) {
  if (!is_latent(p)) return 0;
  const std::int64_t splits = splits_of(p);
  return splits > kMostSplits ? INT64_MAX : row_count(p) * splits * p.value_width;
}

std::int64_t workspace_bytes(const Problem& p) {
  const std::int64_t splits = spread(p);
  return has_parts(p, splits) ? row_count(p) * splits * (p.value_width + 2) * std::int64_t{sizeof(float)} : 0;
}

cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (row_count(p) == 0) return cudaSuccess;
  const std::int64_t splits = spread(p);
  auto* const parts = static_cast<float*>(workspace);
  const bool wide = std::max(p.width, p.value_width) > kNarrow, half = p.q.type == rows::Type::f16;
  const auto start = wide   ? half ? start_wide<__half> : start_wide<__nv_bfloat16>
                       : half ? start_forward<__half>
                            : start_forward<__nv_bfloat16>;
  if (cudaError_t e = start(p, parts, splits, stream); e != cudaSuccess || !has_parts(p, splits)) return e;
  const int threads = (p.value_width + 127) / 128 * 128;
  join_kernel<<<static_cast<unsigned>(row_count(p)), threads, 0, stream>>>(p, parts,
                                                                           static_cast<int>(splits));
  return cudaGetLastError();
}

}  // namespace rlk::cuda::attention
