// attention_bwd on Hopper (arithmetics sm90/t25k16/attn128 and sm90/t25k16/ex2/attn128). Four steps, and no sum that crosses
// blocks:
//
// stats    a warp per query and four heads: delta, and base of lse, which are the same for all keys
// keys     d_k and d_v: an item per 128 keys and the query heads that share them, over tiles of 64 or 128 queries of one
//          head after the other; where such items are few, for fewer heads each
// queries  d_q, in the same launch: an item per 128 queries of a head, over tiles of 64 keys, half the rule's tile, whose
//          chain goes on, or of 128
// join     the heads that share a key, where no block had all: tree, scale, rounding; rows of no sequence are +0
//
// Operations: 2 (2 D + Dv) per query head and visible key for queries, 2 (2 D + 2 Dv) for keys: scores and dP are computed
// twice, which is what it costs that d_q needs no order between blocks. Workspace: 8 bytes per query and head, 4 (D + Dv) per
// key and part of its heads, and sums that wait for those of a block's next heads.
#include "cuda/attention/block.cuh"
#include "cuda/attention/bwd.h"
#include "cuda/attention/sm90.h"

namespace rlk::cuda::attention {
namespace {

constexpr int kBlock = 256;

__device__ void clear_row(const attn128::Tensor& t, std::int64_t n, std::int64_t token, std::int64_t head,
                          int width, int first, int step) {
  for (int d = first; t && d < width; d += step) rows::store(t.type, t.at(n, token, head), d, 0.0f);
}

// Four channels as they lie in memory, and as numbers.
__device__ float4 numbers(rows::Type, const float4& x) { return x; }
__device__ float4 numbers(rows::Type type, const uint2& x) {
  if (type == rows::Type::bf16)
    return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
            __uint_as_float(x.y & 0xffff0000u)};
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&x.x)),
               high = __half22float2(*reinterpret_cast<const __half2*>(&x.y));
  return {low.x, low.y, high.x, high.y};
}
__device__ float4 products(const float4& a, const float4& b) {
  return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w)};
}

constexpr int kHeadsOfWarp = 4;  // of a query, whose rows are read together
// Of them a lane has one in the end.
__device__ int head_of(int lane) { return lane / 16 * 2 + lane / 2 % 2; }

// The tree over each head's products of 128 channels, four neighbours a lane: bits 6 and 3 of an index are folded across
// lanes, 0 and 1 in a lane, 2, 4 and 5 across lanes. In the first two steps lanes share the heads.
__device__ float tree_of(const float4 (&p)[kHeadsOfWarp]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto fold = [](float v, int step) { return __fadd_rn(v, __shfl_xor_sync(~0u, v, step)); };
  const auto half = [&](const float4& low, const float4& high, int step) {
    const bool upper = lane & step;
    const auto one = [&](float x, float y) {
      return __fadd_rn(upper ? y : x, __shfl_xor_sync(~0u, upper ? x : y, step));
    };
    return float4{one(low.x, high.x), one(low.y, high.y), one(low.z, high.z), one(low.w, high.w)};
  };
  const float4 own = half(half(p[0], p[2], 16), half(p[1], p[3], 16), 2);
  return fold(fold(fold(__fadd_rn(__fadd_rn(own.x, own.y), __fadd_rn(own.z, own.w)), 1), 4), 8);
}

// Packed rows behind the last sequence are nobody's.
__device__ std::int64_t rows_in_use(const Backward& g) {
  const Problem& p = g.p;
  if (p.sequences == 0) return 0;
  return p.cu_q ? p.q_begin(p.sequences - 1) + p.q_len(p.sequences - 1) : g.rows();
}

// Four channels of out as they lie in memory: Four. All loads are on their way before the first is looked at.
template <class Four>
__global__ void __launch_bounds__(kBlock)
    stats_kernel(const __grid_constant__ Backward g, Stat* stats, unsigned* taken) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Problem& p = g.p;
  const std::int64_t at = (blockIdx.x * std::int64_t{kBlock} + threadIdx.x) / 32, heads = g.all_heads(),
                     groups = (heads + kHeadsOfWarp - 1) / kHeadsOfWarp;
  const std::int64_t row = groups == 0 ? 0 : at / groups, head = groups == 0 ? 0 : at % groups * kHeadsOfWarp;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (at == 0 && lane == 0) *taken = 0;
  if (row >= g.rows()) return;
  const std::int64_t n = p.cu_q ? 0 : row / p.queries, token = p.cu_q ? row : row % p.queries;
  const int count = heads - head < kHeadsOfWarp ? static_cast<int>(heads - head) : kHeadsOfWarp;
  if (row >= rows_in_use(g)) {
    for (int j = 0; j < count; ++j) clear_row(g.d_q, n, token, head + j, p.width, lane, 32);
    return;
  }
  float delta = 0;
  for (int d = lane * 4; d < p.value_width + lane * 4; d += kTile) {
    uint2 d_out[kHeadsOfWarp] = {};
    Four out[kHeadsOfWarp] = {};
#pragma unroll
    for (int j = 0; j < kHeadsOfWarp; ++j)
      if (j < count && d < p.value_width) {
        d_out[j] = static_cast<const uint2*>(g.d_out.at(n, token, head + j))[d / 4];
        out[j] = static_cast<const Four*>(p.out.at(n, token, head + j))[d / 4];
      }
    float4 part[kHeadsOfWarp];
#pragma unroll
    for (int j = 0; j < kHeadsOfWarp; ++j)
      part[j] = products(numbers(g.d_out.type, d_out[j]), numbers(p.out.type, out[j]));
    delta = __fadd_rn(delta, tree_of(part));
  }
  const int own = head_of(lane);
  if ((lane & 13) != 0 || own >= count) return;
  if (g.d_lse) delta = __fadd_rn(delta, -*static_cast<const float*>(g.d_lse.at(n, token, head + own)));
  const float lse = *static_cast<const float*>(p.lse.at(n, token, head + own));
  stats[(head + own) * g.rows() + row] = {attn128::base_of_lse(lse), delta};
}

// ---- the heads that share a key

__device__ __forceinline__ float4 operator+(const float4& x, const float4& y) {
  return {__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z), __fadd_rn(x.w, y.w)};
}
// Neighbours first.
template <int Count>
__device__ __forceinline__ float4 pairs(const float4* from, int step) {
  if constexpr (Count == 1)
    return *from;
  else
    return pairs<Count / 2>(from, step) + pairs<Count / 2>(from + Count / 2 * step, step);
}
__device__ float4 ascending(const float4* from, int step, int count) {
  float4 sum = *from;
  for (int h = 1; h < count; ++h) sum = sum + from[h * step];
  return sum;
}

// The sequence whose keys row `token` is among, and whether there is one.
__device__ bool key_in_use(const Problem& p, std::int64_t& n, std::int64_t& token) {
  if (p.sequences == 0) return false;
  if (!p.cu_k) return n < p.sequences && token < p.kv_count(n);
  std::int64_t low = 0, high = p.sequences;  // the last one that begins at or before the row
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (p.k_begin(middle) <= token ? low : high) = middle;
  }
  return token - p.k_begin(low) < p.kv_count(low) - p.shared(low);
}

// A thread has four channels of a key and its head, d_v behind d_k.
template <int Group>
__global__ void __launch_bounds__(kBlock)
    join_kernel(const __grid_constant__ Backward g, const float* parts, int of_head, std::int64_t count) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const Problem& p = g.p;
  const int both = (p.width + p.value_width) / 4;
  const std::int64_t at = blockIdx.x * std::int64_t{kBlock} + threadIdx.x;
  if (at >= count) return;
  const std::int64_t key = at / both / p.heads, head = at / both % p.heads;
  std::int64_t n = p.cu_k ? 0 : key / p.room, token = p.cu_k ? key : key % p.room;
  float4 sum = make_float4(0, 0, 0, 0);
  if (key_in_use(p, n, token)) {
    const float4* const from =
        reinterpret_cast<const float4*>(parts) + (key * p.heads + head) * of_head * both + at % both;
    if constexpr (Group == 0)
      sum = ascending(from, both, of_head);
    else
      sum = pairs<Group>(from, both);
  }
  const int d = static_cast<int>(at % both) * 4;
  const bool is_key = d < p.width;
  const attn128::Tensor& to = is_key ? g.d_k : g.d_v;
  if (!to) return;
  const float scale = is_key ? p.scale : 1;
  const float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    rows::store(to.type, to.at(n, token, head), d - (is_key ? 0 : p.width) + i, __fmul_rn(x[i], scale));
}

// Rows of no sequence, where blocks have written all others: a warp per key.
__global__ void __launch_bounds__(kBlock)
    idle_kernel(const __grid_constant__ Backward g, std::int64_t count) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const Problem& p = g.p;
  const std::int64_t key = (blockIdx.x * std::int64_t{kBlock} + threadIdx.x) / 32;
  if (key >= count) return;
  std::int64_t n = p.cu_k ? 0 : key / p.room, token = p.cu_k ? key : key % p.room;
  if (key_in_use(p, n, token)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t head = 0; head < p.heads; ++head) {
    clear_row(g.d_k, n, token, head, p.width, lane, 32);
    clear_row(g.d_v, n, token, head, p.value_width, lane, 32);
  }
}
cudaError_t start_idle(const Backward& g, cudaStream_t stream) {
  const std::int64_t count = g.key_batches * g.p.room;
  if (count * g.p.heads == 0 || (!g.p.cu_k && !g.p.kv_len)) return cudaSuccess;
  return launch_early(idle_kernel, (count * 32 + kBlock - 1) / kBlock, kBlock, 0, stream, g, count);
}

template <int Group>
cudaError_t start_join(const Backward& g, const float* parts, int of_head, cudaStream_t stream) {
  if constexpr (Group > 1)
    if (of_head < Group) return start_join<Group / 2>(g, parts, of_head, stream);
  const std::int64_t count = g.key_batches * g.p.room * g.p.heads * ((g.p.width + g.p.value_width) / 4);
  if (count == 0) return cudaSuccess;
  return launch_early(join_kernel<Group>, (count + kBlock - 1) / kBlock, kBlock, 0, stream, g, parts, of_head,
                      count);
}

// ---- sinks

// A block a head; its first thread adds what the others compute.
__global__ void __launch_bounds__(kBlock)
    sinks_kernel(const __grid_constant__ Backward g, const Stat* stats) {
  __shared__ double terms[kBlock];
  const Problem& p = g.p;
  const std::int64_t head = blockIdx.x, rows = rows_in_use(g);
  const auto t = static_cast<int>(threadIdx.x);
  double sum = 0;
  for (std::int64_t first = 0; first < rows; first += kBlock) {
    if (const std::int64_t r = first + t; r < rows) {
      const std::int64_t n = p.cu_q ? 0 : r / p.queries, token = p.cu_q ? r : r % p.queries;
      const float lse = *static_cast<const float*>(p.lse.at(n, token, head));
      terms[t] = attn128::sink_term(p.sinks[head], lse, stats[head * g.rows() + r].delta);
    }
    __syncthreads();
    if (t == 0)
      for (int i = 0; i < kBlock && first + i < rows; ++i) sum += terms[i];
    __syncthreads();
  }
  if (t == 0) rows::store(rows::Type::f32, g.d_sinks, head, 0 - sum);
}

// Query heads whose sums a block joins before it stores them: all that share keys, or half of them and so on, as long as items
// are enough to go round. Parts take memory's time, of which joining the first heads saves the most.
int heads_together(const Backward& g) {
  const Problem& p = g.p;
  const std::int64_t height = is_wide(g) ? 64 : 128, tiles = (p.room + height - 1) / height,
                     items = p.cu_k ? tiles + p.sequences : tiles * p.sequences;
  const bool pairs = (p.group & (p.group - 1)) == 0;
  const auto few = [&](int together) {
    return items * (g.all_heads() / together) < (together > 4 ? 200 : 100);  // as measured
  };
  int together = p.group;
  while (together > 1 && few(together)) together = pairs ? together / 2 : 1;
  return together;
}

std::int64_t line(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }
std::int64_t stat_count(const Backward& g) { return g.rows() * g.all_heads(); }

// What `workspace` holds, and how much that is.
Gathered gather(const Backward& g, void* workspace, std::int64_t& bytes) {
  const Problem& p = g.p;
  bytes = 0;
  const auto take = [&](std::int64_t count, std::int64_t size) {
    const auto at = reinterpret_cast<std::uintptr_t>(workspace) + static_cast<std::uintptr_t>(bytes);
    bytes += line(count * size);
    return reinterpret_cast<void*>(at);
  };
  Gathered gathered;
  gathered.taken = static_cast<unsigned*>(take(1, sizeof(unsigned)));
  gathered.stats = static_cast<Stat*>(take(stat_count(g), sizeof(Stat)));
  if (!g.d_k && !g.d_v) return gathered;
  gathered.together = heads_together(g);
  // Those of wide heads have half the rows and twice the channels.
  const std::int64_t width = std::max(p.width, p.value_width) <= 64 ? 64 : 128;
  if (gathered.together > 1)
    gathered.waiting = static_cast<float*>(
        take(kMostBlocks * waiting_levels(gathered.together), 128 * 2 * width * sizeof(float)));
  if (gathered.together < p.group)
    gathered.parts = static_cast<float*>(take(g.key_batches * p.room * (g.all_heads() / gathered.together),
                                              (p.width + p.value_width) * sizeof(float)));
  return gathered;
}

}  // namespace

std::int64_t backward_workspace_bytes(const Backward& g) {
  std::int64_t bytes = 0;
  gather(g, nullptr, bytes);
  return bytes;
}

template <bool Unit>
cudaError_t launch_backward(const Backward& g, void* workspace, cudaStream_t stream) {
  std::int64_t bytes = 0;
  const Gathered gathered = gather(g, workspace, bytes);
  const std::int64_t warps = g.rows() * ((g.all_heads() + kHeadsOfWarp - 1) / kHeadsOfWarp);
  const auto blocks = static_cast<unsigned>(std::max<std::int64_t>((warps * 32 + kBlock - 1) / kBlock, 1));
  const auto stats = g.p.out.type == rows::Type::f32 ? stats_kernel<float4> : stats_kernel<uint2>;
  stats<<<blocks, kBlock, 0, stream>>>(g, gathered.stats, gathered.taken);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  const bool half = g.p.q.type == rows::Type::f16;
  const auto start = is_wide(g)
                         ? half ? start_wide_backward<__half, Unit> : start_wide_backward<__nv_bfloat16, Unit>
                     : half ? start_backward<__half, Unit>
                            : start_backward<__nv_bfloat16, Unit>;
  if (cudaError_t e = start(g, gathered, stream); e != cudaSuccess) return e;
  if (g.d_k || g.d_v) {
    const int parts = g.p.group / gathered.together;
    const bool tree = (parts & (parts - 1)) == 0;
    if (cudaError_t e = parts == 1 ? start_idle(g, stream)
                        : tree     ? start_join<kMostGroup>(g, gathered.parts, parts, stream)
                                   : start_join<0>(g, gathered.parts, parts, stream);
        e != cudaSuccess)
      return e;
  }
  if (g.d_sinks != nullptr)
    sinks_kernel<<<static_cast<unsigned>(g.all_heads()), kBlock, 0, stream>>>(g, gathered.stats);
  return cudaGetLastError();
}

template cudaError_t launch_backward<false>(const Backward&, void*, cudaStream_t);
template cudaError_t launch_backward<true>(const Backward&, void*, cudaStream_t);

}  // namespace rlk::cuda::attention
