// The Hopper wgmma kernels of lm_head: arithmetic sm90/t25k16, any tile the same bits, so the tile is the
// caller's choice; and sm90/t25k16/r4, where k is cut in four ranges.
#pragma once

#include "cuda/lm_head/gemm.h"

namespace rlk::cuda::lm_head {

// Rows x columns of C per block. The blocks of a stacked pair lie below each other and share their columns,
// those of a side pair lie side by side and share their rows. The narrow ones are for up to 64 rows, or for
// so few columns that all tiles run at once. A product whose a is row-contiguous has the wide one only.
enum class Sm90Tile : std::uint8_t {
  wide,        // 128x256
  square,      // 128x128
  tall32,      // 128x32
  narrow128,   // 64x128; b k-contiguous
  narrow64,    // 64x64; b row-contiguous
  narrow32,    // 64x32
  side32,      // pairs of 64x32; b row-contiguous
  stacked64,   // pairs of 64x64; b row-contiguous
  stacked128,  // pairs of 64x128; b row-contiguous
};

// Whether the driver offers the tensor-map encoder these kernels need.
bool sm90_available();

// Needs both inputs aligned16; the output may have any alignment. bf16 and fp16.
cudaError_t launch_sm90(const Gemm&, Sm90Tile, int multiprocessors, cudaStream_t);

// Likewise in arithmetic sm90/t25k16/r4; a must be k-contiguous. Beyond 64 rows it is fast where sums of
// ranges can meet in a workspace, aligned to 16 bytes: 16 bytes per output, rows counted in whole tiles (of
// 128, 192 or 256), or 17 MiB where the outputs alone occupy the GPU.
cudaError_t launch_sm90_ranges(const Gemm&, int multiprocessors, void* workspace, std::size_t bytes,
                               cudaStream_t);
// The bytes of workspace that it makes use of.
std::size_t ranges_workspace(const Gemm&, int multiprocessors);

}  // namespace rlk::cuda::lm_head
