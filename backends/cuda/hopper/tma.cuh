// TMA, the bulk copy engine: whole tiles between global and shared memory by one thread's order. Loads are
// counted in bytes on an mbarrier, stores in groups of the thread that ordered them. A tensor map knows where
// its tensor ends: past that a load brings zeros and a store writes nothing.
#pragma once

#include <cuda.h>

#include "cuda/hopper/shared.cuh"

namespace rlk::cuda::hopper {

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <class Place, class Barrier>
__device__ __forceinline__ void tma_load(Place to, const CUtensorMap* map, Barrier barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}
// The same into every block of the cluster named in `mask`, each block's own barrier counting its copy.
template <class Place, class Barrier>
__device__ __forceinline__ void tma_load_multicast(Place to, const CUtensorMap* map, Barrier barrier, int x,
                                                   int y, std::uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], "
      "[%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

// Four or five dimensions, the innermost first.
template <class Place, class Barrier>
__device__ __forceinline__ void tma_load(Place to, const CUtensorMap* map, Barrier barrier, int x, int y,
                                         int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
template <class Place, class Barrier>
__device__ __forceinline__ void tma_load(Place to, const CUtensorMap* map, Barrier barrier, int x, int y,
                                         int z, int w, int u) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6, %7}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u)
      : "memory");
}
template <class Place>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, Place from, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
template <class Place>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, Place from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(x), "r"(y)
               : "memory");
}

// Contiguous bytes, a multiple of 16.
template <class Place, class Barrier>
__device__ __forceinline__ void bulk_load(Place to, const void* from, std::uint32_t bytes, Barrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until TMA has read what this thread's stores take from shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What threads wrote to shared memory is there for the asynchronous proxy: TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace rlk::cuda::hopper
