// KDA preparation, a block for every (chunk, value head): everything of a chunk that does not need the state.
//
//   E_ij,d = prod_{j < l <= i} e^{g_ld}        P_ij = scale sum_d q_id k_jd E_ij,d          (i >= j)
//   M_ij   = beta_i sum_d k_id k_jd E_ij,d     (i > j)          A = (I + M)^-1
//   writes k e^G, k e^{G_L - G}, scale q e^G, A, P (bf16), beta and e^{G_L} (fp32): Record<K>
//
// Per token and head: reads 2K (q) + 2K (k) + 4K (g) bytes, writes 6K + 256: 1.8 kB at K = 128; for a
// backward with l2norm also 4K + 8, q and k as they are multiplied, and their factors.
//
// At K = 128, where sequences are rows of a batch, two blocks a multiprocessor stay and take one chunk after
// the other: TMA brings the next while A of this one, which two warps begin alone, is made. It takes the
// place of tiles that are done by then, and no thread has addresses to find.
//
// A warp has a strip of 8 tokens, a lane K / 32 neighbouring channels of all 8, so that whatever stays inside
// a strip needs no barrier. Decays are running products of e^{g}, never differences of sums: no overflow, no
// cancellation at large |G|, masked gates (-1000) give exact zeros.
// P and M by halving inside a strip: at level s = 4, 2, 1 the tokens with bit s set ("upper") meet those of
// the s tokens before their aligned group ("lower"), with the decay since the group began on one side and
// until it begins on the other. Between strips I > J: the decay since strip I began, that of the whole strips
// between them, and that until strip J ends. All factors are at most 1 whatever the gates, so one path serves
// bounded and unbounded gates. A 16 x 8 mma tile carries 8 rows of q and 8 of k, or two levels of a strip.
// Rejected: one exp per (i, j, d) in the diagonal blocks (70 k exps per chunk), a single anchor per 16 tokens
// (overflows below g = -5), halving over all 64 tokens (every token scaled for two more levels, and their
// barriers). Operands are fp16 after scaling each row of q and k by a power of two (row maximum in [256,
// 512)): tf32's precision at bf16's cost, for any magnitude.
#include <algorithm>

#include "cuda/kda/prepare/inverse.cuh"
#include "cuda/kda/prepare/load.cuh"
#include "cuda/kda/prepare/strips.cuh"

namespace rlk::cuda::kda {
namespace {

using namespace prepare;

// P and M; true if a number of M is NaN or infinite.
template <class B, int K>
__device__ inline bool multiply_strips(const B& b, const Strip<K>& x) {
  Strips<B> strips(b, x);
  strips.four_and_two();
  strips.one_and_diagonal();
  strips.publish();
  __syncthreads();
  // 28 pairs, at most 4 a warp.
  strips.cross(b.strip, 0, min(b.strip, 4));
  if (b.strip < 4) strips.cross(7 - b.strip, 4, 7 - b.strip);
  return __syncthreads_or(strips.poison != 0.f);
}

// The first row of M that is NaN or infinite, from which on M becomes zero: such a token must not reach the
// ones before it, so its row and those after count as zero, and those of A become NaN at the end.
template <class B>
__device__ inline int cut_broken_rows(const B& b) {
  auto& s = b.s;
  if (b.tid < 64) {
    float zero = 0.f;
    for (int j = 0; j < b.tid; ++j) zero = fmaf(s.m[b.tid * kPitch + j], 0.f, zero);
    const unsigned broken = __ballot_sync(~0u, zero != 0.f);
    if (b.lane == 0) s.first[b.strip] = broken ? 32 * b.strip + __ffs(static_cast<int>(broken)) - 1 : 64;
  }
  __syncthreads();
  const int first = min(s.first[0], s.first[1]);
  for (int i = 64 * first + b.tid; i < 4096; i += kThreads) s.m[i / 64 * kPitch + i % 64] = 0.f;
  __syncthreads();
  return first;
}

// A's two diagonal blocks of 32, and the zeros above them.
template <class B>
__device__ inline void store_diagonal(const B& b, int first) {
  const int i = b.tid / 4, piece = b.tid % 4, own = i / 32 * 4 + piece;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (own / 2 <= i / 16) {
    const float4 y = *reinterpret_cast<const float4*>(b.s.a + i * kPitch + 8 * own);
    const float4 z = *reinterpret_cast<const float4*>(b.s.a + i * kPitch + 8 * own + 4);
    x = make_uint4(pack(y.x, y.y), pack(y.z, y.w), pack(z.x, z.y), pack(z.z, z.w));
  }
  if (i >= first) x = make_uint4(~0u, ~0u, ~0u, ~0u);
  char* const to = b.record + B::R::kInverse;
  *reinterpret_cast<uint4*>(to + row_tile(64, i, own)) = x;
  if (i < 32) *reinterpret_cast<uint4*>(to + row_tile(64, i, 4 + piece)) = make_uint4(0, 0, 0, 0);
}

// P and A to the record; rows of A from `first` on are NaN.
template <class B>
__device__ inline void invert(const B& b, int first) {
  if (b.tid < 64) {
    invert_halves(b.s.m, b.s.a);
  } else {
    for (int i = b.tid - 64; i < 512; i += kThreads - 64) {
      const int at = row_tile(64, i / 8, i % 8);
      *reinterpret_cast<uint4*>(b.record + B::R::kScores + at) =
          *reinterpret_cast<const uint4*>(b.s.scores.p + at);
    }
  }
  __syncthreads();
  multiply_below(b.s.m, b.s.a, b.s.wide);
  store_diagonal(b, first);
  __syncthreads();
  double x[4];
  finish_below(b.s.a, b.s.wide, x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int i = 32 + 16 * (b.strip / 4) + 8 * n + b.lane / 4;
    *reinterpret_cast<std::uint32_t*>(b.record + B::R::kInverse + row_tile(64, i, b.strip % 4) +
                                      4 * (b.lane % 4)) =
        i < first ? pack(static_cast<float>(x[2 * n]), static_cast<float>(x[2 * n + 1])) : ~0u;
  }
}

// `read` brings the rows, `leave` says that their place is free.
template <class B, class Read, class Leave>
__device__ inline void prepare_chunk(B& b, Read read, Leave leave) {
  constexpr int K = B::K;
  const Job& p = b.p;
  float beta = 0.f;  // of token `tid`
  if (b.tid < b.c.length) beta = load_real(p.beta, index_of(p.beta, b.c.row, b.c.token + b.tid, b.hv));
  Strip<K> x;
  read(x);
  if (p.l2norm) normalise_rows(b, x);
  apply_gates(b, x);
  b.find_columns();
  store_total(b, x);
  find_scales(b, x);
  if (b.tid < 64) {
    const float strength = b.tid < b.c.length ? beta_value(p, beta) : 0.f;
    b.s.beta[b.tid] = strength;
    reinterpret_cast<float*>(b.record + Record<K>::kBeta)[b.tid] = strength;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    reinterpret_cast<uint4*>(b.s.scores.p)[b.tid + i * kThreads] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  store_tiles(b, x);
  scale_rows(b, x);
  const int first = multiply_strips(b, x) ? cut_broken_rows(b) : 64;
  leave();
  invert(b, first);
}

template <int K, bool Gated, class M>
__global__ void __launch_bounds__(kThreads, K == 128 ? 2 : 3)
    prepare_kernel(const Job p, const __grid_constant__ M maps, const Step step) {
  extern __shared__ __align__(1024) char smem[];
  Block<K, Gated, M> b(p, maps, smem);
  if constexpr (b.Mapped) {
    if (threadIdx.x == 0) {
      barrier_init(&b.s.arrived, 1);
      fence_barrier_init();
      fence_async_proxy();
      order_rows(b);
    }
    __syncthreads();
    for (int parity = 0; b.find(); parity ^= 1) {
      const auto read = [&](Strip<K>& x) {
        barrier_wait(&b.s.arrived, parity);
        read_rows(b, x);
      };
      // One thread of a warp that makes nothing of A yet.
      const auto leave = [&] {
        auto next = b;
        next.advance(step);
        if (b.tid != 64 || next.slot >= static_cast<int>(p.slots())) return;
        fence_async_proxy();
        order_rows(next);
      };
      prepare_chunk(b, read, leave);
      b.advance(step);
      __syncthreads();
    }
  } else {
    if (b.find()) prepare_chunk(b, [&](Strip<K>& x) { load_rows(b, x); }, [] {});
  }
}

bool map_tensors(Maps& maps, const Job& job) {
  return map_tensor(maps.q, job, job.q, job.heads, false, Box::whole) &&
         map_tensor(maps.k, job, job.k, job.heads, false, Box::whole) &&
         map_tensor(maps.g, job, job.g, job.value_heads, !job.g.bf16, Box::whole);
}

// Two for every multiprocessor.
unsigned resident_blocks() {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return 2 * static_cast<unsigned>(multiprocessors);
}

template <int K, bool Gated, class M>
void launch(const Job& job, const M& maps, dim3 blocks, cudaStream_t stream) {
  constexpr bool kMapped = std::is_same_v<M, Maps>;
  constexpr int kBytes = sizeof(Shared<K, kMapped>);
  const auto kernel = prepare_kernel<K, Gated, M>;
  const int count = static_cast<int>(blocks.x);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<blocks, kThreads, kBytes, stream>>>(job, maps,
                                               Step{count % job.value_heads, count / job.value_heads});
}

template <int K, bool Gated>
void launch(const Job& job, cudaStream_t stream) {
  const auto slots = static_cast<unsigned>(job.slots());
  const auto heads = static_cast<unsigned>(job.value_heads);
  if constexpr (K == 128) {
    if (Maps maps; map_tensors(maps, job)) {
      // Beside the scans of other groups a block that stays would be in their way.
      const unsigned items = slots * heads;
      return launch<K, Gated>(job, maps, job.carried ? items : std::min(items, resident_blocks()), stream);
    }
  }
  launch<K, Gated>(job, NoMaps{}, {heads, std::min(slots, kGridRows), (slots + kGridRows - 1) / kGridRows},
                   stream);
}

template <int K>
void launch(const Job& job, cudaStream_t stream) {
  job.gate != Gate::none ? launch<K, true>(job, stream) : launch<K, false>(job, stream);
}

}  // namespace

void launch_prepare(const Job& job, cudaStream_t stream) {
  if (job.slots() == 0) return;
  job.dim == 128 ? launch<128>(job, stream) : launch<64>(job, stream);
}

}  // namespace rlk::cuda::kda
