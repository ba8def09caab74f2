// mbarriers: they count arrivals of threads and bytes of asynchronous copies, and turn a phase when both are
// complete. A consumer waits for the parity of the phase it needs: 0, 1, 0, ...
#pragma once

#include "cuda/hopper/shared.cuh"

namespace rlk::cuda::hopper {

template <class Place>
__device__ __forceinline__ void barrier_init(Place barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copies and to the other blocks of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and announces bytes that copies will bring.
template <class Place>
__device__ __forceinline__ void barrier_expect(Place barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Announces bytes only, before an arrival of the same thread.
template <class Place>
__device__ __forceinline__ void barrier_announce(Place barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
template <class Place>
__device__ __forceinline__ void barrier_arrive(Place barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Only if `does`, without a branch.
template <class Place>
__device__ __forceinline__ void barrier_arrive_if(bool does, Place barrier) {
  asm volatile(
      "{.reg .pred does;\n"
      "setp.ne.b32 does, %1, 0;\n"
      "@does mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(shared_address(barrier)),
      "r"(static_cast<int>(does))
      : "memory");
}
// As often as `times` threads.
template <class Place>
__device__ __forceinline__ void barrier_arrive(Place barrier, int times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times)
               : "memory");
}
template <class Place>
__device__ __forceinline__ void barrier_wait(Place barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether the phase of this parity is complete.
template <class Place>
__device__ __forceinline__ bool barrier_test(Place barrier, int parity) {
  int done;
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

}  // namespace rlk::cuda::hopper
