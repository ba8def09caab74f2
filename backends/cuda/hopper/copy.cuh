// cp.async: 16 bytes of global memory a thread to shared memory, past the registers. (From Ampere on; the
// portable tile loaders use it as well.)
#pragma once

#include "cuda/hopper/shared.cuh"

namespace rlk::cuda::hopper {

// Copies 16 bytes of which the first `valid` come from `from`, the rest are zeros.
template <class Place>
__device__ __forceinline__ void copy16(Place to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid)
               : "memory");
}
// The same where neighbours of these bytes are wanted at once: L2 takes 256 bytes from memory.
template <class Place>
__device__ __forceinline__ void copy16_near(Place to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid)
               : "memory");
}
// An arrival on an mbarrier when all of this thread's copies so far are complete; it is one of those that the barrier
// was made for.
template <class Place>
__device__ __forceinline__ void copy_arrive(Place barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Copies since the last one are a group. What belongs to none is not waited for.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

}  // namespace rlk::cuda::hopper
