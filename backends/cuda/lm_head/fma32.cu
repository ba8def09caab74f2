// lm_head products in arithmetic fma32/kb1024 on CUDA cores: an ascending fp32 FMA chain inside each block of
// 1024 along k, block sums added in order. Compute capability 8.0 and up.
//
// Tiles: 128x128 by 256 threads of 8x8 (two 4-wide halves each way, so that shared reads are 16 bytes and
// free of conflicts), k in steps of 16 through two shared buffers; for few rows 64x128 by 4x8 or 16x128 by
// 2x4. Operands are upcast once per tile on their way into shared memory. The next step's global loads are in
// flight during the arithmetic. The k tail runs the exact number of steps: a padded zero would turn an
// underflowed -0 into +0.
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

constexpr int kDepth = 16;
constexpr int kBlock = 1024;
constexpr int kThreads = 256;

// One operand's share of a step, raw in registers between its global load and its shared store: converting on
// arrival would make the arithmetic in between wait for memory.
template <int R, bool KContiguous>
struct Piece {
  static constexpr int kPer =
      R * kDepth / kThreads;  // elements a thread carries: 8 for R = 128, 4 for 64, 1 for 16
  static constexpr int kLine = KContiguous ? kDepth : R;
  static constexpr int kChunks = kLine / kPer;
  union {
    int4 vector[(kPer + 3) / 4];
    int2 half_vector[(kPer + 1) / 2];
    float wide[kPer];
    std::uint16_t narrow[kPer];
  };
  __device__ Piece() {}

  __device__ void load(const Operand& from, bool aligned, std::int64_t row0, std::int64_t rows,
                       std::int64_t k0, std::int64_t depth) {
    const int line = static_cast<int>(threadIdx.x) / kChunks,
              at = static_cast<int>(threadIdx.x) % kChunks * kPer;
    const std::int64_t line_index = (KContiguous ? row0 : k0) + line, lines = KContiguous ? rows : depth;
    const std::int64_t first = (KContiguous ? k0 : row0) + at, end = KContiguous ? depth : rows;
    const std::int64_t index = line_index * from.ld + first;
    const bool whole = line_index < lines && first + kPer <= end;
    if (from.type == Float::f32) {
      const float* source = static_cast<const float*>(from.data) + index;
      if (kPer % 4 == 0 && aligned && whole) {
#pragma unroll
        for (int v = 0; v < kPer / 4; ++v) vector[v] = reinterpret_cast<const int4*>(source)[v];
      } else {
#pragma unroll
        for (int e = 0; e < kPer; ++e) wide[e] = line_index < lines && first + e < end ? source[e] : 0.0f;
      }
    } else {
      const auto* source = static_cast<const std::uint16_t*>(from.data) + index;
      if (kPer == 8 && aligned && whole) {
        vector[0] = *reinterpret_cast<const int4*>(source);
      } else if (kPer == 4 && aligned && whole) {
        half_vector[0] = *reinterpret_cast<const int2*>(source);
      } else {
#pragma unroll
        for (int e = 0; e < kPer; ++e)
          narrow[e] = line_index < lines && first + e < end ? source[e] : std::uint16_t{0};
      }
    }
  }

  __device__ void store(float (*to)[R + 4], Float type) const {
    const int line = static_cast<int>(threadIdx.x) / kChunks,
              at = static_cast<int>(threadIdx.x) % kChunks * kPer;
#pragma unroll
    for (int e = 0; e < kPer; ++e)
      (KContiguous ? to[at + e][line] : to[line][at + e]) =
          type == Float::f32 ? wide[e] : raw_to_float(narrow[e], type);
  }
};

template <int Count, int R>
__device__ __forceinline__ void read_fragment(float (&to)[Count], const float (*tile)[R + 4], int k,
                                              int lane) {
  if constexpr (Count == 8) {
    reinterpret_cast<float4*>(to)[0] = *reinterpret_cast<const float4*>(&tile[k][lane * 4]);
    reinterpret_cast<float4*>(to)[1] = *reinterpret_cast<const float4*>(&tile[k][R / 2 + lane * 4]);
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = tile[k][lane * Count + i];
  }
}
template <int Count, int R>
__device__ __forceinline__ int fragment_index(int i, int lane) {
  return Count == 8 ? (i / 4) * (R / 2) + lane * 4 + i % 4 : lane * Count + i;
}

template <int BM, int BN, int TM, int TN, bool KA, bool KB>
__global__ void __launch_bounds__(kThreads) cuda_core(Gemm p, bool a_aligned, bool b_aligned) {
  static_assert(BM / TM * (BN / TN) == kThreads);
  __shared__ __align__(16) float a_tile[2][kDepth][BM + 4];
  __shared__ __align__(16) float b_tile[2][kDepth][BN + 4];
  const TilePosition tile = place(blockIdx.x, (p.m + BM - 1) / BM, (p.n + BN - 1) / BN);
  const std::int64_t row0 = tile.m * BM, column0 = tile.n * BN;
  const int tx = static_cast<int>(threadIdx.x) % (BN / TN), ty = static_cast<int>(threadIdx.x) / (BN / TN);

  // -0 is the one start that an addition leaves no trace of: the first block's sum becomes the total as it
  // is.
  float total[TM][TN], chain[TM][TN] = {};
#pragma unroll
  for (int i = 0; i < TM; ++i)
#pragma unroll
    for (int j = 0; j < TN; ++j) total[i][j] = -0.0f;
  auto close_block = [&] {
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) {
        total[i][j] = __fadd_rn(total[i][j], chain[i][j]);
        chain[i][j] = 0.0f;
      }
  };
  Piece<BM, KA> a_next;
  Piece<BN, KB> b_next;
  a_next.load(p.a, a_aligned, row0, p.m, 0, p.k);
  b_next.load(p.b, b_aligned, column0, p.n, 0, p.k);
  int buffer = 0;
  for (std::int64_t k0 = 0; k0 < p.k; k0 += kDepth, buffer ^= 1) {
    a_next.store(a_tile[buffer], p.a.type);
    b_next.store(b_tile[buffer], p.b.type);
    __syncthreads();  // one barrier a step: the other buffer's readers all passed the previous one
    if (k0 + kDepth < p.k) {
      a_next.load(p.a, a_aligned, row0, p.m, k0 + kDepth, p.k);
      b_next.load(p.b, b_aligned, column0, p.n, k0 + kDepth, p.k);
    }
    if (k0 != 0 && k0 % kBlock == 0) close_block();
    auto multiply = [&](int k) {
      float a[TM], b[TN];
      read_fragment<TM, BM>(a, a_tile[buffer], k, ty);
      read_fragment<TN, BN>(b, b_tile[buffer], k, tx);
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) chain[i][j] = __fmaf_rn(a[i], b[j], chain[i][j]);
    };
    if (k0 + kDepth <= p.k) {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) multiply(k);
    } else {
      for (int k = 0; k < static_cast<int>(p.k - k0); ++k) multiply(k);
    }
  }
  close_block();

#pragma unroll
  for (int i = 0; i < TM; ++i)
#pragma unroll
    for (int j = 0; j < TN; ++j)
      store_product(p, row0 + fragment_index<TM, BM>(i, ty), column0 + fragment_index<TN, BN>(j, tx),
                    total[i][j]);
}

template <int BM, int BN, int TM, int TN, bool KA, bool KB>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(((p.m + BM - 1) / BM) * ((p.n + BN - 1) / BN));
  cuda_core<BM, BN, TM, TN, KA, KB><<<blocks, kThreads, 0, stream>>>(p, aligned16(p.a), aligned16(p.b));
  return cudaGetLastError();
}

template <bool KB>
cudaError_t start_batch(const Gemm& p, cudaStream_t stream) {
  if (p.m <= 16) return start<16, 128, 2, 4, true, KB>(p, stream);
  if (p.m <= 64) return start<64, 128, 4, 8, true, KB>(p, stream);
  return start<128, 128, 8, 8, true, KB>(p, stream);
}

}  // namespace

cudaError_t launch_fma32(const Gemm& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return cudaSuccess;
  if (p.b.k_contiguous) return start_batch<true>(p, stream);
  if (p.a.k_contiguous) return start_batch<false>(p, stream);
  return start<128, 128, 8, 8, false, false>(p, stream);
}

}  // namespace rlk::cuda::lm_head
