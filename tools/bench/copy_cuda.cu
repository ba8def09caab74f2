#include "copy_cuda.h"

namespace {

constexpr int kThreads = 256;

template <int Packs>
__global__ void __launch_bounds__(kThreads) packs_kernel(const uint4* from, uint4* to, std::int64_t count) {
  const std::int64_t first = std::int64_t{blockIdx.x} * (kThreads * Packs) + threadIdx.x;
  uint4 v[Packs];
#pragma unroll
  for (int i = 0; i < Packs; ++i)
    if (first + i * kThreads < count) v[i] = from[first + i * kThreads];
#pragma unroll
  for (int i = 0; i < Packs; ++i)
    if (first + i * kThreads < count) to[first + i * kThreads] = v[i];
}

template <int Rows>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const uint4* from, uint4* to, std::int64_t rows, int stride) {
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y * Rows + threadIdx.y;
  uint4 v[Rows];
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    const std::int64_t row = first + i * blockDim.y;
    if (row < rows) v[i] = from[row * stride + threadIdx.x];
  }
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    const std::int64_t row = first + i * blockDim.y;
    if (row < rows) to[row * stride + threadIdx.x] = v[i];
  }
}

}  // namespace

cudaError_t copy_packs(const void* from, void* to, std::int64_t bytes, int packs, cudaStream_t stream) {
  const std::int64_t count = bytes / 16, block = std::int64_t{kThreads} * packs;
  const auto blocks = static_cast<unsigned>((count + block - 1) / block);
  (packs == 1 ? packs_kernel<1> : packs_kernel<4>)<<<blocks, kThreads, 0, stream>>>(
      static_cast<const uint4*>(from), static_cast<uint4*>(to), count);
  return cudaGetLastError();
}

cudaError_t copy_rows(const void* from, void* to, std::int64_t rows, int row_bytes, std::int64_t stride,
                      int rows_each, cudaStream_t stream) {
  const auto lanes = static_cast<unsigned>(row_bytes / 16), height = kThreads / lanes,
             block = height * static_cast<unsigned>(rows_each);
  const auto blocks = static_cast<unsigned>((rows + block - 1) / block);
  (rows_each == 1 ? rows_kernel<1> : rows_kernel<4>)<<<blocks, dim3(lanes, height), 0, stream>>>(
      static_cast<const uint4*>(from), static_cast<uint4*>(to), rows, static_cast<int>(stride / 16));
  return cudaGetLastError();
}
