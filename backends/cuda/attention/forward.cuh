// The kernel of attention on Hopper and its launch, for one element type.
#pragma once

#include <algorithm>

#include "cuda/attention/consumer.cuh"
#include "cuda/attention/forward.h"
#include "cuda/attention/producer.cuh"

namespace rlk::cuda::attention {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) forward_kernel(const __grid_constant__ Job job) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Work w;
  if (!find_work<S>(job, w)) return;
  const Shared<S> shared(raw);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x >= S::kConsumers) {
    if constexpr (S::kThreads == 384) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    produce<S>(job, w, shared);
  } else {
    if constexpr (S::kThreads == 384) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer<S> consumer(job, w, shared);
    w.begin < w.end ? consumer.run() : consumer.run_empty();
  }
}

template <class S>
cudaError_t start(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  const auto kernel = forward_kernel<S>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
      e != cudaSuccess)
    return e;
  const dim3 blocks(static_cast<unsigned>(tiles_at_most(p, S::kRows) * p.heads),
                    static_cast<unsigned>(S::kSpread ? splits : 1));
  kernel<<<blocks, S::kThreads, S::kBytes, stream>>>({p, maps_of(p), parts, static_cast<int>(splits),
                                                      values_in_keys(p),
                                                      S::kSpread ? all_pairs(p) : pairs_abreast(p)});
  return cudaGetLastError();
}

template <class T, int Width, int ValueWidth, bool Capped, bool Unit>
cudaError_t start(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  return splits > 1 ? start<Shape<T, Width, ValueWidth, Capped, true, Unit>>(p, parts, splits, stream)
                    : start<Shape<T, Width, ValueWidth, Capped, false, Unit>>(p, parts, 1, stream);
}

// Softcaps have kernels of their own, for the others' sake.
template <class T, int Width, bool Unit>
cudaError_t start_narrow(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  return p.cap != 0 ? start<T, Width, Width, true, Unit>(p, parts, splits, stream)
                    : start<T, Width, Width, false, Unit>(p, parts, splits, stream);
}
template <class T, bool Unit>
cudaError_t start_forward(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  return std::max(p.width, p.value_width) <= 64 ? start_narrow<T, 64, Unit>(p, parts, splits, stream)
                                                : start_narrow<T, 128, Unit>(p, parts, splits, stream);
}

// Widths above kNarrow.
template <class T, bool Unit>
cudaError_t start_wide(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  if (is_latent(p)) return start<Shape<T, 576, 512, true, true, Unit>>(p, parts, splits, stream);
  if (p.width <= 192 && p.value_width <= 128)
    return p.cap != 0 ? start<T, 192, 128, true, Unit>(p, parts, splits, stream)
                      : start<T, 192, 128, false, Unit>(p, parts, splits, stream);
  return p.cap != 0 ? start<T, 256, 256, true, Unit>(p, parts, splits, stream)
                    : start<T, 256, 256, false, Unit>(p, parts, splits, stream);
}

}  // namespace rlk::cuda::attention
