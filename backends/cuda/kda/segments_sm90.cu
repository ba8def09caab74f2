// The join of sm90/kda64/seg4096: a block per (sequence, value head, 8 columns of V) takes the state from segment to segment,
//
//   S <- T S + U        T S one ascending fma chain from +0 an element
//
// A thread has a channel and a few columns: it reads its row of T in order, neighbours side by side, and S, the same for a whole warp,
// from shared memory. 64 K of T for 64 K fma a block and step: what limits is the way from L2.
#include "cuda/kda/segments.cuh"

namespace rlk::cuda::kda {
namespace {

constexpr int kColumns = 8, kThreads = 256, kAhead = 16;

template <int K>
__global__ void __launch_bounds__(kThreads) join_kernel(const Job p) {
  constexpr int kEach = kColumns * K / kThreads;
  __shared__ __align__(16) float state[K][kColumns];
  const int cell = blockIdx.x / (K / kColumns), column = blockIdx.x % (K / kColumns) * kColumns,
            n = cell / p.value_heads, head = cell % p.value_heads, d = threadIdx.x % K,
            own = threadIdx.x / K * kEach;
  const std::int64_t each = K * K, step = p.value_heads * each, first = first_map(p, n) * step + head * each;
  const int needed = needed_maps(p, n);
  const float* initial = p.initial ? p.initial + cell * each : nullptr;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int v = column + own + j;
    state[d][own + j] = initial ? initial[p.v_first ? v * K + d : d * K + v] : 0.f;
  }
  __syncthreads();
  for (int i = 0; i < needed; ++i) {
    const float* move = p.moves + first + i * step + d;
    float* end = p.ends + first + i * step + (column + own) * K + d;
    float sum[kEach] = {}, add[kEach], t[kAhead];
#pragma unroll
    for (int j = 0; j < kEach; ++j) add[j] = end[j * K];
#pragma unroll
    for (int m = 0; m < kAhead; ++m) t[m] = move[m * K];
    for (int at = 0; at < K; at += kAhead) {
      float now[kAhead];
#pragma unroll
      for (int m = 0; m < kAhead; ++m) now[m] = t[m];
      if (at + kAhead < K) {
#pragma unroll
        for (int m = 0; m < kAhead; ++m) t[m] = move[(at + kAhead + m) * K];
      }
#pragma unroll
      for (int m = 0; m < kAhead; ++m) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[j] = fmaf(now[m], state[at + m][own + j], sum[j]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float x = __fadd_rn(sum[j], add[j]);
      end[j * K] = x;
      state[d][own + j] = x;
    }
    __syncthreads();
  }
}

}  // namespace

void launch_join(const Job& job, cudaStream_t stream) {
  const auto cells = static_cast<unsigned>(job.sequences * job.value_heads);
  if (job.dim == 128) {
    join_kernel<128><<<cells * (128 / kColumns), kThreads, 0, stream>>>(job);
  } else {
    join_kernel<64><<<cells * (64 / kColumns), kThreads, 0, stream>>>(job);
  }
}

}  // namespace rlk::cuda::kda
