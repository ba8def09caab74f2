// The two kernels of attention's backward on Hopper and their launch, for one element type.
#pragma once

#include <algorithm>

#include "cuda/attention/bwd_consumer.cuh"
#include "cuda/attention/bwd_producer.cuh"

namespace rlk::cuda::attention {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) backward_kernel(const __grid_constant__ BackwardJob job) {
  extern __shared__ __align__(1024) unsigned char raw[];
  BackwardWork w;
  if (!find_work<S>(job, w)) return;
  const BackwardShared<S> shared(raw);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if (threadIdx.x >= S::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    produce_all<S>(job, w, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    BackwardConsumer<S>(job, w, shared).run();
  }
}

template <class S>
bool map_moving(const Backward& g, CUtensorMap (&maps)[2]) {
  const Problem& p = g.p;
  if (encoder() == nullptr) return false;
  if constexpr (S::kKeys) {
    const std::int64_t outer = p.cu_q ? 1 : p.sequences;
    return map_tensor(maps[0], p.q, outer, p.queries, g.all_heads(), p.width, S::kMoving) &&
           map_tensor(maps[1], g.d_out, outer, p.queries, g.all_heads(), p.value_width, S::kMoving);
  }
  const std::int64_t outer = p.cu_k ? 1 : p.sequences;
  return map_tensor(maps[0], p.k, outer, p.room, p.heads, p.width, S::kMoving) &&
         map_tensor(maps[1], p.v, outer, p.room, p.heads, p.value_width, S::kMoving);
}

// Pairs of a sequence and query head whose moving sides the L2 cache holds at once; of heads that share keys all.
template <class S>
int pairs_abreast(const Backward& g) {
  const Problem& p = g.p;
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  const bool packed = static_cast<bool>(S::kKeys ? p.cu_k : p.cu_q);
  const std::int64_t pairs = (S::kGrouped ? p.heads : g.all_heads()) * (packed ? 1 : p.sequences);
  const std::int64_t of_one = 2 * (S::kKeys ? p.queries : p.room) * (p.width + p.value_width),
                     side_by_side = S::kKeys ? 1 : p.group;
  if (S::kGrouped) return static_cast<int>(pairs);  // few and long blocks: the longest of all first
  const std::int64_t fit = kBytes / std::max<std::int64_t>(of_one, 1) * side_by_side;
  return static_cast<int>(std::clamp<std::int64_t>(fit, std::min(side_by_side, pairs), pairs));
}

template <class S>
cudaError_t start(BackwardJob job, cudaStream_t stream) {
  const Problem& p = job.g.p;
  const auto kernel = backward_kernel<S>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
      e != cudaSuccess)
    return e;
  const bool packed = static_cast<bool>(S::kKeys ? p.cu_k : p.cu_q);
  const std::int64_t tiles = ((S::kKeys ? p.room : p.queries) + S::kStill - 1) / S::kStill;
  const std::int64_t blocks =
      (packed ? tiles + p.sequences : tiles * p.sequences) * (S::kGrouped ? p.heads : job.g.all_heads());
  if (blocks == 0) return cudaSuccess;
  job.mapped = map_moving<S>(job.g, job.maps);
  if (job.pairs == 0) job.pairs = pairs_abreast<S>(job.g);
  kernel<<<static_cast<unsigned>(blocks), S::kThreads, S::kBytes, stream>>>(job);
  return cudaGetLastError();
}

template <class T, int Width, bool Capped, bool Unit>
cudaError_t start(const BackwardJob& job, cudaStream_t stream) {
  if (job.g.d_q)
    if (cudaError_t e = start<BackwardShape<T, Width, Capped, Unit, Side::queries>>(job, stream);
        e != cudaSuccess)
      return e;
  if (job.gathered.parts == nullptr) return cudaSuccess;
  constexpr Form kForm = form_of(Width, Capped, Unit);
  return job.gathered.grouped
             ? start<BackwardShape<T, Width, Capped, Unit, Side::keys, grouped(kForm)>>(job, stream)
             : start<BackwardShape<T, Width, Capped, Unit, Side::keys, kForm>>(job, stream);
}
template <class T, int Width, bool Unit>
cudaError_t start(const BackwardJob& job, cudaStream_t stream) {
  return job.g.p.cap != 0 ? start<T, Width, true, Unit>(job, stream)
                          : start<T, Width, false, Unit>(job, stream);
}

template <class T, bool Unit>
cudaError_t start_backward(const Backward& g, const Gathered& gathered, cudaStream_t stream) {
  const BackwardJob job{g, gathered, {}, false, 0};
  return std::max(g.p.width, g.p.value_width) <= 64 ? start<T, 64, Unit>(job, stream)
                                                    : start<T, 128, Unit>(job, stream);
}

}  // namespace rlk::cuda::attention
