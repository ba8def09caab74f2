// lm_head products in arithmetic fma64 on Hopper's FP64 tensor cores, whose m16n8k16 is an ascending FMA
// chain bit for bit: inputs upcast exactly, one chain per output, one rounding.
//
// Memory: operands stay in their own dtype in global and shared memory and are upcast in registers on the way
// into the fragments, so no upcast copy of the weight ever exists. Rejected: upcasting once per tile into
// fp64 shared memory; it saves conversions (their unit is 40% busy) but quadruples shared-memory traffic and
// halves the stages that fit.
//
// Tiles: 128x128 by 8 warps of 64x32 (arithmetic: 128 accumulator registers a thread), k in steps of 32, 4
// stages. For few rows, 16x128 by 8 warps of 16x16: the weight is then read once and upcast once, and memory
// bandwidth is the bound. Logits of 17 to 64 rows: lm_head_fma64_few.cu. The dtypes are template arguments
// here and only here: telling bf16 from fp16 in the inner loop cost a sixth of the rate. Zero padding is
// exact: an fp64 chain over products of at most 24-bit factors never underflows, so it never holds -0.
#include "lm_head_fma64.cuh"

namespace rlk::cuda {
namespace {

template <class T>
inline constexpr int kStagesFor = sizeof(T) == 4 ? 3 : 4;

template <class TA, class TB, int BM, int BN, int WM, int WN, bool KA, bool KB>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32, 1) tensor_core(Gemm p, bool vector) {
  constexpr int kThreads = BM / WM * (BN / WN) * 32, kDepth = 32, kStages = kStagesFor<TA>;
  constexpr int kRows = WM / 16, kColumns = WN / 8;
  using TileA = Tile<TA, BM, kDepth, KA>;
  using TileB = Tile<TB, BN, kDepth, KB>;
  extern __shared__ __align__(16) unsigned char shared[];
  TA* const stages_a = reinterpret_cast<TA*>(shared);
  TB* const stages_b = reinterpret_cast<TB*>(stages_a + kStages * TileA::kElements);

  const std::int64_t tiles_m = (p.m + BM - 1) / BM, tiles_n = (p.n + BN - 1) / BN;
  const TilePosition tile = place(blockIdx.x, tiles_m, tiles_n);
  const std::int64_t row0 = tile.m * BM, column0 = tile.n * BN;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
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

  double acc[kRows][kColumns][4] = {};
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  for (std::int64_t step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    const TA* a_tile = stages_a + step % kStages * TileA::kElements;
    const TB* b_tile = stages_b + step % kStages * TileB::kElements;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      double a[kRows][8];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          a[i][e] =
              to_float(a_tile[TileA::index(warp_row + i * 16 + group + e % 2 * 8, k + e / 2 * 4 + member)]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        double b[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          b[e] = to_float(b_tile[TileB::index(warp_column + j * 8 + group, k + e * 4 + member)]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) mma_f64(acc[i][j], a[i], b);
      }
    }
  }
  auto store = [&](auto type) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const std::int64_t row = row0 + warp_row + i * 16 + group + e / 2 * 8,
                             column = column0 + warp_column + j * 8 + member * 2 + e % 2;
          if (row < p.m && column < p.n) store_rounded<decltype(type)>(p, row, column, acc[i][j][e]);
        }
  };
  if (std::is_same_v<TB, float> || p.out == Dtype::f32)
    store(float{});
  else
    store(TB{});
}

template <class TA, class TB, int BM, int BN, int WM, int WN, bool KA, bool KB>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  constexpr int kBytes = kStagesFor<TA> * static_cast<int>(sizeof(TA) * Tile<TA, BM, 32, KA>::kElements +
                                                           sizeof(TB) * Tile<TB, BN, 32, KB>::kElements);
  auto kernel = tensor_core<TA, TB, BM, BN, WM, WN, KA, KB>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      e != cudaSuccess)
    return e;
  const std::int64_t blocks = ((p.m + BM - 1) / BM) * ((p.n + BN - 1) / BN);
  kernel<<<static_cast<unsigned>(blocks), BM / WM*(BN / WN) * 32, kBytes, stream>>>(
      p, aligned16(p.a) && aligned16(p.b));
  return cudaGetLastError();
}

template <class T>
cudaError_t start_alike(const Gemm& p, cudaStream_t stream) {
  if (p.b.k_contiguous) {
    if (p.m <= 16) return start<T, T, 16, 128, 16, 16, true, true>(p, stream);
    if (p.m <= 64) return launch_fma64_few(p, stream);
    return start<T, T, 128, 128, 64, 32, true, true>(p, stream);
  }
  if (!p.a.k_contiguous) return start<T, T, 128, 128, 64, 32, false, false>(p, stream);
  if (p.m <= 16) return start<T, T, 16, 128, 16, 16, true, false>(p, stream);
  return start<T, T, 128, 128, 64, 32, true, false>(p, stream);
}

}  // namespace

cudaError_t launch_fma64_sm90(const Gemm& p, cudaStream_t stream) {
  return with_float_type(p.b.type, [&](auto type) {
    using T = decltype(type);
    if (p.a.type == p.b.type) return start_alike<T>(p, stream);
    return p.a.k_contiguous ? start<float, T, 128, 128, 64, 32, true, false>(p, stream)
                            : start<float, T, 128, 128, 64, 32, false, false>(p, stream);
  });
}

}  // namespace rlk::cuda
