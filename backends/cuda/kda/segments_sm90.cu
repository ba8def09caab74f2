// The join of sm90/kda64/seg4096: a block per (sequence, value head, 8 columns of V) takes the state from segment to segment, and that
// of the backward's id in as many blocks more the gradient back,
//
//   S <- T S + U        dS <- T^T dS + W        each product one ascending fma chain from +0 an element
//
// T of two segments ahead is on its way to shared memory meanwhile, or of one, so that two blocks or three share a multiprocessor. A
// thread has two channels and a few columns: it reads its rows of T in order, neighbours side by side (so T lies in memory both ways),
// and S, the same for a whole warp. 64 K of T for 64 K fma a block and step: what limits is the way from L2.
#include "cuda/kda/segments.cuh"

namespace rlk::cuda::kda {
namespace {

constexpr int kColumns = 8, kThreads = 128;

template <int K, int Stages>
struct Joined {
  static constexpr int kEach = kColumns * K / 2 / kThreads;  // columns of a thread
  float moves[Stages][K * K];
  float state[K][kColumns];
  std::uint64_t arrived[Stages];
};

// A block's maps, `steps` of them one `stride` of [K, V] matrices behind the other.
struct Chain {
  const float* moves;
  float* ends;           // of the first map
  const float* initial;  // before it
  bool v_first;
  std::int64_t stride;
  int steps;
};

template <int K>
__device__ inline Chain chain_of(const Job& p, int n, int head, bool reverse) {
  constexpr std::int64_t kEach = K * K;
  const std::int64_t heads = p.value_heads, map = first_map(p, n), cell = n * heads + head;
  if (!reverse) {
    const std::int64_t at = (map * heads + head) * kEach;
    return {p.moves + at, p.ends + at,   p.initial ? p.initial + cell * kEach : nullptr,
            p.v_first,    heads * kEach, needed_maps(p, n)};
  }
  // From the last whole segment on; behind it is what the piece left there hands back.
  const int whole = static_cast<int>(whole_segments(p, n));
  const std::int64_t behind = ((first_piece(p, n) + whole) * heads + head) * kEach;
  return {p.d_moves + ((map + whole - 1) * heads + head) * kEach,
          p.d_ends + behind - heads * kEach,
          p.d_ends + behind,
          true,
          -heads * kEach,
          whole - first_needed(p)};
}

template <int K, int Stages>
__global__ void __launch_bounds__(kThreads) join_kernel(const Job p) {
  using J = Joined<K, Stages>;
  constexpr int kEach = J::kEach;
  extern __shared__ __align__(128) char smem[];
  auto& s = *reinterpret_cast<J*>(smem);
  const int half = p.d_ends ? gridDim.x / 2 : gridDim.x, block = blockIdx.x % half,
            tid = static_cast<int>(threadIdx.x), cell = block / (K / kColumns), n = cell / p.value_heads,
            d = 2 * (tid % (K / 2)), own = tid / (K / 2) * kEach,
            column = block % (K / kColumns) * kColumns + own;
  const bool reverse = static_cast<int>(blockIdx.x) >= half;
  const Chain c = chain_of<K>(p, n, cell % p.value_heads, reverse);
  if (c.steps <= 0) return;
  const auto order = [&](int i) {
    if (tid != 0 || i >= c.steps) return;
    barrier_expect(&s.arrived[i % Stages], sizeof s.moves[0]);
    bulk_load(s.moves[i % Stages], c.moves + i * c.stride, sizeof s.moves[0], &s.arrived[i % Stages]);
  };
  // Where in a state a thread's element i lies.
  const auto place = [&](int i, bool v_first) {
    const int channel = d + i % 2, v = column + i / 2;
    return v_first ? v * K + channel : channel * K + v;
  };
  if (tid < Stages) barrier_init(&s.arrived[tid], 1), fence_barrier_init();
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i)
    s.state[d + i % 2][own + i / 2] = c.initial ? c.initial[place(i, c.v_first)] : 0.f;
  __syncthreads();
  for (int i = 0; i < Stages; ++i) order(i);
  for (int i = 0; i < c.steps; ++i) {
    float* end = c.ends + i * c.stride + column * K + d;
    float2 sum[kEach] = {}, add[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) add[j] = *reinterpret_cast<const float2*>(end + j * K);
    barrier_wait(&s.arrived[i % Stages], i / Stages % 2);
    const float* move = s.moves[i % Stages] + d;
#pragma unroll 16
    for (int m = 0; m < K; ++m) {
      const float2 t = *reinterpret_cast<const float2*>(move + m * K);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const float x = s.state[m][own + j];
        sum[j].x = fmaf(t.x, x, sum[j].x), sum[j].y = fmaf(t.y, x, sum[j].y);
      }
    }
    __syncthreads();
    order(i + Stages);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float2 x = make_float2(__fadd_rn(sum[j].x, add[j].x), __fadd_rn(sum[j].y, add[j].y));
      *reinterpret_cast<float2*>(end + j * K) = x;
      s.state[d][own + j] = x.x, s.state[d + 1][own + j] = x.y;
    }
    __syncthreads();
  }
  if (!reverse || !p.d_initial) return;
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i)
    p.d_initial[std::int64_t{cell} * (K * K) + place(i, p.v_first)] = s.state[d + i % 2][own + i / 2];
}

template <int K, int Stages>
void launch(const Job& job, unsigned blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Joined<K, Stages>);
  cudaFuncSetAttribute(join_kernel<K, Stages>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  join_kernel<K, Stages><<<blocks, kThreads, kBytes, stream>>>(job);
}
template <int K>
void launch(const Job& job, cudaStream_t stream) {
  const std::int64_t cells = job.sequences * job.value_heads * (job.d_ends ? 2 : 1);
  const auto blocks = static_cast<unsigned>(cells * (K / kColumns));
  constexpr unsigned kMultiprocessors = 132;
  // One stage of 64 KiB leaves an SM room for two blocks.
  if (K == 128 && job.d_ends != nullptr && blocks > kMultiprocessors)
    launch<K, 1>(job, blocks, stream);
  else
    launch<K, 2>(job, blocks, stream);
}

}  // namespace

void launch_join(const Job& job, cudaStream_t stream) {
  job.dim == 128 ? launch<128>(job, stream) : launch<64>(job, stream);
}

}  // namespace rlk::cuda::kda
