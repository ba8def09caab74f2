// The lm_head products of bf16 operands on AMD's matrix cores, by v_mfma_f32_16x16x16_bf16. The arithmetic is
// what that instruction does, with the depth in ascending steps of 16, filled up with zeros, from +0:
//
//   cdna2/k4   gfx90a. Subnormal operands count as +0. Per group of 4, ascending: products and sums rounded
//              to fp32, results that are subnormal become zero (of their sign):
//              sum = sum + ((p0 + p1) + (p2 + p3))
//   cdna3/k8   gfx942. Per group of 8, ascending: the products are cut towards zero at 24 fraction bits below
//              their largest exponent and added exactly; the result is cut downwards at 31, the running sum
//              downwards at 24 fraction bits below the larger of their exponents; the sum of the two is
//              rounded to nearest even
//
// These rules are the ones published for the instruction (MMA-Sim, arXiv 2511.10909); nobody has run this
// code on such a GPU yet. Which lane holds what is AMD's documentation; lane l has, for i = 0 .. 3,
//
//   a[l % 16][4 * (l / 16) + i]     b[l % 16][4 * (l / 16) + i]     out[4 * (l / 16) + i][l % 16]
//
// On host fibers the instruction is played by the first rule.
//
// Tiles: 64 columns by 64 rows (16 where there are no more rows than that) for four waves, the depth in steps
// of 32 through shared memory. A wave has one row tile and four column tiles, or one of each.
#pragma once

#include "simt/lm_head/launch.hpp"

namespace rlk::simt::lm_head {

// A lane's share of an operand and of a result.
struct alignas(8) Share {
  bf16 v[4];
};
struct alignas(16) Sums {
  float v[4];
};

#if defined(RLK_FIBER)
inline float mfma_flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
inline float mfma_input(bf16 x) { return (x.bits & 0x7f80u) == 0 ? 0.0f : to_float(x); }

inline void mfma(const Share& a, const Share& b, Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 64;
  Share col[4];
  for (int group = 0; group < 4; ++group) col[group] = __shfl(b, group * 16 + lane % 16, 64);
  for (int i = 0; i < 4; ++i)
    for (int group = 0; group < 4; ++group) {
      const Share row = __shfl(a, group * 16 + lane / 16 * 4 + i, 64);
      float p[4];
      for (int k = 0; k < 4; ++k) p[k] = mfma_flush(mfma_input(row.v[k]) * mfma_input(col[group].v[k]));
      const float four = mfma_flush(mfma_flush(p[0] + p[1]) + mfma_flush(p[2] + p[3]));
      sums.v[i] = mfma_flush(sums.v[i] + four);
    }
}
#else
__device__ __forceinline__ void mfma([[maybe_unused]] const Share& a, [[maybe_unused]] const Share& b,
                                     [[maybe_unused]] Sums& sums) {
#  if defined(__gfx90a__) || defined(__gfx942__)
  typedef short Shorts __attribute__((ext_vector_type(4)));
  typedef float Floats __attribute__((ext_vector_type(4)));
  const Floats out =
      __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts, a), __builtin_bit_cast(Shorts, b),
                                                __builtin_bit_cast(Floats, sums), 0, 0, 0);
  sums = __builtin_bit_cast(Sums, out);
#  else  // never launched: the implementation asks for one of those GPUs
  __builtin_trap();
#  endif
}
#endif

inline constexpr int kMfmaDepth = 32;
inline constexpr int kMfmaLine = kMfmaDepth + 4;  // 8-byte aligned, and rows start on different banks

template <int Tall>
__global__ void __launch_bounds__(kThreads)
    mfma_product(const Product p, std::int64_t tiles, bool a_along_depth, bool b_along_depth) {
  constexpr int kRows = 16 * Tall;
  bf16* a_tile = dynamic_shared<bf16>();
  bf16* b_tile = a_tile + kRows * kMfmaLine;
  const int wave = static_cast<int>(threadIdx.x) / 64, lane = static_cast<int>(threadIdx.x) % 64;
  const int row_tile = Tall == 1 ? 0 : wave, col_tile = Tall == 1 ? wave : 0;
  const std::int64_t tall = (p.rows + kRows - 1) / kRows;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t row0 = tile % tall * kRows, col0 = tile / tall * kSide;
    Sums sums[Tall] = {};
    const Reader<kRows, kMfmaDepth> a_reader(p.a, a_along_depth, row0, p.rows - row0);
    const Reader<kSide, kMfmaDepth> b_reader(p.b, b_along_depth, col0, p.cols - col0);
    const auto element = [](const Operand& from, bool inside, std::int64_t at) {
      return inside ? static_cast<const bf16*>(from.data)[at] : bf16{0};
    };
    for (std::int64_t r0 = 0; r0 < p.depth; r0 += kMfmaDepth) {
      a_reader.each(r0, p.depth, [&](int line, int r, bool inside, std::int64_t at) {
        a_tile[line * kMfmaLine + r] = element(p.a, inside, at);
      });
      b_reader.each(r0, p.depth, [&](int line, int r, bool inside, std::int64_t at) {
        b_tile[line * kMfmaLine + r] = element(p.b, inside, at);
      });
      __syncthreads();
      RLK_UNROLL(2)
      for (int r = 0; r < kMfmaDepth; r += 16) {
        const auto share = [&](const bf16* from, int which) {
          return *reinterpret_cast<const Share*>(from + (which * 16 + lane % 16) * kMfmaLine + r +
                                                 lane / 16 * 4);
        };
        const Share a = share(a_tile, row_tile);
        RLK_UNROLL(4)
        for (int t = 0; t < Tall; ++t) mfma(a, share(b_tile, col_tile + t), sums[t]);
      }
      __syncthreads();
    }
    RLK_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const std::int64_t line = row0 + row_tile * 16 + lane / 16 * 4 + i;
      if (line >= p.rows) break;
      const RowAt row(p, line);
      RLK_UNROLL(4)
      for (int t = 0; t < Tall; ++t) store_sum(p, row, col0 + (col_tile + t) * 16 + lane % 16, sums[t].v[i]);
    }
  }
}

template <int Tall>
hipError_t launch_mfma(const Product& p, hipStream_t stream) {
  const std::int64_t tiles = tiles_of(p, 16 * Tall);
  constexpr std::size_t kShared = sizeof(bf16) * kMfmaLine * (16 * Tall + kSide);
  hipLaunchKernelGGL((mfma_product<Tall>), dim3(blocks_for(tiles)), dim3(kThreads), kShared, stream, p, tiles,
                     p.a.depth.unit(), p.b.depth.unit());
  return hipGetLastError();
}

inline hipError_t launch_mfma(const Product& p, hipStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return hipSuccess;
  return p.rows <= 16 ? launch_mfma<1>(p, stream) : launch_mfma<4>(p, stream);
}

}  // namespace rlk::simt::lm_head
