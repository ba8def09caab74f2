// lm_head on an NVIDIA GPU, as users get it, against the fastest of the first 8 algorithms cuBLASLt offers
// for the same product with 64 MB of workspace (split-K allowed), in the same run:
//
//   lm_head_cuda_bench [forward] [small] [backward] [golden]        all four without arguments
//
// One line per size: both medians, their ratio (above 1: we are faster), what that is in TFLOP/s and TB/s,
// and whether any bit of the first rows differs from the same rows of the largest batch. A GPU at its power
// limit slows everything that runs after something hungry: candidates take turns in random order, each behind
// the same 10 ms of full load.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/lm_head_cublaslt.h"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using std::int64_t;

constexpr int64_t kV = 151936, kK = 4096, kMaxRows = 8192;
constexpr std::size_t kLibraryBytes = 64 << 20;
constexpr DLDevice kGpu{kDLCUDA, 0};

void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

struct Memory {
  void* data = nullptr;
  explicit Memory(std::size_t bytes) { check(cudaMalloc(&data, bytes)); }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

// Normal bf16 numbers, a block of them repeated: rows differ, and the block is larger than any cache line of
// interest.
void fill(const Memory& memory, std::size_t bytes, unsigned seed) {
  std::vector<std::uint16_t> block((32 << 20) + 8 * 1237);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.5f);
  for (std::uint16_t& x : block) {
    const float f = normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &f, 4);
    x = static_cast<std::uint16_t>(bits >> 16);
  }
  for (std::size_t at = 0; at < bytes; at += block.size() * 2)
    check(cudaMemcpy(static_cast<char*>(memory.data) + at, block.data(),
                     std::min(block.size() * 2, bytes - at), cudaMemcpyHostToDevice));
}

struct Bench {
  Memory big{kV * kK * 2}, rows{kMaxRows * kV * 2}, narrow{kMaxRows * kK * 2}, out{kMaxRows * kV * 2},
      library{kLibraryBytes}, other{kV * kK * 2};
  Memory load_a{2048 * kK * 2}, load_b{8192 * kK * 2}, load_c{2048 * 8192 * 2};
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::vector<std::uint8_t> reference;

  Bench() {
    fill(big, kV * kK * 2, 1), fill(rows, kMaxRows * kV * 2, 2), fill(narrow, kMaxRows * kK * 2, 3);
    fill(load_a, 2048 * kK * 2, 4), fill(load_b, 8192 * kK * 2, 5);
    check(cudaStreamCreate(&stream));
    check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  }

  void heat() {
    rlk::check(rlk::lm_head({.hidden = Tensor(load_a.data, {2048, kK}, DType::bf16, kGpu),
                             .weight = Tensor(load_b.data, {8192, kK}, DType::bf16, kGpu),
                             .out = Tensor(load_c.data, {2048, 8192}, DType::bf16, kGpu)},
                            {.stream = stream}));
  }

  // Medians of the candidates, in ms.
  std::vector<double> race(const std::vector<std::function<void()>>& candidates, double estimate_ms) {
    const int repeats = estimate_ms > 2 ? 1 : estimate_ms > 0.1 ? 4 : 40, heats = estimate_ms > 0.1 ? 50 : 0;
    std::vector<std::vector<double>> times(candidates.size());
    std::vector<std::size_t> order(candidates.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i, candidates[i]();
    std::mt19937 random(7);
    for (int round = 0; round < 7; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      for (std::size_t i : order) {
        for (int h = 0; h < heats; ++h) heat();
        check(cudaEventRecord(begin, stream));
        for (int r = 0; r < repeats; ++r) candidates[i]();
        check(cudaEventRecord(end, stream));
        check(cudaEventSynchronize(end));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end));
        times[i].push_back(ms / static_cast<float>(repeats));
      }
    }
    std::vector<double> medians;
    for (auto& t : times) {
      std::sort(t.begin(), t.end());
      medians.push_back(t[t.size() / 2]);
    }
    return medians;
  }

  // `ours` against the library on the same product. With `same_rows`, the first rows must equal those of the
  // first size asked.
  void compare(const char* what, const rlk::cuda::Gemm& g, const std::function<void()>& ours,
               bool same_rows) {
    const rlk::cuda::LtProduct product(g);
    std::vector<std::function<void()>> candidates{ours};
    for (const rlk::cuda::LtCandidate& c : product.candidates(false, kLibraryBytes, 8))
      candidates.push_back([&, c] { product.run(g, c, library.data, stream); });
    const double flops = 2.0 * static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
    const double bytes = 2.0 * static_cast<double>(g.m * g.k + g.n * g.k + g.m * g.n);
    const auto medians = race(candidates, 1e3 * std::max(flops / 7e14, bytes / 4.2e12));
    const double best = *std::min_element(medians.begin() + 1, medians.end());
    fmt::print(
        "{:<9} M={:<5} N={:<6} K={:<6}  ours {:8.4f} ms  library {:8.4f} ms  {:.3f}x  {:4.0f} TFLOP/s  "
        "{:.2f} TB/s",
        what, g.m, g.n, g.k, medians[0], best, best / medians[0], flops / medians[0] / 1e9,
        bytes / medians[0] / 1e9);
    if (same_rows) {
      ours();
      check(cudaStreamSynchronize(stream));
      std::vector<std::uint8_t> now(static_cast<std::size_t>(std::min<int64_t>(g.m, 64) * g.n * 2));
      check(cudaMemcpy(now.data(), g.c, now.size(), cudaMemcpyDeviceToHost));
      if (reference.empty()) reference = now;
      fmt::print("  {}",
                 std::memcmp(now.data(), reference.data(), std::min(now.size(), reference.size())) == 0
                     ? "same bits"
                     : "OTHER BITS");
    }
    fmt::print("\n");
    std::fflush(stdout);
  }

  void forward(const char* what, int64_t n, const std::vector<int64_t>& sizes) {
    reference.clear();
    for (int64_t m : sizes) {
      const Tensor hidden(narrow.data, {m, kK}, DType::bf16, kGpu),
          weight(big.data, {n, kK}, DType::bf16, kGpu), logits(out.data, {m, n}, DType::bf16, kGpu);
      const rlk::LmHead args{.hidden = hidden, .weight = weight, .out = logits};
      rlk::cuda::Gemm g;
      g.a = {narrow.data, kK, true}, g.b = {big.data, kK, true}, g.c = out.data, g.ldc = n, g.m = m, g.n = n,
      g.k = kK;
      compare(
          what, g,
          [&] {
            rlk::check(
                rlk::lm_head(args, {.stream = stream, .workspace = library.data, .workspace_bytes = 64}));
          },
          true);
    }
  }

  void backward(const std::vector<int64_t>& sizes) {
    reference.clear();
    for (int64_t m : sizes) {
      const Tensor d_out(rows.data, {m, kV}, DType::bf16, kGpu),
          hidden(narrow.data, {m, kK}, DType::bf16, kGpu), weight(big.data, {kV, kK}, DType::bf16, kGpu),
          d_hidden(out.data, {m, kK}, DType::bf16, kGpu), d_weight(other.data, {kV, kK}, DType::bf16, kGpu);
      const rlk::Options options{.stream = stream, .workspace = library.data, .workspace_bytes = 64};
      const rlk::LmHeadBwd first{.d_out = d_out, .hidden = hidden, .weight = weight, .d_hidden = d_hidden};
      const rlk::LmHeadBwd second{.d_out = d_out, .hidden = hidden, .weight = weight, .d_weight = d_weight};
      rlk::cuda::Gemm g;
      g.a = {rows.data, kV, true}, g.b = {big.data, kK, false}, g.c = out.data, g.ldc = kK, g.m = m, g.n = kK,
      g.k = kV;
      compare("d_hidden", g, [&] { rlk::check(rlk::lm_head_bwd(first, options)); }, true);
      g.a = {rows.data, kV, false}, g.b = {narrow.data, kK, false}, g.c = other.data, g.ldc = kK, g.m = kV,
      g.n = kK, g.k = m;
      compare("d_weight", g, [&] { rlk::check(rlk::lm_head_bwd(second, options)); }, false);
    }
  }

  void golden(const std::vector<int64_t>& sizes) {
    for (const char* arithmetic : {"fma64", "fma32/kb1024"})
      for (int64_t m : sizes) {
        const Tensor hidden(narrow.data, {m, kK}, DType::bf16, kGpu),
            weight(big.data, {kV, kK}, DType::bf16, kGpu),
            logits(rows.data, {m, kV}, DType::f32, kGpu);  // the memory of the backward's rows, twice as wide
        const rlk::LmHead args{.hidden = hidden, .weight = weight, .out = logits};
        const double ms = race(
            {[&] { rlk::check(rlk::lm_head(args, {.stream = stream, .arithmetic = arithmetic})); }}, 10)[0];
        fmt::print("{:<12} M={:<5} N={} K={}  {:8.3f} ms  {:.1f} TFLOP/s\n", arithmetic, m, kV, kK, ms,
                   2e-9 * static_cast<double>(m * kV * kK) / ms);
        std::fflush(stdout);
      }
  }
};

}  // namespace

int main(int argc, char** argv) try {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    fmt::print("[skip] no CUDA device\n");
    return 0;
  }
  auto asked = [&](const char* part) {
    return argc == 1 ||
           std::any_of(argv + 1, argv + argc, [&](const char* a) { return std::strcmp(a, part) == 0; });
  };
  Bench bench;
  const std::vector<int64_t> sizes{8192, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  if (asked("forward")) bench.forward("forward", kV, sizes);
  if (asked("small"))
    for (int64_t n : {4096, 1024}) bench.forward("small", n, {8192, 1, 4, 16, 32, 64, 128});
  if (asked("backward")) bench.backward(sizes);
  if (asked("golden")) bench.golden({1, 16, 64, 512});
  return 0;
} catch (const std::exception& e) {
  fmt::print(stderr, "lm_head_cuda_bench: {}\n", e.what());
  return 1;
}
