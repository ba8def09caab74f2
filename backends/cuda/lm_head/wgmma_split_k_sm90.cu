// lm_head products in arithmetic sm90/t25k16/r4 on Hopper's wgmma: split-K, k in four ranges, so that a
// product with few outputs and a long sum, d_hidden of a small batch or a narrow projection, occupies the
// whole GPU. The tile and the way the ranges' sums meet follow from the sizes and the workspace; all give the
// same bits.
#include <algorithm>
#include <cstdint>

#include "cuda/lm_head/wgmma_kernel.cuh"

namespace rlk::cuda::lm_head {
namespace {

// Up to so many rows, a cluster of four blocks, one range each.
constexpr std::int64_t kFewRows = 64;
// So many clusters of four find room at once; a narrow product takes the narrowest tile that needs no more.
constexpr std::int64_t kManyClusters = 28;
// Up to so many rows, one row of tiles of 128x128 where clusters meet or a block takes its ranges in turn.
constexpr std::int64_t kOneRowOfTiles = 128;

// Tiles whose ranges meet in memory: `pair` of rows x columns below each other, which share their columns.
struct Shape {
  std::int64_t rows, columns, pair;

  std::int64_t tiles(const Gemm& g) const {
    return (g.m + rows * pair - 1) / (rows * pair) * pair * ((g.n + columns - 1) / columns);
  }
  // Of `units` ranges of a tile, on so many blocks at once.
  std::int64_t time(std::int64_t units, std::int64_t blocks) const {
    return (units + blocks - 1) / blocks * rows * columns;
  }
  std::size_t bytes(std::int64_t slots) const {
    return kCounterBytes + static_cast<std::size_t>(slots * rows * columns) * sizeof(float);
  }
};
constexpr Shape kLow{64, 256, 2}, kTall{192, 128, 1}, kWide{128, 256, 2};

// The shape whose blocks, one range of a tile each, take the least time and find room for their sums; null
// where blocks that take all ranges of a tile of `in_turn` take no longer.
const Shape* spread_shape(const Gemm& g, const Shape& in_turn, std::int64_t blocks, std::size_t bytes) {
  const Shape* best = nullptr;
  std::int64_t least = kRangesOfK * in_turn.time(in_turn.tiles(g), blocks);
  for (const Shape* shape : {&kWide, &kLow, &kTall}) {
    const std::int64_t tiles = shape->tiles(g), units = kRangesOfK * tiles;
    if (bytes < shape->bytes(units) || tiles * sizeof(int) > kCounterBytes) continue;
    if (shape == &kTall && g.m > kTall.rows) continue;  // rows of tall tiles would each fetch the columns
    if (const std::int64_t time = shape->time(units, blocks); time < least) best = shape, least = time;
  }
  return best;
}

// Where sums meet in memory, the shape of blocks that take all ranges of a tile in turn. (A pair of 128x128
// side by side, which shares its rows, is as large as one of kLow.) Null where they meet within clusters.
const Shape* in_turn_shape(const Gemm& g) {
  if (g.m > kOneRowOfTiles) return &kWide;
  return g.m <= kFewRows || g.n <= 128 * kManyClusters ? nullptr : &kLow;
}
std::size_t in_turn_bytes(const Gemm& g, const Shape& in_turn, std::int64_t blocks) {
  return in_turn.bytes(std::min(in_turn.tiles(g), blocks));
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
  const Shape* const in_turn = in_turn_shape(g);
  const Shape* const spread = in_turn ? spread_shape(g, *in_turn, multiprocessors, bytes) : nullptr;
  if (spread == &kLow)
    return start_tile<T, 1, 256, true, KB, 2, 1, Sums::memory>(g, multiprocessors, stream, {workspace, true});
  if (spread == &kTall)
    return start_tile<T, 3, 128, true, KB, 1, 1, Sums::memory>(g, multiprocessors, stream, {workspace, true});
  if (in_turn == nullptr || bytes < in_turn_bytes(g, *in_turn, multiprocessors))
    return start_tile<T, 2, 128, true, KB, 1, 1, Sums::cluster>(g, multiprocessors, stream);
  if (in_turn == &kLow)
    return start_tile<T, 2, 128, true, KB, 1, 2, Sums::memory>(g, multiprocessors, stream,
                                                               {workspace, false});
  return start_tile<T, 2, 256, true, KB, 2, 1, Sums::memory>(g, multiprocessors, stream,
                                                             {workspace, spread != nullptr});
}

}  // namespace

cudaError_t launch_sm90_ranges(const Gemm& g, int multiprocessors, void* workspace, std::size_t bytes,
                               cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  if (reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0) bytes = 0;
  const auto launch = g.b.type == Float::f16 ? g.b.k_contiguous ? start<__half, true> : start<__half, false>
                      : g.b.k_contiguous ? start<__nv_bfloat16, true>
                                             : start<__nv_bfloat16, false>;
  return launch(g, multiprocessors, workspace, bytes, stream);
}

std::size_t ranges_workspace(const Gemm& g, int multiprocessors) {
  const Shape* const in_turn = in_turn_shape(g);
  if (g.m == 0 || g.n == 0 || in_turn == nullptr) return 0;
  const Shape* const spread = spread_shape(g, *in_turn, multiprocessors, SIZE_MAX);
  return spread ? spread->bytes(kRangesOfK * spread->tiles(g)) : in_turn_bytes(g, *in_turn, multiprocessors);
}

}  // namespace rlk::cuda::lm_head
