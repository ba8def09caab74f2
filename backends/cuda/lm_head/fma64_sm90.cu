// lm_head products in arithmetic fma64 on Hopper's FP64 tensor cores, whose products are an ascending FMA
// chain bit for bit: inputs upcast exactly, one chain per output, one rounding. Which kernel serves a
// product, and the one for up to 16 rows; fma64_rows32_sm90.cu has the logits of 17 to 32,
// fma64_tiles_sm90.cu the rest.
//
// Memory: operands stay in their own dtype in global memory, so no upcast copy of the weight ever exists. The
// dtypes are template arguments here and only here: telling bf16 from fp16 in the inner loop cost a sixth of
// the rate. Zero padding is exact: an fp64 chain over products of at most 24-bit factors never underflows, so
// it never holds -0.
//
// Tiles here: 16x128 by 8 warps of 16x16, k in steps of 32, 4 stages (3 in fp32) in the operands' own dtype,
// upcast on the way into the fragments: the weight is read once and upcast once, and memory bandwidth is the
// bound.
#include "cuda/hopper/mma.cuh"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

constexpr int kRows = 16, kColumns = 128, kWarpColumns = 16, kDepth = 32,
              kThreads = kColumns / kWarpColumns * 32;

template <class T, bool KB>
struct Tiles {
  using A = Tile<T, kRows, kDepth, true>;
  using B = Tile<T, kColumns, kDepth, KB>;
  static constexpr int kStages = sizeof(T) == 4 ? 3 : 4;
  static constexpr int kBytes = kStages * static_cast<int>(sizeof(T) * (A::kElements + B::kElements));
};

template <class T, bool KB>
__global__ void __launch_bounds__(kThreads, 1) sixteen_rows(Gemm p, bool vector) {
  using P = Tiles<T, KB>;
  constexpr int kStages = P::kStages;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const stages_a = reinterpret_cast<T*>(shared);
  T* const stages_b = stages_a + kStages * P::A::kElements;

  const std::int64_t column0 = std::int64_t{blockIdx.x} * kColumns;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;

  const std::int64_t steps = (p.k + kDepth - 1) / kDepth;
  auto fetch = [&](std::int64_t step) {
    if (step < steps) {
      const int stage = static_cast<int>(step % kStages);
      P::A::template load<kThreads>(stages_a + stage * P::A::kElements, p.a, vector, 0, p.m, step * kDepth,
                                    p.k);
      P::B::template load<kThreads>(stages_b + stage * P::B::kElements, p.b, vector, column0, p.n,
                                    step * kDepth, p.k);
    }
    copy_commit();
  };

  double acc[2][4] = {};
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  for (std::int64_t step = 0; step < steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    const T* a_tile = stages_a + step % kStages * P::A::kElements;
    const T* b_tile = stages_b + step % kStages * P::B::kElements;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      double a[8];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        a[e] = to_float(a_tile[P::A::index(group + e % 2 * 8, k + e / 2 * 4 + member)]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        double b[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          b[e] = to_float(b_tile[P::B::index(warp * kWarpColumns + j * 8 + group, k + e * 4 + member)]);
        mma_f64(acc[j], a, b);
      }
    }
  }
  auto store = [&](auto type) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::int64_t row = group + e / 2 * 8,
                           column = column0 + warp * kWarpColumns + j * 8 + member * 2 + e % 2;
        if (row < p.m && column < p.n) store_rounded<decltype(type)>(p, row, column, acc[j][e]);
      }
  };
  if (std::is_same_v<T, float> || p.out == Float::f32)
    store(float{});
  else
    store(T{});
}

template <class T, bool KB>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  constexpr int kBytes = Tiles<T, KB>::kBytes;
  const auto blocks = static_cast<unsigned>((p.n + kColumns - 1) / kColumns);
  return launch(sixteen_rows<T, KB>, blocks, kThreads, kBytes, stream, p, aligned16(p.a) && aligned16(p.b));
}

// The tile that takes the fewest steps of all SMs, weighed by what a step of one takes.
Fma64Tile tile_for(const Gemm& p) {
  int device = 0, multiprocessors = 132;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto cost = [&](std::int64_t rows, std::int64_t columns, std::int64_t step) {
    const std::int64_t tiles = (p.m + rows - 1) / rows * ((p.n + columns - 1) / columns);
    return (tiles + multiprocessors - 1) / multiprocessors * step;
  };
  constexpr int kSquareStep = 5, kNarrowStep = 1;  // measured
  if (!p.a.k_contiguous) return Fma64Tile::square;
  if (p.b.k_contiguous) return p.m <= 64 ? Fma64Tile::few : Fma64Tile::square;
  return cost(64, 32, kNarrowStep) < cost(128, 128, kSquareStep) ? Fma64Tile::narrow : Fma64Tile::square;
}

}  // namespace

cudaError_t launch_fma64_sm90(const Gemm& p, cudaStream_t stream) {
  if (p.a.k_contiguous && p.a.type == p.b.type) {
    if (p.m <= kRows)
      return with_float_type(p.b.type, [&](auto type) {
        using T = decltype(type);
        return p.b.k_contiguous ? start<T, true>(p, stream) : start<T, false>(p, stream);
      });
    if (p.m <= 32 && p.b.k_contiguous) return launch_fma64_few(p, stream);
  }
  return launch_fma64_tiles(p, tile_for(p), stream);
}

}  // namespace rlk::cuda::lm_head
