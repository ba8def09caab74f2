// lm_head on an NVIDIA GPU, as users get it, against the fastest of the first 8 algorithms cuBLASLt offers
// for the same product with 64 MB of workspace (split-K allowed), in the same run:
//
//   lm_head_cuda_bench [forward] [small] [backward] [golden] [M ...]
//
// All four and the sizes of the op's page where none is named.
//
// One line per size: the medians, their ratio (above 1: we are faster), what that is in TFLOP/s and TB/s, and
// whether any bit of the first rows differs from the same rows of the largest batch; cuda.sm90, and beside it
// cuda.sm90_r4 where sums are long and outputs few. A GPU at its power limit slows everything that runs after
// something hungry: candidates take turns in random order, four calls each, behind the same 10 ms of
// full load. Products of a few microseconds are timed as replays of a graph of 40, or the time would be that
// of launching them.
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cuda/lm_head/cublaslt.hpp"
#include "cuda_memory.hpp"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using std::int64_t;

constexpr int64_t kV = 151936, kK = 4096, kMaxRows = 8192;
constexpr std::size_t kLibraryBytes = 64 << 20, kSpaceBytes = 128 << 20;
constexpr DLDevice kGpu{kDLCUDA, 0};

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

void fill_f64(const Memory& memory, int64_t count, unsigned seed) {
  std::vector<double> block((4 << 20) + 1237);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 0.5);
  for (double& x : block) x = normal(random);
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(block.size()))
    check(cudaMemcpy(static_cast<double*>(memory.data) + at, block.data(),
                     std::min(block.size(), static_cast<std::size_t>(count - at)) * 8,
                     cudaMemcpyHostToDevice));
}

// The library's fp64 product of the same shape as the logits; it is column-major, so the weight is its first
// operand.
class Dgemm {
 public:
  Dgemm(void* weight, void* hidden, void* out, int64_t m) : weight_(weight), hidden_(hidden), out_(out) {
    const rlk::cuda::lm_head::CublasLt& lt = rlk::cuda::lm_head::cublaslt();
    if (!lt.reason.empty()) throw std::runtime_error(lt.reason);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    ok(lt.create(&handle_));
    ok(lt.desc_create(&desc_, CUBLAS_COMPUTE_64F, CUDA_R_64F));
    ok(lt.desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    ok(lt.layout_create(&a_, CUDA_R_64F, kK, kV, kK));
    ok(lt.layout_create(&b_, CUDA_R_64F, kK, static_cast<std::uint64_t>(m), kK));
    ok(lt.layout_create(&c_, CUDA_R_64F, kV, static_cast<std::uint64_t>(m), kV));
  }
  ~Dgemm() {
    const rlk::cuda::lm_head::CublasLt& lt = rlk::cuda::lm_head::cublaslt();
    for (cublasLtMatrixLayout_t layout : {a_, b_, c_}) lt.layout_destroy(layout);
    lt.desc_destroy(desc_);
  }
  Dgemm(const Dgemm&) = delete;
  Dgemm& operator=(const Dgemm&) = delete;

  std::vector<cublasLtMatmulAlgo_t> algorithms() const {
    const rlk::cuda::lm_head::CublasLt& lt = rlk::cuda::lm_head::cublaslt();
    cublasLtMatmulPreference_t preference = nullptr;
    ok(lt.preference_create(&preference));
    ok(lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kLibraryBytes,
                         sizeof kLibraryBytes));
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    ok(lt.heuristic(handle_, desc_, a_, b_, c_, c_, preference, 8, found, &count));
    lt.preference_destroy(preference);
    std::vector<cublasLtMatmulAlgo_t> all;
    for (int i = 0; i < count; ++i) all.push_back(found[i].algo);
    return all;
  }
  void run(const cublasLtMatmulAlgo_t& algorithm, void* workspace, cudaStream_t stream) const {
    const double one = 1, zero = 0;
    ok(rlk::cuda::lm_head::cublaslt().matmul(handle_, desc_, &one, weight_, a_, hidden_, b_, &zero, out_, c_,
                                             out_, c_, &algorithm, workspace, kLibraryBytes, stream));
  }

 private:
  static void ok(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS)
      throw std::runtime_error(fmt::format("cuBLASLt status {}", static_cast<int>(status)));
  }
  void *weight_, *hidden_, *out_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
};

struct Bench {
  Memory big{kV * kK * 2}, rows{kMaxRows * kV * 2}, narrow{kMaxRows * kK * 2}, out{kMaxRows * kV * 2},
      library{kLibraryBytes}, space{kSpaceBytes}, other{kV * kK * 2};
  Memory load_a{2048 * kK * 2}, load_b{8192 * kK * 2}, load_c{2048 * 8192 * 2};
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::map<std::string, std::vector<std::uint8_t>> references;

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

  // `count` runs in one graph.
  cudaGraphExec_t recorded(const std::function<void()>& run, int count) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamSynchronize(stream));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) run();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    check(cudaGraphDestroy(graph));
    return executable;
  }

  // Medians of the candidates, in ms.
  std::vector<double> race(std::vector<std::function<void()>> candidates, double estimate_ms) {
    const bool tiny = estimate_ms < 0.1;
    const int repeats = tiny ? 40 : 4, heats = tiny ? 0 : 50;
    std::vector<std::vector<double>> times(candidates.size());
    std::vector<std::size_t> order(candidates.size());
    std::vector<cudaGraphExec_t> graphs;
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = i, candidates[i]();
      if (tiny) graphs.push_back(recorded(candidates[i], repeats));
    }
    std::mt19937 random(7);
    for (int round = 0; round < 7; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      for (std::size_t i : order) {
        for (int h = 0; h < heats; ++h) heat();
        check(cudaEventRecord(begin, stream));
        if (tiny)
          check(cudaGraphLaunch(graphs[i], stream));
        else
          for (int r = 0; r < repeats; ++r) candidates[i]();
        check(cudaEventRecord(end, stream));
        check(cudaEventSynchronize(end));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end));
        times[i].push_back(ms / static_cast<float>(repeats));
      }
    }
    for (cudaGraphExec_t g : graphs) cudaGraphExecDestroy(g);
    std::vector<double> medians;
    for (auto& t : times) {
      std::sort(t.begin(), t.end());
      medians.push_back(t[t.size() / 2]);
    }
    return medians;
  }

  struct Ours {
    std::string name;
    std::function<void()> run;
  };

  // Ours against the library on the same product. With `same_rows`, the first rows must equal those of the
  // first size asked.
  void compare(const char* what, const rlk::cuda::lm_head::Gemm& g, const std::vector<Ours>& ours,
               bool same_rows) {
    const rlk::cuda::lm_head::LtProduct product(g);
    std::vector<std::function<void()>> candidates;
    for (const Ours& o : ours) candidates.push_back(o.run);
    for (const rlk::cuda::lm_head::LtCandidate& c : product.candidates(false, kLibraryBytes, 8))
      candidates.push_back([&, c] { product.run(g, c, library.data, stream); });
    const double flops = 2.0 * static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
    const double bytes = 2.0 * static_cast<double>(g.m * g.k + g.n * g.k + g.m * g.n);
    const auto medians = race(candidates, 1e3 * std::max(flops / 7e14, bytes / 4.2e12));
    const double best =
        *std::min_element(medians.begin() + static_cast<std::ptrdiff_t>(ours.size()), medians.end());
    fmt::print("{:<9} M={:<6} N={:<6} K={:<6} library {:8.4f} ms", what, g.m, g.n, g.k, best);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      fmt::print("  {} {:8.4f} ms {:.3f}x {:4.0f} TFLOP/s {:.2f} TB/s", ours[i].name, medians[i],
                 best / medians[i], flops / medians[i] / 1e9, bytes / medians[i] / 1e9);
      if (!same_rows) continue;
      ours[i].run();
      check(cudaStreamSynchronize(stream));
      std::vector<std::uint8_t> now(static_cast<std::size_t>(std::min<int64_t>(g.m, 64) * g.n * 2));
      check(cudaMemcpy(now.data(), g.c, now.size(), cudaMemcpyDeviceToHost));
      std::vector<std::uint8_t>& reference = references[ours[i].name];
      if (reference.empty()) reference = now;
      fmt::print(" {}", std::memcmp(now.data(), reference.data(), std::min(now.size(), reference.size())) == 0
                            ? "same bits"
                            : "OTHER BITS");
    }
    fmt::print("\n");
    std::fflush(stdout);
  }

  rlk::Options options(const char* backend) const {
    return {.stream = stream, .backend = backend, .workspace = space.data, .workspace_bytes = kSpaceBytes};
  }

  void forward(const char* what, int64_t n, const std::vector<int64_t>& sizes, bool ranges) {
    references.clear();
    for (int64_t m : sizes) {
      const Tensor hidden(narrow.data, {m, kK}, DType::bf16, kGpu),
          weight(big.data, {n, kK}, DType::bf16, kGpu), logits(out.data, {m, n}, DType::bf16, kGpu);
      const rlk::LmHead args{.hidden = hidden, .weight = weight, .out = logits};
      rlk::cuda::lm_head::Gemm g;
      g.a = {narrow.data, kK, true}, g.b = {big.data, kK, true}, g.c = out.data, g.ldc = n, g.m = m, g.n = n,
      g.k = kK;
      std::vector<Ours> ours{{"sm90", [&] { rlk::check(rlk::lm_head(args, options("cuda.sm90"))); }}};
      if (ranges) ours.push_back({"r4", [&] { rlk::check(rlk::lm_head(args, options("cuda.sm90_r4"))); }});
      compare(what, g, ours, true);
    }
  }

  void backward(const std::vector<int64_t>& sizes) {
    references.clear();
    for (int64_t m : sizes) {
      const Tensor d_out(rows.data, {m, kV}, DType::bf16, kGpu),
          hidden(narrow.data, {m, kK}, DType::bf16, kGpu), weight(big.data, {kV, kK}, DType::bf16, kGpu),
          d_hidden(out.data, {m, kK}, DType::bf16, kGpu), d_weight(other.data, {kV, kK}, DType::bf16, kGpu);
      const rlk::LmHeadBwd first{.d_out = d_out, .hidden = hidden, .weight = weight, .d_hidden = d_hidden};
      const rlk::LmHeadBwd second{.d_out = d_out, .hidden = hidden, .weight = weight, .d_weight = d_weight};
      rlk::cuda::lm_head::Gemm g;
      g.a = {rows.data, kV, true}, g.b = {big.data, kK, false}, g.c = out.data, g.ldc = kK, g.m = m, g.n = kK,
      g.k = kV;
      compare("d_hidden", g,
              {{"sm90", [&] { rlk::check(rlk::lm_head_bwd(first, options("cuda.sm90"))); }},
               {"r4", [&] { rlk::check(rlk::lm_head_bwd(first, options("cuda.sm90_r4"))); }}},
              true);
      g.a = {rows.data, kV, false}, g.b = {narrow.data, kK, false}, g.c = other.data, g.ldc = kK, g.m = kV,
      g.n = kK, g.k = m;
      compare("d_weight", g, {{"sm90", [&] { rlk::check(rlk::lm_head_bwd(second, options("cuda.sm90"))); }}},
              false);
    }
  }

  // fma64 beside the library's DGEMM on copies of the operands in fp64, which ours never makes; then
  // fma32/kb1024.
  void golden(const std::vector<int64_t>& sizes) {
    const int64_t most = *std::max_element(sizes.begin(), sizes.end());
    const Memory wide(kV * kK * 8), wide_out(most * kV * 8), wide_rows(most * kK * 8);
    fill_f64(wide, kV * kK, 8), fill_f64(wide_rows, most * kK, 9);
    for (int64_t m : sizes) {
      const Dgemm dgemm(wide.data, wide_rows.data, wide_out.data, m);
      std::vector<std::function<void()>> candidates{[&] { logits_f32(m, "fma64"); },
                                                    [&] { logits_f32(m, "fma32/kb1024"); }};
      for (const cublasLtMatmulAlgo_t& a : dgemm.algorithms())
        candidates.push_back([&, a] { dgemm.run(a, library.data, stream); });
      const auto medians = race(candidates, 10);
      const double best = *std::min_element(medians.begin() + 2, medians.end());
      const double flops = 2e-9 * static_cast<double>(m * kV * kK);
      fmt::print(
          "golden    M={:<5} fma64 {:8.3f} ms {:5.1f} TFLOP/s  DGEMM {:8.3f} ms {:5.1f} TFLOP/s  {:.2f}x  "
          "fma32/kb1024 {:8.3f} ms {:5.1f} TFLOP/s\n",
          m, medians[0], flops / medians[0], best, flops / best, best / medians[0], medians[1],
          flops / medians[1]);
      std::fflush(stdout);
    }
  }

  void golden_backward(const std::vector<int64_t>& sizes) {
    for (int64_t m : sizes) {
      const Tensor d_out(rows.data, {m, kV}, DType::bf16, kGpu),
          hidden(narrow.data, {m, kK}, DType::bf16, kGpu), weight(big.data, {kV, kK}, DType::bf16, kGpu),
          d_hidden(out.data, {m, kK}, DType::f32, kGpu), d_weight(other.data, {kV, kK}, DType::bf16, kGpu);
      const rlk::LmHeadBwd first{.d_out = d_out, .hidden = hidden, .weight = weight, .d_hidden = d_hidden};
      const rlk::LmHeadBwd second{.d_out = d_out, .hidden = hidden, .weight = weight, .d_weight = d_weight};
      const auto medians = race({[&] { rlk::check(rlk::lm_head_bwd(first, options("cuda.golden"))); },
                                 [&] { rlk::check(rlk::lm_head_bwd(second, options("cuda.golden"))); }},
                                10);
      const double flops = 2e-9 * static_cast<double>(m * kV * kK);
      fmt::print(
          "golden    M={:<5} d_hidden {:8.3f} ms {:5.1f} TFLOP/s  d_weight {:8.3f} ms {:5.1f} TFLOP/s\n", m,
          medians[0], flops / medians[0], medians[1], flops / medians[1]);
      std::fflush(stdout);
    }
  }

  void logits_f32(int64_t m, const char* arithmetic) {
    const Tensor hidden(narrow.data, {m, kK}, DType::bf16, kGpu),
        weight(big.data, {kV, kK}, DType::bf16, kGpu),
        logits(rows.data, {m, kV}, DType::f32, kGpu);  // the memory of the backward's rows, twice as wide
    rlk::check(rlk::lm_head({.hidden = hidden, .weight = weight, .out = logits},
                            {.stream = stream, .arithmetic = arithmetic}));
  }
};

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> known{"forward", "small", "backward", "golden"};
  std::vector<std::string> parts;
  std::vector<int64_t> only;
  for (const std::string a : std::vector<const char*>(argv + 1, argv + argc)) {
    int64_t m = 0;
    const auto read = std::from_chars(a.data(), a.data() + a.size(), m);
    if (std::find(known.begin(), known.end(), a) != known.end())
      parts.push_back(a);
    else if (read.ec == std::errc() && read.ptr == a.data() + a.size() && m >= 1 && m <= kMaxRows)
      only.push_back(m);
    else
      throw std::runtime_error(fmt::format("'{}' is neither a part ({}) nor a number of rows (1 to {})", a,
                                           fmt::join(known, ", "), kMaxRows));
  }
  auto asked = [&](const char* part) {
    return parts.empty() || std::find(parts.begin(), parts.end(), part) != parts.end();
  };
  auto of = [&](std::vector<int64_t> all) { return only.empty() ? all : only; };
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    fmt::print("[skip] no CUDA device\n");
    return 0;
  }
  Bench bench;
  const std::vector<int64_t> sizes = of({8192, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096});
  if (asked("forward")) bench.forward("forward", kV, sizes, false);
  if (asked("small"))
    for (int64_t n : {4096, 1024}) bench.forward("small", n, of({8192, 1, 4, 16, 32, 64, 128}), true);
  if (asked("backward")) bench.backward(sizes);
  if (asked("golden"))
    bench.golden(of({1, 8, 16, 32, 64, 128, 256, 512})), bench.golden_backward(of({16, 64, 512}));
  return 0;
} catch (const std::exception& e) {
  fmt::print(stderr, "lm_head_cuda_bench: {}\n", e.what());
  return 1;
}
