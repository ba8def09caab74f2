// The kernel of attention on Hopper and its launch, for one element type.
#pragma once

#include <algorithm>

#include "cuda/attention/consumer.cuh"
#include "cuda/attention/forward.h"
#include "cuda/attention/producer.cuh"

namespace rlk::cuda::attention {

template <class S>
__device__ __forceinline__ void consume(const Job& job, const Shared<S>& shared) {
  Consumer<S> consumer(job, shared);
  for (int rows = consumer.next(); rows != kNoMore; rows = consumer.next())
    if (rows > 0) consumer.run();
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) forward_kernel(const __grid_constant__ Job job) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const Shared<S> shared(raw);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  constexpr bool kWide = S::kWidth > 192 && !S::kLatent;
  if (threadIdx.x >= S::kConsumers) {
    if constexpr (S::kThreads == 384 && kWide)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    else if constexpr (S::kThreads == 384)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if constexpr (S::kThreads == 512) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    Producer<S>(job, shared).run();
  } else {
    if constexpr (S::kThreads == 384 && kWide)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    else if constexpr (S::kThreads == 384)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    if constexpr (S::kThreads == 512) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    consume(job, shared);
  }
}

template <class S>
cudaError_t start(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  const auto kernel = forward_kernel<S>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
      e != cudaSuccess)
    return e;
  Job job{p, maps_of(p), parts, static_cast<int>(splits), values_in_keys(p)};
  job.pairs = S::kSpread ? all_pairs(p) : pairs_abreast(p);
  const std::int64_t each = S::kLatent || p.partials != nullptr ? 1 : splits_each(p),
                     runs = S::kSpread ? (splits + each - 1) / each : 1,
                     items = std::min<std::int64_t>(tiles_at_most(p, S::kRows) * p.heads * runs, INT_MAX);
  job.differ = p.cu_q || (S::kSpread && (p.cu_k || p.kv_len));
  job.items = static_cast<int>(items / all_pairs(p)), job.run = static_cast<unsigned>(each * p.split);
  if (p.window > 0) job.window = static_cast<int>(std::min<std::int64_t>(p.window, kMostKeys));
  int blocks = 0;
  if (cudaError_t e = blocks_for(items, blocks); e != cudaSuccess) return e;
  if (items == blocks || !counts_items(p)) {
    kernel<<<blocks, S::kThreads, S::kBytes, stream>>>(job);
    return cudaGetLastError();
  }
  job.taken = reinterpret_cast<unsigned*>(parts + floats_of(p, splits));
  if (cudaError_t e = clear(job.taken, stream); e != cudaSuccess) return e;
  return launch_early(kernel, blocks, S::kThreads, S::kBytes, stream, job);
}

// Where another sequence's keys come first, blocks take whole rows (spread() says so).
template <class T, int Width, int ValueWidth, bool Capped>
cudaError_t start(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  if (p.prefix_of) return start<Shape<T, Width, ValueWidth, Capped, false, true>>(p, parts, 1, stream);
  return splits > 1 || p.partials != nullptr
             ? start<Shape<T, Width, ValueWidth, Capped, true, false>>(p, parts, splits, stream)
             : start<Shape<T, Width, ValueWidth, Capped, false, false>>(p, parts, 1, stream);
}

// Softcaps have kernels of their own, for the others' sake.
template <class T, int Width>
cudaError_t start_narrow(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  return p.cap != 0 ? start<T, Width, Width, true>(p, parts, splits, stream)
                    : start<T, Width, Width, false>(p, parts, splits, stream);
}
template <class T>
cudaError_t start_forward(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  const int width = std::max(p.width, p.value_width);
  if (width <= 64) return start_narrow<T, 64>(p, parts, splits, stream);
  if (width > 96 || p.cap != 0 || p.prefix_of) return start_narrow<T, 128>(p, parts, splits, stream);
  return splits > 1 || p.partials != nullptr
             ? start<Shape<T, 96, 96, false, true, false>>(p, parts, splits, stream)
             : start<Shape<T, 96, 96, false, false, false>>(p, parts, 1, stream);
}

// Widths above kNarrow.
template <class T>
cudaError_t start_wide(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  if (is_latent(p))
    return p.prefix_of ? start<Shape<T, 576, 512, true, true, true>>(p, parts, splits, stream)
                       : start<Shape<T, 576, 512, true, true, false>>(p, parts, splits, stream);
  if (p.width <= 192 && p.value_width <= 128)
    return p.cap != 0 ? start<T, 192, 128, true>(p, parts, splits, stream)
                      : start<T, 192, 128, false>(p, parts, splits, stream);
  return p.cap != 0 ? start<T, 256, 256, true>(p, parts, splits, stream)
                    : start<T, 256, 256, false>(p, parts, splits, stream);
}

// An fp8 cache.
template <class T, int Width, int ValueWidth>
cudaError_t start_f8(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  if constexpr (Width <= 256) {
    if (splits <= 1 && p.partials == nullptr)
      return start<Shape<T, Width, ValueWidth, true, false, false, true>>(p, parts, 1, stream);
  }
  return start<Shape<T, Width, ValueWidth, true, true, false, true>>(p, parts, splits, stream);
}
template <class T>
cudaError_t start_f8(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  if (is_latent(p)) return start_f8<T, 576, 512>(p, parts, splits, stream);
  return std::max(p.width, p.value_width) > kNarrow ? start_f8<T, 256, 256>(p, parts, splits, stream)
                                                    : start_f8<T, 128, 128>(p, parts, splits, stream);
}

}  // namespace rlk::cuda::attention
