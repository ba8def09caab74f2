// TMA loads of what is read once: it leaves L2 before what others wrote there.
#pragma once

#include "cuda/hopper/tma.cuh"

namespace rlk::cuda::hopper {

__device__ __forceinline__ std::uint64_t read_once() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Four or five dimensions, the innermost first.
template <class Place, class Barrier>
__device__ __forceinline__ void tma_load_once(Place to, const CUtensorMap* map, Barrier barrier,
                                              std::uint64_t policy, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}
template <class Place, class Barrier>
__device__ __forceinline__ void tma_load_once(Place to, const CUtensorMap* map, Barrier barrier,
                                              std::uint64_t policy, int x, int y, int z, int w, int u) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u), "l"(policy)
      : "memory");
}

}  // namespace rlk::cuda::hopper
