// What GPU benchmarks share: errors as exceptions, and memory that is freed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

inline void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

struct Memory {
  void* data = nullptr;
  // An empty tensor has memory too.
  explicit Memory(std::int64_t bytes) { check(cudaMalloc(&data, static_cast<std::size_t>(bytes) + 16)); }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};
