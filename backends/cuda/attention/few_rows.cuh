// attention of at most 16 rows a sequence and key head on Hopper (arithmetic sm90/t25k16/ex2/h8/attn128/s<S>), and its
// launch for one element type. The chains are those of mma.sync, which has the bits of wgmma, whichever operand is which.
//
// A block is a warp that orders tiles by TMA and four that compute. It has a run of splits of one sequence and key head; all
// of them, and it joins them in registers, or leaves each one's sums in the workspace. Traffic: 2 (D + Dv) bytes a key and its
// head, which is what the time goes to from some hundred pairs of a sequence and a head on.
#pragma once

#include "cuda/attention/few_rows.h"
#include "cuda/attention/few_rows_consumer.cuh"

namespace rlk::cuda::attention {

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kResidents)
    few_rows_kernel(const __grid_constant__ Job job) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const FewShared<S> shared(raw);
  if (threadIdx.x == 0) shared.init();
  if (threadIdx.x == S::kConsumers) prefetch_map(&job.maps.k), prefetch_map(&job.maps.v);
  __syncthreads();
  // The kernel before this one is done from here on, and the one that joins splits may take the SMs that this one leaves.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  Turn<S::kStages> turn;
  Work w;
  // Seldom more than once: packed queries may be anybody's.
  for (int first = 0; find_few<S>(job.p, first, w); first += S::kRows) {
    if (threadIdx.x >= S::kConsumers)
      produce_few<S>(job, w, shared, turn);
    else if (job.parts == nullptr || w.begin < w.end)
      FewConsumer<S>(job, w, shared, turn).run();
  }
}

template <class S>
cudaError_t start_shape(const Problem& p, const Maps& maps, float* parts, std::int64_t splits,
                        std::int64_t blocks, cudaStream_t stream) {
  const auto kernel = few_rows_kernel<S>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
      e != cudaSuccess)
    return e;
  const dim3 grid(static_cast<unsigned>(p.sequences * p.heads), static_cast<unsigned>(blocks));
  return launch_early(kernel, grid, S::kThreads, S::kBytes, stream,
                      Job{p, maps, blocks > 1 ? parts : nullptr, static_cast<int>(splits), false});
}

// 96 KiB of an SM's shared memory twice: a block's first and last tiles pass while the other's are on their way.
template <class T>
cudaError_t start_few(const Problem& p, const Maps& maps, float* parts, std::int64_t splits,
                      std::int64_t blocks, cudaStream_t stream) {
  const auto start = [&]<int Width, int Stages, bool Beside>() {
    return few_rows(p) <= 8
               ? start_shape<FewShape<T, Width, 1, Stages, 2, Beside>>(p, maps, parts, splits, blocks, stream)
               : start_shape<FewShape<T, Width, 2, Stages, 2, Beside>>(p, maps, parts, splits, blocks,
                                                                       stream);
  };
  if (std::max(p.width, p.value_width) <= 64) return start.template operator()<64, 6, false>();
  return few_rows_beside(p) ? start.template operator()<128, 3, true>()
                            : start.template operator()<128, 3, false>();
}

// Half as many bytes a tile, twice as many tiles.
template <class T>
cudaError_t start_few_f8(const Problem& p, const Maps& maps, float* parts, std::int64_t splits,
                         std::int64_t blocks, cudaStream_t stream) {
  return few_rows(p) <= 8
             ? start_shape<FewShape<T, 128, 1, 6, 2, false, true>>(p, maps, parts, splits, blocks, stream)
             : start_shape<FewShape<T, 128, 2, 6, 2, false, true>>(p, maps, parts, splits, blocks, stream);
}

}  // namespace rlk::cuda::attention
