// Clusters of blocks: their ranks, their barrier, and how a block reaches the shared memory of another
// (distributed shared memory).
#pragma once

#include "cuda/hopper/shared.cuh"

namespace rlk::cuda::hopper {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ std::uint32_t address_at(std::uint32_t local, int rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  return there;
}
// Stores into another block's shared memory and counts the bytes on that block's barrier.
__device__ __forceinline__ void store_async(std::uint32_t to, std::uint32_t barrier, const float* four) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
          to),
      "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
      : "memory");
}

// Arrives on the barrier at the same place in the shared memory of block `rank` of the cluster. No
// cluster-wide release: it costs a fence of all memory per arrival (measured 2x on the whole lm_head kernel),
// and what is handed over there, a stage whose reads by the tensor core are complete, needs none.
template <class Place>
__device__ __forceinline__ void barrier_arrive_at(Place barrier, int rank) {
  asm volatile(
      "{.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// With the release: what this thread read or wrote before is done for whoever waits. `barrier` is an
// address_at.
__device__ __forceinline__ void barrier_arrive_released(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace rlk::cuda::hopper
