// attention of at most 16 rows a sequence and key head, of few such pairs, on Hopper (arithmetic
// sm90/t25k16/ex2/h8/attn128/s<S>): the kernel of few_rows.cuh would keep few SMs then, which take tile after tile of a
// split. Here a cluster of blocks has the tiles of a split at once, and the bits are the same.
//
// A block has the scores of one tile and, of all tiles, the sums of its channels of the values: chains over keys cannot be
// shared, but every channel has its own. Maxima, weights and their sums pass through distributed shared memory. Traffic:
// 2 (D + Dv) bytes a key and its head; a block takes lines of 32 bytes of the values, its neighbours those beside them.
#pragma once

#include "cuda/attention/few_rows.h"
#include "cuda/attention/few_rows_cluster_readers.cuh"

namespace rlk::cuda::attention {

// A warp's work, of a split or less. With its last round it arrives at the cluster's barrier.
template <class S>
__device__ __forceinline__ void read_cluster(const Job& job, const Work& w, const ClusterShared<S>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < S::kScorers)
    Scorer<S>(job, w, shared).run();
  else
    Summer<S>(job, w, shared).run();
  __syncwarp();
}
// For the next rows, once nobody waits at a barrier for these. Seldom: packed queries may be anybody's.
template <class S>
__device__ inline void start_again(const ClusterShared<S>& shared) {
  if (threadIdx.x == 0) shared.drop(), shared.init();
  __syncwarp();
  cluster_sync();
}

// Grid: pairs of a sequence and key head, splits, blocks of a cluster.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 2) few_rows_cluster_kernel(const __grid_constant__ Job job) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const ClusterShared<S> shared{raw};
  if (threadIdx.x == 0) shared.init();
  __syncwarp();
  cluster_arrive_relaxed();
  // The kernel before this one is done from here on, and the one that joins splits may take the SMs that this one leaves.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  Work w;
  for (int first = 0; find_few<S>(job.p, first, w); first += S::kRows) {
    cluster_wait();
    if (first > 0) start_again<S>(shared);
    if (job.parts == nullptr || w.begin < w.end) read_cluster<S>(job, w, shared);
    if (w.begin >= w.end) cluster_arrive_relaxed();  // there was no round to do so
  }
  cluster_wait();  // no block leaves before all that was sent is where it was sent to
}

template <class S>
cudaError_t start_cluster_shape(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  const auto kernel = few_rows_cluster_kernel<S>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
      e != cudaSuccess)
    return e;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(p.sequences * p.heads), static_cast<unsigned>(splits), S::kBlocks);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kBytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = S::kBlocks;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes, config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel,
                            Job{p, {}, splits > 1 ? parts : nullptr, static_cast<int>(splits), false});
}

template <class T>
cudaError_t start_clusters(const Problem& p, float* parts, std::int64_t splits, cudaStream_t stream) {
  const auto start =
      few_rows(p) <= 8 ? start_cluster_shape<ClusterShape<T, 1>> : start_cluster_shape<ClusterShape<T, 2>>;
  return start(p, parts, splits, stream);
}

}  // namespace rlk::cuda::attention
