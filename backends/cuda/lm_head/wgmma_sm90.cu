// lm_head products in arithmetic sm90/t25k16 on Hopper's wgmma: the tiles of wgmma_kernel.cuh, for
// every layout of the operands.
#include "cuda/lm_head/wgmma_kernel.cuh"

namespace rlk::cuda::lm_head {
namespace {

template <class T, int Groups, int BN, bool KB, int ClusterM, int Parts, int ClusterN = 1>
constexpr auto tile_of = start_tile<T, Groups, BN, true, KB, ClusterM, ClusterN, Sums::whole, Parts>;

// Up to so many rows, stages of side32 hold 256 of k, beyond, 128.
constexpr std::int64_t kStagesOfFour = 16;

template <class T>
cudaError_t start(const Gemm& g, Sm90Tile tile, int multiprocessors, cudaStream_t stream) {
  const auto launch = [&] {
    if (!g.a.k_contiguous) return start_tile<T, 2, 256, false, false, 2, 1>;
    const bool kb = g.b.k_contiguous;
    switch (tile) {
      case Sm90Tile::square:
        return kb ? tile_of<T, 2, 128, true, 1, 1> : tile_of<T, 2, 128, false, 1, 1>;
      case Sm90Tile::tall32:
        return kb ? tile_of<T, 2, 32, true, 1, 2> : tile_of<T, 2, 32, false, 1, 2>;
      case Sm90Tile::narrow128:
        return tile_of<T, 1, 128, true, 1, 1>;
      case Sm90Tile::narrow64:
        return tile_of<T, 1, 64, false, 1, 4>;
      case Sm90Tile::narrow32:
        return kb ? tile_of<T, 1, 32, true, 1, 4> : tile_of<T, 1, 32, false, 1, 1>;
      case Sm90Tile::side32:
        return g.m <= kStagesOfFour ? tile_of<T, 1, 32, false, 1, 4, 2> : tile_of<T, 1, 32, false, 1, 2, 2>;
      case Sm90Tile::stacked64:
        return tile_of<T, 1, 64, false, 2, 2>;
      case Sm90Tile::stacked128:
        return tile_of<T, 1, 128, false, 2, 1>;
      default:
        return kb ? tile_of<T, 2, 256, true, 2, 1> : tile_of<T, 2, 256, false, 2, 1>;
    }
  }();
  return launch(g, multiprocessors, stream, {});
}

}  // namespace

bool sm90_available() { return encoder() != nullptr; }

cudaError_t launch_sm90(const Gemm& g, Sm90Tile tile, int multiprocessors, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  return g.b.type == Float::f16 ? start<__half>(g, tile, multiprocessors, stream)
                                : start<__nv_bfloat16>(g, tile, multiprocessors, stream);
}

}  // namespace rlk::cuda::lm_head
