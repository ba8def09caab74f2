// lm_head products in arithmetic fma64, the golden path, on FP64 units: inputs upcast exactly, one ascending
// fp64 FMA chain per output, one rounding. Any GPU of compute capability 8.0 and up; Hopper takes
// fma64_sm90.cu, the same bits.
//
// Tiles: 64x64 by 256 threads of 4x4, k in steps of 16, upcast on the way into shared memory: the FP64 units
// are slow enough here that nothing else shows. Zero padding is exact (see fma64_sm90.cu).
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

constexpr int kSide = 64, kDepth = 16, kThreads = 256;

template <bool KContiguous>
__device__ void load_tile(double (*to)[kSide + 1], const Operand& from, std::int64_t row0, std::int64_t rows,
                          std::int64_t k0, std::int64_t depth) {
  for (int i = threadIdx.x; i < kSide * kDepth; i += kThreads) {
    const int row = KContiguous ? i / kDepth : i % kSide, k = KContiguous ? i % kDepth : i / kSide;
    const bool inside = row0 + row < rows && k0 + k < depth;
    const std::int64_t at = KContiguous ? (row0 + row) * from.ld + k0 + k : (k0 + k) * from.ld + row0 + row;
    to[k][row] = inside ? load_element(from.data, from.type, at) : 0.0;
  }
}

template <bool KA, bool KB>
__global__ void __launch_bounds__(kThreads) cuda_core(Gemm p) {
  __shared__ double a_tile[kDepth][kSide + 1], b_tile[kDepth][kSide + 1];
  const TilePosition tile = place(blockIdx.x, (p.m + kSide - 1) / kSide, (p.n + kSide - 1) / kSide);
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  double acc[4][4] = {};
  for (std::int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
    load_tile<KA>(a_tile, p.a, tile.m * kSide, p.m, k0, p.k);
    load_tile<KB>(b_tile, p.b, tile.n * kSide, p.n, k0, p.k);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          acc[i][j] = __fma_rn(a_tile[k][ty + i * 16], b_tile[k][tx + j * 16], acc[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      store_product(p, tile.m * kSide + ty + i * 16, tile.n * kSide + tx + j * 16, acc[i][j]);
}

}  // namespace

cudaError_t launch_fma64(const Gemm& p, int compute_capability, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return cudaSuccess;
  if (compute_capability == 90) return launch_fma64_sm90(p, stream);
  const auto blocks = static_cast<unsigned>(((p.m + kSide - 1) / kSide) * ((p.n + kSide - 1) / kSide));
  if (p.b.k_contiguous)
    cuda_core<true, true><<<blocks, kThreads, 0, stream>>>(p);
  else if (p.a.k_contiguous)
    cuda_core<true, false><<<blocks, kThreads, 0, stream>>>(p);
  else
    cuda_core<false, false><<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rlk::cuda::lm_head
