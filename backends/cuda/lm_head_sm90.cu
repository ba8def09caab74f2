// lm_head products in arithmetic sm90/t25k16 on Hopper's wgmma: the tiles of lm_head_sm90_kernel.cuh, for
// every layout of the operands.
#include "lm_head_sm90_kernel.cuh"

namespace rlk::cuda {
namespace {

using hopper::start_tile;

template <class T>
cudaError_t start(const Gemm& g, Sm90Tile tile, int multiprocessors, cudaStream_t stream) {
  if (g.a.k_contiguous && g.b.k_contiguous) switch (tile) {
      case Sm90Tile::wide:
        return start_tile<T, 2, 256, true, true, 2, 1>(g, multiprocessors, stream);
      case Sm90Tile::square:
        return start_tile<T, 2, 128, true, true, 1, 1>(g, multiprocessors, stream);
      case Sm90Tile::tall32:
        return start_tile<T, 2, 32, true, true, 1, 1>(g, multiprocessors, stream);
      case Sm90Tile::narrow128:
        return start_tile<T, 1, 128, true, true, 1, 1>(g, multiprocessors, stream);
      case Sm90Tile::narrow32:
        return start_tile<T, 1, 32, true, true, 1, 1>(g, multiprocessors, stream);
    }
  if (g.a.k_contiguous) switch (tile) {
      case Sm90Tile::wide:
        return start_tile<T, 2, 256, true, false, 2, 1>(g, multiprocessors, stream);
      case Sm90Tile::square:
        return start_tile<T, 2, 128, true, false, 1, 1>(g, multiprocessors, stream);
      case Sm90Tile::tall32:
        return start_tile<T, 2, 32, true, false, 1, 1>(g, multiprocessors, stream);
      default:
        return start_tile<T, 1, 32, true, false, 1, 1>(g, multiprocessors, stream);
    }
  return start_tile<T, 2, 256, false, false, 2, 1>(g, multiprocessors, stream);
}

}  // namespace

bool sm90_available() { return hopper::encoder() != nullptr; }

cudaError_t launch_sm90(const Gemm& g, Sm90Tile tile, int multiprocessors, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  return g.b.type == Dtype::f16 ? start<__half>(g, tile, multiprocessors, stream)
                                : start<__nv_bfloat16>(g, tile, multiprocessors, stream);
}

}  // namespace rlk::cuda
