// What the tests of CUDA kernels share: whether there is a Hopper GPU, and bytes on it.
#pragma once

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "rlk/float.hpp"
#include "rlk/half.hpp"

namespace cuda_test {

inline void check(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorString(e)); }

inline bool hopper() {
  int count = 0, major = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0)
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (major == 9) return true;
  std::puts("[skip] no Hopper GPU");
  return false;
}

// Bytes on the device.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes));
    data_ = {data, [](void* p) { cudaFree(p); }};
    clear();
  }
  Memory(std::size_t count, rlk::Float type, unsigned seed) : Memory(count * 2) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> host(count);
    for (std::uint16_t& x : host)
      x = type == rlk::Float::f16 ? rlk::float_to_f16(normal(random)) : rlk::float_to_bf16(normal(random));
    check(cudaMemcpy(data_.get(), host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  // NaN in every type.
  void clear() const { check(cudaMemset(data_.get(), 0xff, bytes_)); }
  void* data() const { return data_.get(); }
  std::vector<std::uint8_t> host() const {
    std::vector<std::uint8_t> all(bytes_);
    check(cudaMemcpy(all.data(), data_.get(), bytes_, cudaMemcpyDeviceToHost));
    return all;
  }

 private:
  std::size_t bytes_;
  std::shared_ptr<void> data_;
};

}  // namespace cuda_test
