// lm_head products in arithmetic sm90/t25k16, and sm90/t25k16/r4 (Ranged), through mma.sync m16n8k16, which
// on Hopper follows the same rule as wgmma. Serves every pointer alignment and stride, so it stands in where
// TMA and the library's tensor-core family cannot go.
//
// Tiles: 128x128 by 8 warps of 64x32, or 16x64 by 4 warps of 16x16 for few rows; k in steps of 32, 4 stages.
// Fragments come through ldmatrix, transposed where the operand is row-contiguous. Zero padding of the k tail
// is exact: a zero product takes no part in the group's alignment and the accumulator is already a truncated
// fp32 number.
#include "cuda/hopper/mma.cuh"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

constexpr int kDepth = 32, kStages = 4;

__device__ __forceinline__ void mma(bool f16, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  if (f16)
    mma_f16(c, a, b0, b1);
  else
    mma_bf16(c, a, b0, b1);
}

// `per_range`: steps in a range of k.
template <int BM, int BN, int WM, int WN, bool KA, bool KB, bool Ranged>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32)
    tensor_core(Gemm p, std::int64_t per_range, bool vector) {
  constexpr int kThreads = BM / WM * (BN / WN) * 32, kRows = WM / 16, kColumns = WN / 8;
  using T = std::uint16_t;
  const bool f16 = p.b.type == Float::f16;
  using TileA = Tile<T, BM, kDepth, KA>;
  using TileB = Tile<T, BN, kDepth, KB>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const stages_a = reinterpret_cast<T*>(shared);
  T* const stages_b = stages_a + kStages * TileA::kElements;

  const TilePosition tile = place(blockIdx.x, (p.m + BM - 1) / BM, (p.n + BN - 1) / BN);
  const std::int64_t row0 = tile.m * BM, column0 = tile.n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / (BN / WN) * WM, warp_column = warp % (BN / WN) * WN;
  const std::int64_t steps = (p.k + kDepth - 1) / kDepth;
  auto fetch = [&](std::int64_t step) {
    if (step < steps) {
      const int stage = static_cast<int>(step % kStages);
      TileA::template load<kThreads>(stages_a + stage * TileA::kElements, p.a, vector, row0, p.m,
                                     step * kDepth, p.k);
      TileB::template load<kThreads>(stages_b + stage * TileB::kElements, p.b, vector, column0, p.n,
                                     step * kDepth, p.k);
    }
    copy_commit();
  };

  // ldmatrix takes one 8x8 matrix's line address from each lane: matrices 0..3 are (rows 0-7, k 0-7), (rows
  // 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15) for A, and with the middle two swapped for B.
  const int matrix = lane / 8, line = lane % 8;
  float acc[kRows][kColumns][4] = {};
  [[maybe_unused]] float total[kRows][kColumns][4] = {};
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  for (std::int64_t step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    const T* a_tile = stages_a + step % kStages * TileA::kElements;
    const T* b_tile = stages_b + step % kStages * TileB::kElements;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      std::uint32_t a[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = warp_row + i * 16 + matrix % 2 * 8, at = k + matrix / 2 * 8;
        if constexpr (KA)
          ldmatrix(a[i], a_tile + TileA::index(row + line, at));
        else
          ldmatrix_transposed(a[i], a_tile + TileA::index(row, at + line));
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        std::uint32_t b[4];
        const int column = warp_column + j * 8 + matrix / 2 * 8, at = k + matrix % 2 * 8;
        if constexpr (KB)
          ldmatrix(b, b_tile + TileB::index(column + line, at));
        else
          ldmatrix_transposed(b, b_tile + TileB::index(column, at + line));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          mma(f16, acc[i][j], a[i], b[0], b[1]);
          mma(f16, acc[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
    if constexpr (Ranged) {
      if ((step + 1) % per_range != 0 && step + 1 != steps) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            total[i][j][e] = step < per_range ? acc[i][j][e] : __fadd_rn(total[i][j][e], acc[i][j][e]);
            acc[i][j][e] = 0;
          }
    }
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        store_product(p, row0 + warp_row + i * 16 + lane / 4 + e / 2 * 8,
                      column0 + warp_column + j * 8 + lane % 4 * 2 + e % 2,
                      Ranged ? total[i][j][e] : acc[i][j][e]);
}

template <int BM, int BN, int WM, int WN, bool KA, bool KB, bool Ranged>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  constexpr int kBytes =
      kStages * 2 *
      (Tile<std::uint16_t, BM, kDepth, KA>::kElements + Tile<std::uint16_t, BN, kDepth, KB>::kElements);
  const auto blocks = static_cast<unsigned>(((p.m + BM - 1) / BM) * ((p.n + BN - 1) / BN));
  return launch(tensor_core<BM, BN, WM, WN, KA, KB, Ranged>, blocks, BM / WM * (BN / WN) * 32, kBytes, stream,
                p, range_of(p.k) / kDepth, aligned16(p.a) && aligned16(p.b));
}

template <bool KB, bool Ranged>
cudaError_t start_rows(const Gemm& p, cudaStream_t stream) {
  return p.m <= 16 ? start<16, 64, 16, 16, true, KB, Ranged>(p, stream)
                   : start<128, 128, 64, 32, true, KB, Ranged>(p, stream);
}

}  // namespace

cudaError_t launch_mma(const Gemm& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return cudaSuccess;
  if (!p.a.k_contiguous) return start<128, 128, 64, 32, false, false, false>(p, stream);
  return p.b.k_contiguous ? start_rows<true, false>(p, stream) : start_rows<false, false>(p, stream);
}

cudaError_t launch_mma_ranges(const Gemm& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return cudaSuccess;
  return p.b.k_contiguous ? start_rows<true, true>(p, stream) : start_rows<false, true>(p, stream);
}

}  // namespace rlk::cuda::lm_head
