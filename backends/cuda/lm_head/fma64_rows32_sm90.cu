// Logits in arithmetic fma64 for 17 to 32 rows on Hopper's FP64 tensor cores: fma64_sm90.cu says
// which kernel serves what. Both operands are k-contiguous and of one dtype.
//
// With so few rows a weight is used little, and upcasting it is what costs: that unit takes 16 numbers a
// clock and SM. So each number is upcast once per block: the weight's in registers, since a warp
// owns 16 of its rows for all rows of the batch; the batch's into shared memory, a step ahead, in the order
// in which fragments are read.
//
// Tiles: 32x128 by 8 warps of 32x16, k in steps of 32, 4 stages (3 in fp32).
#include "cuda/hopper/mma.cuh"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32, kColumns = 16, kBM = 32, kBN = kWarps * kColumns,
              kDepth = 32;

template <class T>
struct Tiles {
  using A = Tile<T, kBM, kDepth, true>;
  using B = Tile<T, kBN, kDepth, true>;
  static constexpr int kStages = sizeof(T) == 4 ? 3 : 4;
  static constexpr int kUpcast = kBM * kDepth / 2;  // pairs of fp64 in one step of A
  static constexpr int kBytes = 2 * kUpcast * static_cast<int>(sizeof(double2)) +
                                kStages * static_cast<int>(sizeof(T) * (A::kElements + B::kElements));
};

// Two blocks share an SM, so that one multiplies while the other waits.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) few_rows(Gemm p, bool vector) {
  using P = Tiles<T>;
  constexpr int kStages = P::kStages, kBlocks = kBM / 16;  // blocks of 16 rows
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const upcast = reinterpret_cast<double2*>(shared);
  auto* const stages_a = reinterpret_cast<T*>(upcast + 2 * P::kUpcast);
  auto* const stages_b = stages_a + kStages * P::A::kElements;

  const TilePosition tile = place(blockIdx.x, (p.m + kBM - 1) / kBM, (p.n + kBN - 1) / kBN);
  const std::int64_t row0 = tile.m * kBM, column0 = tile.n * kBN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;

  const std::int64_t steps = (p.k + kDepth - 1) / kDepth;
  auto fetch = [&](std::int64_t step) {
    if (step < steps) {
      const int stage = static_cast<int>(step % kStages);
      P::A::template load<kThreads>(stages_a + stage * P::A::kElements, p.a, vector, row0, p.m, step * kDepth,
                                    p.k);
      P::B::template load<kThreads>(stages_b + stage * P::B::kElements, p.b, vector, column0, p.n,
                                    step * kDepth, p.k);
    }
    copy_commit();
  };
  // An A fragment of 16 rows x 16 k is 8 numbers a thread: rows group and group + 8 at four k, member apart.
  // A pair of rows lies side by side, pairs in the order of the lanes. A warp upcasts kBlocks parts of 32
  // pairs per step.
  auto part_of = [&](int i) { return i * kWarps + warp; };
  auto raw_a = [&](std::int64_t step, int i, int half) {
    const int row = part_of(i) / 8 * 16 + group + half * 8, k = part_of(i) % 8 * 4 + member;
    return stages_a[step % kStages * P::A::kElements + P::A::index(row, k)];
  };
  auto upcast_a = [&](std::int64_t step, int i, T low, T high) {
    upcast[step % 2 * P::kUpcast + part_of(i) * 32 + lane] = make_double2(to_float(low), to_float(high));
  };

  double acc[kBlocks][2][4] = {};
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  copy_wait<kStages - 2>();
  __syncthreads();
  for (int i = 0; i < kBlocks; ++i) upcast_a(0, i, raw_a(0, i, 0), raw_a(0, i, 1));
  for (std::int64_t step = 0; step < steps; ++step) {
    copy_wait<kStages - 3>();
    __syncthreads();
    const double2* a_step = upcast + step % 2 * P::kUpcast + lane;
    const T* b_tile = stages_b + step % kStages * P::B::kElements;
    // What is read now is upcast between the products, which keep the tensor cores busy meanwhile. Past the
    // last step that is what an earlier one left behind, and nobody reads it.
    T next_a[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      next_a[i][0] = raw_a(step + 1, i, 0), next_a[i][1] = raw_a(step + 1, i, 1);
    fetch(step + kStages - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      double b[2][4];
#pragma unroll
      for (int n = 0; n < 8; ++n)
        b[n / 4][n % 4] = to_float(
            b_tile[P::B::index(warp * kColumns + n / 4 * 8 + group, half * 16 + n % 4 * 4 + member)]);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        double a[8];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const double2 pair = a_step[(i * 8 + half * 4 + e) * 32];
          a[e * 2] = pair.x, a[e * 2 + 1] = pair.y;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) mma_f64(acc[i][j], a, b[j]);
        if (half == 0) upcast_a(step + 1, i, next_a[i][0], next_a[i][1]);
      }
    }
  }
  auto store = [&](auto type) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const std::int64_t row = row0 + i * 16 + group + e / 2 * 8,
                             column = column0 + warp * kColumns + j * 8 + member * 2 + e % 2;
          if (row < p.m && column < p.n) store_rounded<decltype(type)>(p, row, column, acc[i][j][e]);
        }
  };
  if (std::is_same_v<T, float> || p.out == Float::f32)
    store(float{});
  else
    store(T{});
}

template <class T>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  constexpr int kBytes = Tiles<T>::kBytes;
  const std::int64_t blocks = ((p.m + kBM - 1) / kBM) * ((p.n + kBN - 1) / kBN);
  return launch(few_rows<T>, static_cast<unsigned>(blocks), kThreads, kBytes, stream, p,
                aligned16(p.a) && aligned16(p.b));
}

}  // namespace

cudaError_t launch_fma64_few(const Gemm& p, cudaStream_t stream) {
  return with_float_type(p.b.type, [&](auto type) { return start<decltype(type)>(p, stream); });
}

}  // namespace rlk::cuda::lm_head
