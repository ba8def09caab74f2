// Launchers of the lm_head products on CUDA, over raw pointers: what the op layer (ops.cpp) calls and
// what the kernels (*.cu) implement. Every launcher computes C(m,n) = sum over k of A(m,k) * B(n,k),
// so the forward and both backward products are one shape of call that differ only in which index is
// contiguous:
//   logits   = hidden  * weight^T    A k-contiguous,  B k-contiguous
//   d_hidden = d_out   * weight      A k-contiguous,  B row-contiguous   (k runs over V)
//   d_weight = d_out^T * hidden      A row-contiguous, B row-contiguous  (k runs over M)
// No launcher allocates, synchronises or reads the environment: all are safe under stream capture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "rlk/float.hpp"

namespace rlk::cuda::lm_head {

// One operand: element (row, k) lives at data[row * ld + k] when k_contiguous, else at data[k * ld + row].
struct Operand {
  const void* data = nullptr;
  std::int64_t ld = 0;
  bool k_contiguous = true;
  Float type = Float::bf16;
};

struct Gemm {
  Operand a, b;
  void* c = nullptr;
  std::int64_t ldc = 0;
  const void* bias =
      nullptr;  // [n] of b's type, or null; added after the rounding to `out`, rounded again to `out`
  std::int64_t m = 0, n = 0, k = 0;
  Float out = Float::bf16;  // fp32, or the type of b
};

// Whether every row of the operand starts on a 16-byte boundary: what TMA, cp.async and cuBLASLt's
// tensor-core family need.
inline bool aligned16(const Operand& o) {
  const auto line = static_cast<std::uintptr_t>(o.ld * static_cast<std::int64_t>(bytes_of(o.type)));
  return (reinterpret_cast<std::uintptr_t>(o.data) | line) % 16 == 0;
}

// arithmetic fma64; a may be fp32 beside a 16-bit b. Hopper FP64 tensor cores where compute capability
// is 9.0, double FMA elsewhere: the same bits.
cudaError_t launch_fma64(const Gemm&, int compute_capability, cudaStream_t);
cudaError_t launch_fma64_sm90(const Gemm&, cudaStream_t);
// Up to 32 rows, both operands k-contiguous and of one dtype, Hopper.
cudaError_t launch_fma64_few(const Gemm&, cudaStream_t);
// Any number of rows, layout and dtypes, Hopper. Tiles of 128x128; 64x192, for both operands k-contiguous;
// 64x32, for a alone k-contiguous.
enum class Fma64Tile : std::uint8_t { square, few, narrow };
cudaError_t launch_fma64_tiles(const Gemm&, Fma64Tile, cudaStream_t);

// arithmetic fma32/kb1024; a may be fp32 beside a 16-bit b. CUDA cores, compute capability 8.0 and up.
cudaError_t launch_fma32(const Gemm&, cudaStream_t);

// Arithmetic sm90/t25k16/r4 cuts k into this many ranges, each of range_of(k) but the last ones, which may be
// shorter or empty. A range's sum is a chain of sm90/t25k16 from +0; the sums are added in order, in fp32 to
// nearest.
inline constexpr int kRangesOfK = 4;
inline constexpr std::int64_t range_of(std::int64_t k) {
  return (k + 64 * kRangesOfK - 1) / (64 * kRangesOfK) * 64;
}

// arithmetic sm90/t25k16 through mma.sync: any alignment, any strides. Both inputs bf16 or both fp16, Hopper.
cudaError_t launch_mma(const Gemm&, cudaStream_t);
// Likewise in arithmetic sm90/t25k16/r4; a must be k-contiguous.
cudaError_t launch_mma_ranges(const Gemm&, cudaStream_t);

// out[n] = sum over m of x[m * ld + n]: fp32 ascending inside blocks of 1024 rows, block sums added in order
// (or one ascending fp64 chain, rounded once, when `golden`).
cudaError_t launch_column_sums(const void* x, Float in, std::int64_t ld, std::int64_t m, std::int64_t n,
                               void* out, Float out_dtype, bool golden, cudaStream_t);

// c[m,n] = round(c + bias): the second rounding of the bias rule, for products whose kernel has no epilogue
// of ours.
cudaError_t launch_bias_add(void* c, std::int64_t ldc, Float out, const void* bias, Float bias_dtype,
                            std::int64_t m, std::int64_t n, cudaStream_t);

}  // namespace rlk::cuda::lm_head
