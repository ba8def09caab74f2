// attention on Hopper (arithmetic sm90/t25k16/ex2/h8/attn128/s<S>): scores and weighted values by wgmma, a tile of 128 keys at
// a time; weights by the special function units' ex2.
//
// A block is a producer warpgroup and one to three consumers of 64 rows; a row is a query of one of the heads that share keys,
// so that several heads fill a tile. Each SM has one block, which takes one item after another, and its producer is ahead of the
// consumers by the next item's keys and queries. An item is 128 rows, or 192 of up to 64 channels, with all of their keys, whose
// splits are joined in shared memory, or above 128 channels in the workspace. Where such items are few, it is 128 rows and some
// of their splits, whose sums it leaves in the workspace, and a second kernel joins them, ascending; attention_part is the first
// of the two, a split an item, and leaves its sums in the result. Sequences of different lengths have as many items as they need,
// which blocks take by a counter. At most 16 rows a sequence, as when decoding, have a kernel of their own (few_rows.cuh), and
// another where such sequences are few (few_rows_cluster.cuh).
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

// A row's splits joined ascending, a warp a row: the factors of 32 joins at once, a lane each, then the chains of its channels,
// of which a lane has two of every 64.
constexpr int kJoined = 4;  // rows of a block

// x is [split][chunk of 64 channels], of splits from `from` on.
template <int Ahead, int Chunks>
__device__ __forceinline__ void load_sums(const float* from, std::int64_t step, int count, int channel,
                                          int width, float2 (&x)[Ahead][Chunks]) {
#pragma unroll
  for (int i = 0; i < Ahead; ++i)
#pragma unroll
    for (int c = 0; c < Chunks; ++c)
      if (i < count && channel + 64 * c < width)
        x[i][c] = *reinterpret_cast<const float2*>(from + i * step + 2 + channel + 64 * c);
}

template <int Chunks>
__device__ __forceinline__ void join_splits(const float* from, std::int64_t step, int count, int width,
                                            float& m, float& l, float2 (&o)[Chunks]) {
  constexpr int kAhead = 16 / Chunks;
  const int lane = static_cast<int>(threadIdx.x) % 32, channel = 2 * lane;
  for (int base = 0; base < count; base += 32, from += 32 * step) {
    const int here = min(count - base, 32);
    float2 own = make_float2(-__builtin_inff(), 0);
    if (lane < here) own = *reinterpret_cast<const float2*>(from + lane * step);
    float2 x[kAhead][Chunks];
    load_sums(from, step, here, channel, width, x);
    float upto = own.x;  // the maximum with all splits before
#pragma unroll
    for (int up = 1; up < 32; up *= 2) {
      const float before = __shfl_up_sync(~0u, upto, up);
      if (lane >= up) upto = fmaxf(upto, before);
    }
    upto = fmaxf(upto, m);
    const float before = __shfl_up_sync(~0u, upto, 1);
    const attn128::Join own_join = attn128::join(lane == 0 ? m : before, own.x);
    const float added = __fmul_rn(own.y, own_join.b), first_l = __shfl_sync(~0u, own.y, 0);
    m = __shfl_sync(~0u, upto, 31);
    for (int begin = 0; begin < here; begin += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i >= here) break;
        const float a = __shfl_sync(~0u, own_join.a, begin + i), b = __shfl_sync(~0u, own_join.b, begin + i),
                    more = __shfl_sync(~0u, added, begin + i);
        const bool first = base + begin + i == 0;  // it is copied
        l = first ? first_l : __fmaf_rn(l, a, more);
#pragma unroll
        for (int c = 0; c < Chunks; ++c) {
          o[c].x = first ? x[i][c].x : attn128::joined(o[c].x, a, x[i][c].x, b);
          o[c].y = first ? x[i][c].y : attn128::joined(o[c].y, a, x[i][c].y, b);
        }
      }
      load_sums(from + (begin + kAhead) * step, step, here - begin - kAhead, channel, width, x);
    }
  }
}

// A row of a warp, as memory has the sums of all: query i of sequence n and a
// query head. It may be of no sequence.
struct Row {
  std::int64_t n = 0, i, head;
  bool there = true;
  attn128::Visible seen{0, 0};

  __device__ Row(const Problem& p, std::int64_t row) {
    const std::int64_t heads = std::int64_t{p.heads} * p.group;
    head = row % heads, i = row / heads;
    if (p.cu_q) {
      int at = static_cast<int>(i);
      const auto queries_in = [&](std::int64_t sequence) { return static_cast<int>(p.q_len(sequence)); };
      Seek seek;
      there = find_place(p.sequences, queries_in, seek, n, at);
      i = at;
    } else {
      n = i / p.queries, i %= p.queries;
    }
    if (!there) return;
    const attn128::Visible here = p.here(n);
    seen = p.visible(p.keys(n) - here.first - p.q_len(n) + i, here.last - here.first);
  }
};

template <int Chunks>
__global__ void __launch_bounds__(32 * kJoined)
    join_kernel(const __grid_constant__ Problem p, const float* parts, int splits, std::int64_t rows) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kJoined + threadIdx.x / 32;
  if (number >= rows) return;
  const Row row(p, number);
  if (!row.there) return;
  const attn128::Visible& seen = row.seen;
  float m = -__builtin_inff(), l = 0;
  float2 o[Chunks] = {};
  // For the parts. What is read before is older than the kernel that they come from: it lets this one start once its own wait
  // is over.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (seen.first < seen.last) {
    const std::int64_t begin = p.split_of(seen.first / kTile), end = p.split_of((seen.last - 1) / kTile) + 1;
    join_splits(parts + (number * splits + begin) * (p.value_width + 2), p.value_width + 2,
                static_cast<int>(end - begin), p.value_width, m, l, o);
  }
  const bool none = l == 0;
  float a = 1, b = 0, lse = p.sinks != nullptr ? p.sinks[row.head] : -__builtin_inff();
  if (!none) {
    if (p.sinks != nullptr) {
      const attn128::Join j = attn128::join(m, __fmul_rn(lse, attn128::kLog2e));
      m = j.m, a = j.a, b = j.b, l = attn128::joined(l, a, 1.0f, b);
    }
    lse = attn128::lse_of(m, l);
  }
  const std::int64_t at = p.q_begin(row.n) + row.i;
  const float inverse = none ? 0.0f : __fdiv_rn(1.0f, l);
  const auto put = [&](int d, float x) {
    if (p.sinks != nullptr) x = attn128::joined(x, a, 0.0f, b);
    rows::store(p.out.type, p.out.at(row.n, at, row.head), d, none ? 0.0f : __fmul_rn(x, inverse));
  };
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int c = 0; c < Chunks; ++c)
    if (const int d = 64 * c + 2 * lane; d < p.value_width) put(d, o[c].x), put(d + 1, o[c].y);
  if (p.lse && lane == 0) rows::store(rows::Type::f32, p.lse.at(row.n, at, row.head), 0, lse);
}

// Of attention_part, sums of splits of which a row sees no key. Behind the other kernel, which leaves what is computed of rows
// beside those that see some.
__global__ void __launch_bounds__(32 * kJoined)
    mark_kernel(const __grid_constant__ Problem p, std::int64_t rows) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kJoined + threadIdx.x / 32;
  if (number >= rows) return;
  const Row row(p, number);
  if (!row.there) return;
  const auto [first, last] = row.seen;
  for (std::int64_t split = 0; split < p.splits(); ++split) {
    const std::int64_t begin = split * p.split;
    if (first < last && (p.split == 0 || (first < begin + p.split && last > begin))) continue;
    auto* const to = reinterpret_cast<float2*>(p.part(p.partials, number, split));
    for (int d = static_cast<int>(threadIdx.x) % 32; d <= p.value_width / 2; d += 32)
      to[d] = d == 0 ? make_float2(-__builtin_inff(), attn128::kNoKey) : make_float2(0, 0);
  }
}

// ---- which blocks there are

constexpr std::int64_t kManyBlocks = 1056;

// Splits whose sums blocks leave; 1: none, since blocks take whole rows. Those of latent heads never do.
std::int64_t spread(const Problem& p) {
  const std::int64_t splits = splits_of(p);
  return is_latent(p) || (splits <= kMostSplits && splits_each(p) > 0) ? splits : 1;
}

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
  const std::int64_t blocks = std::max<std::int64_t>(1, std::min(splits, kManyBlocks / rows));
  // Fewer splits a block each, where that makes no more than a quarter more of them.
  const std::int64_t each = (splits + blocks - 1) / blocks,
                     more = each == 1 ? blocks : (splits + each - 2) / (each - 1);
  return blocks > 1 && rows * more <= kManyBlocks + kManyBlocks / 4 ? more : blocks;
}

// Few rows, and few splits of all sequences and heads: a cluster each; that many are on the way at once. few_rows_blocks is then
// the number of splits, and workspace_bytes has room for their parts.
bool in_clusters(const Problem& p) {
  constexpr std::int64_t kMostClusters = 24;
  return p.split != 0 && !p.k.f8 && p.sequences * p.heads * splits_of(p) <= kMostClusters;
}

// Of items that blocks have taken none. The kernel that counts them begins beside it, and waits for it before it takes one.
__global__ void clear_kernel(unsigned* taken) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  *taken = 0;
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
  const std::int64_t rows = row_count(p);
  const auto kernel = p.value_width <= 128   ? join_kernel<2>
                      : p.value_width <= 256 ? join_kernel<4>
                                             : join_kernel<8>;
  return launch_early(kernel, (rows + kJoined - 1) / kJoined, 32 * kJoined, 0, stream, p, parts,
                      static_cast<int>(splits), rows);
}

}  // namespace

cudaError_t clear(unsigned* taken, cudaStream_t stream) {
  clear_kernel<<<1, 1, 0, stream>>>(taken);
  return cudaGetLastError();
}

std::int64_t latent_parts(const Problem& p) {
  if (!is_latent(p)) return 0;
  const std::int64_t splits = splits_of(p);
  return splits > kMostSplits ? INT64_MAX : row_count(p) * splits * p.value_width;
}

std::int64_t workspace_bytes(const Problem& p) {
  std::int64_t splits = spread(p);
  if (few_rows(p) != 0 && few_rows_blocks(p) > 1) splits = splits_of(p);
  return (floats_of(p, splits) + counts_items(p)) * static_cast<std::int64_t>(sizeof(float));
}

cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (row_count(p) == 0) return cudaSuccess;
  auto* const parts = static_cast<float*>(workspace);
  const bool half = p.q.type == rows::Type::f16;
  if (few_rows(p) != 0) {
    const std::int64_t splits = splits_of(p), blocks = few_rows_blocks(p);
    if (in_clusters(p)) {
      const auto start = half ? start_clusters<__half> : start_clusters<__nv_bfloat16>;
      const cudaError_t e = start(p, parts, splits, stream);
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
  if (cudaError_t e = start_tiles(p, p.partials, p.splits(), stream); e != cudaSuccess) return e;
  const std::int64_t rows = row_count(p);
  mark_kernel<<<static_cast<unsigned>((rows + kJoined - 1) / kJoined), 32 * kJoined, 0, stream>>>(p, rows);
  return cudaGetLastError();
}

}  // namespace rlk::cuda::attention
