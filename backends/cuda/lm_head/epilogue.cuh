// The epilogue, how a warpgroup's accumulators leave: a thread holds, of each 8 columns, two neighbours in rows
// `lane / 4` and `lane / 4 + 8` of its warp's 16.
#pragma once

#include "cuda/hopper/mma.cuh"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {

inline constexpr int kLineBytes = 16 * 128;  // one warp's 16 rows on their way out; two of them, used in turn

// One line of 16 bytes on its way out where it cannot leave whole: the bias, an unaligned output, the last
// columns.
template <class Out>
__device__ __noinline__ void store_elements(const Gemm& g, const Out* line, std::int64_t row,
                                            std::int64_t column) {
  for (int e = 0; e < 16 / static_cast<int>(sizeof(Out)) && column + e < g.n; ++e) {
    Out y = line[e];
    if (g.bias) y = round_to<Out>(__fadd_rn(to_float(y), load_element(g.bias, g.b.type, column + e)));
    static_cast<Out*>(g.c)[row * g.ldc + column + e] = y;
  }
}

// Puts a warp's 16 rows of 128 bytes into a buffer, swizzled as TMA stores them; `acc` are its sums of these columns.
template <class Out>
__device__ __forceinline__ void put_lines(unsigned char* buffer, const float* acc) {
  constexpr int kBlocks = 16 / static_cast<int>(sizeof(Out));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (sizeof(Out) == 2) {
    const int row = lane % 16;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      std::uint32_t packed[4];
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const float* pair = acc + (block + half / 2) * 4 + half % 2 * 2;
        packed[half] = round_pair<Out>(pair[0], pair[1]);
      }
      stmatrix(shared_address(buffer) + row * 128 + ((block + lane / 16) ^ row % 8) * 16, packed);
    }
  } else {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8, at = block * 2 + lane % 4 / 2;
        const float* pair = acc + block * 4 + half * 2;
        *reinterpret_cast<float2*>(buffer + row * 128 + (at ^ row % 8) * 16 + lane % 2 * 8) =
            make_float2(round_to<float>(pair[0]), round_to<float>(pair[1]));
      }
  }
}

// Writes one warp's 16 rows x BN columns: through its own corner of shared memory, so that every store is 16
// bytes and a quarter warp covers a line of 128. Bulk tensor stores were no faster; what counts is that this
// stays a few hundred instructions: it runs once per tile, cold in the instruction cache, while the tensor
// cores wait. Everything that is not the plain case happens out of line, after the rounding and from shared
// memory.
template <class Out, int BN>
__device__ __forceinline__ void store_lines(const Gemm& g, bool whole_lines, const float (&acc)[BN / 2],
                                            unsigned char* staging, std::int64_t row0, std::int64_t column0) {
  constexpr int kColumns = 128 / static_cast<int>(sizeof(Out)),
                kPerStore = 16 / static_cast<int>(sizeof(Out));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row0 >= g.m) return;
  const bool plain = whole_lines && row0 + 16 <= g.m && column0 + BN <= g.n;
  const int line_row = lane / 8, piece = lane % 8;
  Out* to = static_cast<Out*>(g.c) + (row0 + line_row) * g.ldc + column0 + piece * kPerStore;
#pragma unroll
  for (int chunk = 0; chunk < BN / kColumns; ++chunk) {
    unsigned char* buffer = staging + chunk % 2 * kLineBytes;
    put_lines<Out>(buffer, acc + chunk * kColumns / 2);
    __syncwarp();
    if (plain) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i * 4 + line_row;
        __stcs(reinterpret_cast<int4*>(to + i * 4 * g.ldc + chunk * kColumns),
               *reinterpret_cast<const int4*>(buffer + row * 128 + (piece ^ row % 8) * 16));
      }
    } else {
#pragma unroll 1
      for (int row = line_row; row < 16 && row0 + row < g.m; row += 4)
        store_elements(g, reinterpret_cast<const Out*>(buffer + row * 128 + (piece ^ row % 8) * 16),
                       row0 + row, column0 + chunk * kColumns + piece * kPerStore);
    }
  }
}

// The sums of one thread for `Floats / 4` blocks of eight columns: pairs of neighbours leave together where
// the output's alignment allows.
template <int Floats>
__device__ void store_sums(const Gemm& g, bool whole_lines, const float (&sums)[Floats], std::int64_t row0,
                           std::int64_t column0) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < Floats; i += 2) {
    const std::int64_t row = row0 + lane / 4 + i % 4 / 2 * 8, column = column0 + i / 4 * 8 + lane % 4 * 2;
    if (row >= g.m) continue;
    if (!whole_lines || column + 1 >= g.n) {
      store_product(g, row, column, sums[i]), store_product(g, row, column + 1, sums[i + 1]);
      continue;
    }
    const std::int64_t at = (row * g.ldc + column) / 2;
    if (g.out == Float::f32)
      static_cast<float2*>(g.c)[at] = make_float2(round_to<float>(sums[i]), round_to<float>(sums[i + 1]));
    else
      static_cast<std::uint32_t*>(g.c)[at] = g.out == Float::f16
                                                 ? round_pair<__half>(sums[i], sums[i + 1])
                                                 : round_pair<__nv_bfloat16>(sums[i], sums[i + 1]);
  }
}

template <int BN>
__device__ void store_direct(const Gemm& g, const float (&acc)[BN / 2], std::int64_t row0,
                             std::int64_t column0) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row0 >= g.m) return;
#pragma unroll
  for (int i = 0; i < BN / 2; ++i)
    store_product(g, row0 + lane / 4 + i % 4 / 2 * 8, column0 + i / 4 * 8 + lane % 4 * 2 + i % 2, acc[i]);
}

}  // namespace rlk::cuda::lm_head
