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
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
// Without the release, which is a fence of all memory: behind fence_barrier_init, which is one for new barriers, or for what
// has been waited for by barriers of its own.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() { cluster_arrive(), cluster_wait(); }

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
__device__ __forceinline__ void store_async(std::uint32_t to, std::uint32_t barrier,
                                            const std::uint32_t (&four)[4]) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
          to),
      "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3]), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_async(std::uint32_t to, std::uint32_t barrier, float2 x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to),
      "f"(x.x), "f"(x.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_async(std::uint32_t to, std::uint32_t barrier, float x) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
               "f"(x), "r"(barrier)
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
// Waits for arrivals with the release: what those threads wrote before, in any block of the cluster, is seen.
template <class Place>
__device__ __forceinline__ void barrier_wait_released(Place barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace rlk::cuda::hopper
