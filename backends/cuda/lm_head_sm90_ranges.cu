// lm_head products in arithmetic sm90/t25k16/r4 on Hopper's wgmma: k in four ranges, so that a product with
// few outputs and a long sum, d_hidden of a small batch or a narrow projection, occupies the whole GPU. The
// tile and the way the ranges' sums meet follow from the sizes and the workspace; all give the same bits.
#include <algorithm>

#include "lm_head_sm90_kernel.cuh"

namespace rlk::cuda {
namespace {

using hopper::start_tile;
using hopper::Sums;

// Up to so many rows, a cluster of four blocks, one range each.
constexpr std::int64_t kFewRows = 64;
// So many clusters of four find room at once; a narrow product takes the narrowest tile that needs no more.
constexpr std::int64_t kManyClusters = 28;
// Up to so many rows, pairs of 64x256 below each other, which share their columns, or, where a block takes
// its ranges in turn, of 128x128 side by side; beyond, pairs of 128x256 below each other.
constexpr std::int64_t kOneRowOfTiles = 128;

struct Grid {
  std::int64_t tiles, slot_bytes;
};
Grid grid_of(const Gemm& g) {
  if (g.m <= kOneRowOfTiles) return {(g.n + 255) / 256 * 2, 64 * 256 * 4};
  return {(g.m + 255) / 256 * 2 * ((g.n + 255) / 256), 128 * 256 * 4};
}
std::size_t bytes_for(std::int64_t slots, const Grid& grid) {
  return hopper::kCounterBytes + static_cast<std::size_t>(slots * grid.slot_bytes);
}
// Whether blocks that take one range each fill the GPU better than blocks that take all four in turn.
bool worth_spreading(const Grid& grid, std::int64_t multiprocessors) {
  const std::int64_t waves = (grid.tiles + multiprocessors - 1) / multiprocessors;
  return grid.tiles * 10 < waves * multiprocessors * 9 && grid.tiles * sizeof(int) <= hopper::kCounterBytes;
}

template <class T, bool KB>
cudaError_t start(const Gemm& g, int multiprocessors, void* workspace, std::size_t bytes,
                  cudaStream_t stream) {
  if (g.m <= kFewRows) {
    if constexpr (KB) {
      if (g.n <= 64 * kManyClusters)
        return start_tile<T, 1, 64, true, KB, 1, 1, Sums::cluster>(g, multiprocessors, stream);
      if (g.n <= 128 * kManyClusters)
        return start_tile<T, 1, 128, true, KB, 1, 1, Sums::cluster>(g, multiprocessors, stream);
    }
    return start_tile<T, 1, 256, true, KB, 1, 1, Sums::cluster>(g, multiprocessors, stream);
  }
  if (g.m <= kOneRowOfTiles && g.n <= 64 * kManyClusters)
    return start_tile<T, 2, 64, true, KB, 1, 1, Sums::cluster>(g, multiprocessors, stream);
  const Grid grid = grid_of(g);
  const bool spread =
      worth_spreading(grid, multiprocessors) && bytes >= bytes_for(kRangesOfK * grid.tiles, grid);
  const bool no_room =
      !spread && bytes < bytes_for(std::min<std::int64_t>(grid.tiles, multiprocessors), grid);
  if (no_room || (g.m <= kOneRowOfTiles && g.n <= 128 * kManyClusters))
    return start_tile<T, 2, 128, true, KB, 1, 1, Sums::cluster>(g, multiprocessors, stream);
  if (g.m > kOneRowOfTiles)
    return start_tile<T, 2, 256, true, KB, 2, 1, Sums::memory>(g, multiprocessors, stream,
                                                               {workspace, spread});
  return spread ? start_tile<T, 1, 256, true, KB, 2, 1, Sums::memory>(g, multiprocessors, stream,
                                                                      {workspace, true})
                : start_tile<T, 2, 128, true, KB, 1, 2, Sums::memory>(g, multiprocessors, stream,
                                                                      {workspace, false});
}

}  // namespace

cudaError_t launch_sm90_ranges(const Gemm& g, int multiprocessors, void* workspace, std::size_t bytes,
                               cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  if (reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0) bytes = 0;
  const auto launch = g.b.type == Dtype::f16 ? g.b.k_contiguous ? start<__half, true> : start<__half, false>
                      : g.b.k_contiguous ? start<__nv_bfloat16, true>
                                             : start<__nv_bfloat16, false>;
  return launch(g, multiprocessors, workspace, bytes, stream);
}

}  // namespace rlk::cuda
