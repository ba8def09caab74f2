// attention on the GPU by cuda.sm90_s<S>: prefill and decoding, 32 query heads on 8 of 128 channels, bf16. One line of JSON for
// every shape and split: the median in microseconds, TFLOP/s of visible keys, GB/s of the cache. attention_torch.py
// times PyTorch's kernels on the same shapes.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

constexpr std::int64_t kHeads = 32, kKvHeads = 8, kWidth = 128;
constexpr DLDevice kGpu{kDLCUDA, 0};

void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

struct Memory {
  void* data = nullptr;
  explicit Memory(std::int64_t bytes) { check(cudaMalloc(&data, static_cast<std::size_t>(bytes) + 16)); }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

// Normal numbers in bf16, a pool of them again and again at changing offsets.
void fill(const Memory& to, std::int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(1 << 20);
  for (auto& x : pool) x = rlk::float_to_bf16(normal(random));
  const auto size = static_cast<std::int64_t>(pool.size());
  for (std::int64_t at = 0; at < count; at += size / 2) {
    const auto offset = static_cast<std::int64_t>(random() % (pool.size() / 2));
    const std::int64_t n = std::min(count - at, size / 2);
    check(cudaMemcpy(static_cast<std::uint16_t*>(to.data) + at, pool.data() + offset,
                     static_cast<std::size_t>(2 * n), cudaMemcpyHostToDevice));
  }
}

template <class Run>
double median_us(Run run) {
  constexpr int kRounds = 15, kCalls = 4;
  cudaEvent_t start, end;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRounds + 3; ++i) {
    check(cudaEventRecord(start, nullptr));
    for (int j = 0; j < kCalls; ++j) run();
    check(cudaEventRecord(end, nullptr));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, end));
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2] * 1000.0 / kCalls;
}

void measure(std::int64_t batch, std::int64_t queries, std::int64_t keys, std::int64_t split) {
  const std::int64_t rows = batch * queries * kHeads, cache = batch * keys * kKvHeads * kWidth;
  const Memory q(2 * rows * kWidth), k(2 * cache), v(2 * cache), out(2 * rows * kWidth), lse(4 * rows);
  fill(q, rows * kWidth), fill(k, cache), fill(v, cache);
  const Tensor tq(q.data, {batch, queries, kHeads, kWidth}, DType::bf16, kGpu),
      tk(k.data, {batch, keys, kKvHeads, kWidth}, DType::bf16, kGpu),
      tv(v.data, {batch, keys, kKvHeads, kWidth}, DType::bf16, kGpu),
      to(out.data, {batch, queries, kHeads, kWidth}, DType::bf16, kGpu),
      tl(lse.data, {batch, queries, kHeads}, DType::f32, kGpu);
  const rlk::Attention call{.q = tq, .k = tk, .v = tv, .out = to, .lse = tl, .split = split};
  const std::string id = split == 0 ? "cuda.sm90_snone" : fmt::format("cuda.sm90_s{}", split);
  rlk::Options options{.backend = id};
  const auto bytes = rlk::workspace(call, options);
  if (!bytes) throw std::runtime_error(std::string(bytes.status().message()));
  const Memory workspace(static_cast<std::int64_t>(*bytes));
  options.workspace = workspace.data, options.workspace_bytes = *bytes;
  const double us = median_us([&] { rlk::check(rlk::attention(call, options)); });
  const double seen = static_cast<double>(queries) * static_cast<double>(2 * keys - queries + 1) / 2;
  fmt::print(
      "{{\"implementation\": \"{}\", \"batch\": {}, \"queries\": {}, \"keys\": {}, \"us\": {:.2f}, "
      "\"tflops\": {:.1f}, \"cache_gbs\": {:.0f}}}\n",
      id, batch, queries, keys, us, 4e-6 * kWidth * static_cast<double>(batch * kHeads) * seen / us,
      4e-3 * static_cast<double>(cache) / us);
}

}  // namespace

int main() {
  try {
    for (std::int64_t split : {1024, 0}) {
      measure(1, 8192, 8192, split);
      measure(4, 4096, 4096, split);
    }
    for (std::int64_t batch : {1, 16})
      for (std::int64_t keys : {2048, 16384, 65536})
        for (std::int64_t split : {512, 1024, 4096}) measure(batch, 1, keys, split);
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
