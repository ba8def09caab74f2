// The join of sm90/kda64/seg4096: a block per (sequence, value head, 8 columns of V) takes the state from segment to segment,
//
//   S <- T S + U        T S one ascending fma chain from +0 an element
//
// T of two segments ahead is on its way to shared memory meanwhile. A thread has two channels and a few columns: it reads its rows of
// T in order, neighbours side by side, and S, the same for a whole warp. 64 K of T for 64 K fma a block and step: what limits is the
// way from L2.
#include "cuda/kda/segments.cuh"

namespace rlk::cuda::kda {
namespace {

constexpr int kColumns = 8, kThreads = 128, kStages = 2;

template <int K>
struct Joined {
  static constexpr int kEach = kColumns * K / 2 / kThreads;  // columns of a thread
  float moves[kStages][K * K];
  float state[K][kColumns];
  std::uint64_t arrived[kStages];
};

template <int K>
__global__ void __launch_bounds__(kThreads) join_kernel(const Job p) {
  constexpr int kEach = Joined<K>::kEach;
  extern __shared__ __align__(128) char smem[];
  auto& s = *reinterpret_cast<Joined<K>*>(smem);
  const int tid = static_cast<int>(threadIdx.x), cell = blockIdx.x / (K / kColumns), n = cell / p.value_heads,
            head = cell % p.value_heads, d = 2 * (tid % (K / 2)), own = tid / (K / 2) * kEach,
            column = blockIdx.x % (K / kColumns) * kColumns + own;
  const std::int64_t each = K * K, step = p.value_heads * each, first = first_map(p, n) * step + head * each;
  const int needed = needed_maps(p, n);
  const auto order = [&](int i) {
    if (tid != 0 || i >= needed) return;
    barrier_expect(&s.arrived[i % kStages], sizeof s.moves[0]);
    bulk_load(s.moves[i % kStages], p.moves + first + i * step, sizeof s.moves[0], &s.arrived[i % kStages]);
  };
  if (tid < kStages) barrier_init(&s.arrived[tid], 1), fence_barrier_init();
  const float* initial = p.initial ? p.initial + cell * each : nullptr;
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    const int channel = d + i % 2, v = column + i / 2;
    s.state[channel][own + i / 2] = initial ? initial[p.v_first ? v * K + channel : channel * K + v] : 0.f;
  }
  __syncthreads();
  for (int i = 0; i < kStages; ++i) order(i);
  for (int i = 0; i < needed; ++i) {
    float* end = p.ends + first + i * step + column * K + d;
    float2 sum[kEach] = {}, add[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) add[j] = *reinterpret_cast<const float2*>(end + j * K);
    barrier_wait(&s.arrived[i % kStages], i / kStages % 2);
    const float* move = s.moves[i % kStages] + d;
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
    order(i + kStages);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float2 x = make_float2(__fadd_rn(sum[j].x, add[j].x), __fadd_rn(sum[j].y, add[j].y));
      *reinterpret_cast<float2*>(end + j * K) = x;
      s.state[d][own + j] = x.x, s.state[d + 1][own + j] = x.y;
    }
    __syncthreads();
  }
}

template <int K>
void launch(const Job& job, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Joined<K>);
  const auto blocks = static_cast<unsigned>(job.sequences * job.value_heads * (K / kColumns));
  cudaFuncSetAttribute(join_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  join_kernel<K><<<blocks, kThreads, kBytes, stream>>>(job);
}

}  // namespace

void launch_join(const Job& job, cudaStream_t stream) {
  job.dim == 128 ? launch<128>(job, stream) : launch<64>(job, stream);
}

}  // namespace rlk::cuda::kda
