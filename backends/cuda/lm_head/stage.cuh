// An operand's stage in shared memory: as TMA writes it, and as wgmma's descriptors read it.
#pragma once

#include "cuda/hopper/wgmma.cuh"

namespace rlk::cuda::lm_head {

// One operand's step of 64 along k in shared memory, as TMA writes it and wgmma reads it.
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

  // Descriptor of a stage at `base`, rows from `row` (a multiple of 64 for row-contiguous operands); the 16
  // of k from `k` on lie steps(k) further.
  __device__ static std::uint32_t steps(int k) { return k * (KContiguous ? 2 : kLineBytes) / 16; }
  __device__ static hopper::Descriptor descriptor(std::uint32_t base, int row) {
    constexpr hopper::Swizzle kSwizzle = kLineBytes == 128  ? hopper::Swizzle::bytes128
                                         : kLineBytes == 64 ? hopper::Swizzle::bytes64
                                                            : hopper::Swizzle::bytes32;
    constexpr std::uint32_t kEight = 8 * kLineBytes / 16, kNext = KContiguous ? 1 : 64 * kLineBytes / 16;
    const std::uint32_t at = KContiguous ? base + row * 128 : base + row / 64 * kBlockBytes;
    // Above the 18 bits of an offset the address names the block within its cluster.
    return {at >> 4 & 0x3fff, kNext, kEight, kSwizzle};
  }
};

}  // namespace rlk::cuda::lm_head
