// Hopper building blocks of the lm_head kernels: mbarriers, bulk tensor copies, matrix descriptors, warpgroup
// fences.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "lm_head_device.cuh"
#include "lm_head_wgmma.cuh"

namespace rlk::cuda::hopper {

__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}
// Arrives on the barrier at the same place in the shared memory of block `rank` of the cluster. No
// cluster-wide release: it costs a fence of all memory per arrival (measured 2x on the whole kernel), and
// what is handed over here, a stage whose reads by the tensor core are complete, needs none.
__device__ __forceinline__ void barrier_arrive_at(std::uint64_t* barrier, int rank) {
  asm volatile(
      "{.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void tensor_load(void* to, const CUtensorMap* map, std::uint64_t* barrier, int x,
                                            int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
      : "memory");
}
// The same into every block of the cluster named in `mask`, each block's own barrier counting its copy.
__device__ __forceinline__ void tensor_load_multicast(void* to, const CUtensorMap* map,
                                                      std::uint64_t* barrier, int x, int y,
                                                      std::uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], "
      "[%2], %5;" ::"r"(smem_address(to)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// One operand's step of 64 along k in shared memory, as the copy engine writes it and wgmma reads it.
// k-contiguous: lines of 64 k (128 bytes), one per row, swizzled by 128 bytes; eight rows are 1024 bytes
// apart. row-contiguous: blocks of [64 k][kBox rows], swizzled by their line width; eight k are 8 lines
// apart, blocks 64 lines.
template <int Rows, bool KContiguous>
struct Staged {
  static constexpr int kBox = KContiguous ? Rows : Rows < 64 ? Rows : 64;
  static constexpr int kLineBytes = KContiguous ? 128 : kBox * 2;
  static constexpr int kBytes = Rows * 128;
  static constexpr int kBlocks = KContiguous ? 1 : Rows / kBox;
  static constexpr int kBlockBytes = kBytes / kBlocks;

  // Descriptor of a stage at `base`, rows from `row` (a multiple of 64 for row-contiguous operands); at(k) is
  // that of the 16 of k from there, which differs in the address alone.
  struct Descriptor {
    std::uint32_t low, high;
    __device__ std::uint64_t at(int k) const {
      return std::uint64_t{high} << 32 | (low + k * (KContiguous ? 2 : kLineBytes) / 16);
    }
  };
  __device__ static Descriptor descriptor(std::uint32_t base, int row) {
    constexpr std::uint32_t kSwizzle = kLineBytes == 128 ? 1 : kLineBytes == 64 ? 2 : 3;
    constexpr std::uint32_t kEight = 8 * kLineBytes / 16, kNext = KContiguous ? 1 : 64 * kLineBytes / 16;
    const std::uint32_t at = KContiguous ? base + row * 128 : base + row / 64 * kBlockBytes;
    // Above the 18 bits of an offset the address names the block within its cluster.
    return {(at >> 4 & 0x3fff) | kNext << 16, kEight | kSwizzle << 30};
  }
};

}  // namespace rlk::cuda::hopper
