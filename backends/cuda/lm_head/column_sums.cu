// The two small companions of the lm_head products: column sums (d_bias) and the bias addition after the
// library's GEMM. Both are bound by memory: column sums read each element once (neighbouring threads,
// neighbouring columns), the bias addition reads and writes each output once.
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

// One thread owns a column and walks the rows in order: the order of the sum is the order of the rows,
// whatever the grid.
template <class T, class Out, bool Golden>
__global__ void column_sums(const T* x, std::int64_t ld, std::int64_t m, std::int64_t n, Out* out) {
  const std::int64_t column = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (column >= n) return;
  x += column;
  if constexpr (Golden) {
    double sum = 0;
#pragma unroll 8
    for (std::int64_t row = 0; row < m; ++row)
      sum = __dadd_rn(sum, static_cast<double>(to_float(x[row * ld])));
    out[column] = round_to<Out>(sum);
  } else {
    float total =
        m ? -0.0f : 0.0f;  // the start that leaves the first block's sum as it is; an empty sum is +0
    for (std::int64_t row0 = 0; row0 < m; row0 += 1024) {
      const std::int64_t end = m < row0 + 1024 ? m : row0 + 1024;
      float chain = 0;
#pragma unroll 16
      for (std::int64_t row = row0; row < end; ++row) chain = __fadd_rn(chain, to_float(x[row * ld]));
      total = __fadd_rn(total, chain);
    }
    out[column] = round_to<Out>(total);
  }
}

template <class Out>
__global__ void bias_add(Out* c, std::int64_t ldc, const void* bias, Float bias_dtype, std::int64_t n) {
  const std::int64_t column = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (column >= n) return;
  Out* at = c + blockIdx.y * ldc + column;
  *at = round_to<Out>(__fadd_rn(to_float(*at), load_element(bias, bias_dtype, column)));
}

}  // namespace

cudaError_t launch_column_sums(const void* x, Float in, std::int64_t ld, std::int64_t m, std::int64_t n,
                               void* out, Float out_dtype, bool golden, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return with_float_type(in, [&](auto in_type) {
    return with_float_type(out_dtype, [&](auto out_type) {
      using T = decltype(in_type);
      using Out = decltype(out_type);
      const auto blocks = static_cast<unsigned>((n + 127) / 128);
      auto kernel = golden ? column_sums<T, Out, true> : column_sums<T, Out, false>;
      kernel<<<blocks, 128, 0, stream>>>(static_cast<const T*>(x), ld, m, n, static_cast<Out*>(out));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_bias_add(void* c, std::int64_t ldc, Float out, const void* bias, Float bias_dtype,
                            std::int64_t m, std::int64_t n, cudaStream_t stream) {
  return with_float_type(out, [&](auto type) {
    using Out = decltype(type);
    constexpr std::int64_t kMaxRows = 65535;  // grid.y
    for (std::int64_t row = 0; row < m; row += kMaxRows) {
      const dim3 grid(static_cast<unsigned>((n + 255) / 256),
                      static_cast<unsigned>(m - row < kMaxRows ? m - row : kMaxRows));
      bias_add<Out><<<grid, 256, 0, stream>>>(static_cast<Out*>(c) + row * ldc, ldc, bias, bias_dtype, n);
    }
    return cudaGetLastError();
  });
}

}  // namespace rlk::cuda::lm_head
