// linear's Hopper kernels against the fastest of the first 8 algorithms cuBLASLt offers for the same product with 64 MB of
// workspace (split-K allowed), in the same run:
//
//   linear_cuda_bench [--json FILE] [--seconds S] [--cuts] [--form forward|d_x|d_weight] [MxNxK ...]
//
// The sizes of the op's page where none is named; no size is begun after S seconds. One line per size: medians of 9 rounds,
// in which the candidates take turns, each as a graph of several calls behind a warm one; the ratio (above 1: ours is
// faster), TFLOP/s, and the weight's bytes per second. Weights rotate, so that none is still in L2 from the call before.
// --cuts times every cut, not only the one that is chosen, and names the fastest. --form: d_x's weight is [K, N], the sum
// of d_weight is over K tokens.
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/linear/tree.h"
#include "cuda/lm_head/cublaslt.hpp"
#include "cuda_memory.hpp"
#include "registry/linear/geometry.hpp"
#include "rlk/half.hpp"
#include "simt/linear/bind.hpp"

namespace {

using rlk::Float;
using rlk::cuda::linear::Cut;
using rlk::cuda::linear::Product;
using std::int64_t;

constexpr std::size_t kLibraryBytes = 64 << 20;
constexpr int64_t kWeightBytes = 256 << 20;  // five times L2

// Normal bf16 numbers, a block of them repeated.
void fill(const Memory& memory, int64_t bytes, unsigned seed) {
  std::vector<std::uint16_t> block((4 << 20) + 8 * 1237);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::uint16_t& x : block) x = rlk::float_to_bf16(normal(random));
  const auto size = static_cast<int64_t>(block.size() * 2);
  for (int64_t at = 0; at < bytes; at += size)
    check(cudaMemcpy(static_cast<char*>(memory.data) + at, block.data(),
                     static_cast<std::size_t>(std::min(size, bytes - at)), cudaMemcpyHostToDevice));
}

enum class Form { forward, d_x, d_weight };
struct Size {
  int64_t m, n, k;
  double flops() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  }
};
std::vector<Size> page_sizes() {
  std::vector<Size> all;
  for (const int64_t n : {1024, 4096, 12288, 24576})
    for (const int64_t m : {1, 16, 64, 128, 256}) all.push_back({m, n, 4096});
  for (const Size s :
       {Size{16, 3072, 1024}, Size{64, 1024, 3072}, Size{16, 2560, 9728}, Size{64, 2304, 9216},
        Size{512, 1024, 4096}, Size{512, 4096, 4096}, Size{2048, 4096, 4096}, Size{4096, 4096, 4096},
        Size{8192, 4096, 4096}, Size{4096, 24576, 4096}, Size{4096, 4096, 12288}, Size{8192, 2048, 2048},
        Size{4096, 6144, 1024},
        // No whole tiles, no whole stages.
        Size{777, 5000, 4096}, Size{777, 5000, 3000}, Size{512, 2880, 2880}, Size{4096, 2880, 2880},
        Size{4096, 9216, 2304}, Size{16, 5120, 2880}, Size{64, 9216, 2304}, Size{300, 1000, 1000},
        Size{8192, 2048, 768}, Size{4096, 4096, 11008}, Size{64, 4096, 11008}})
    all.push_back(s);
  return all;
}

bool form_of(std::string_view name, Form& form) {
  constexpr std::string_view kNames[] = {"forward", "d_x", "d_weight"};
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found != std::end(kNames)) form = static_cast<Form>(found - std::begin(kNames));
  return found != std::end(kNames);
}

std::string name_of(const Cut& c) {
  return fmt::format("{}x{}{}{}", c.rows, c.columns, c.split > 1 ? fmt::format("/{}", c.split) : "",
                     c.pair ? "p" : "");
}

struct Candidate {
  std::string name;
  std::function<void(int)> run;  // on the weight of that number
  double us = 0;
};

class Bench {
 public:
  Bench() {
    check(cudaStreamCreate(&stream_));
    check(cudaEventCreate(&begin_)), check(cudaEventCreate(&end_));
    check(rlk::cuda::linear::read_card(&card_, 0));
    fill(weights_, kWeightBytes, 1), fill(x_, kRows, 2);
  }

  // A line of JSON.
  std::string race(const Size& s, Form form, bool cuts) {
    const int64_t bytes = s.n * s.k * 2;
    if (bytes > kWeightBytes || s.m * s.k * 2 > kRows || s.m * s.n * 2 > kRows)
      throw std::runtime_error(fmt::format("{}x{}x{} does not fit", s.m, s.n, s.k));
    const int copies = static_cast<int>(kWeightBytes / bytes);
    std::vector<Product> products;
    std::vector<rlk::cuda::lm_head::Gemm> gemms;
    for (int i = 0; i < copies; ++i) {
      Product p;
      const bool tokens = form == Form::d_weight, forward = form == Form::forward;
      p.a = {x_.data, tokens ? s.m : s.k, !tokens, Float::bf16};
      p.b = {static_cast<char*>(weights_.data) + i * bytes, forward ? s.k : s.n, forward, Float::bf16};
      p.c = y_.data, p.ldc = s.n, p.m = s.m, p.n = s.n, p.k = s.k, p.width = rlk::leaves::width(s.k);
      if (tokens) {
        p.width = rlk::simt::linear::kTokens;
        p.leaves = static_cast<int>((s.k + p.width - 1) / p.width);
      }
      products.push_back(p);
      rlk::cuda::lm_head::Gemm g;
      g.a = p.a, g.b = p.b, g.c = p.c, g.ldc = p.ldc, g.m = s.m, g.n = s.n, g.k = s.k;
      gemms.push_back(g);
    }
    std::vector<Candidate> all;
    const auto add = [&](const Cut& cut) {
      all.push_back({name_of(cut), [this, &products, cut](int i) {
                       check(launch_tree(products[static_cast<std::size_t>(i) % products.size()], cut,
                                         card_.multiprocessors, stream_));
                     }});
    };
    add(cut_for(products[0], card_));
    if (cuts) {
      for (const Cut& cut : rlk::cuda::linear::kFewCuts)
        if (form == Form::forward && s.m <= cut.rows) add(cut);
      for (const Cut& cut : rlk::cuda::linear::kCuts)
        if ((cut.rows == 64 ? s.m <= 128 : s.m > 64) && (cut.columns != 96 || form == Form::forward))
          add(cut);
    }
    const std::size_t ours = all.size();
    const rlk::cuda::lm_head::LtProduct library(gemms[0]);
    for (const auto& algorithm : library.candidates(false, kLibraryBytes, 8))
      all.push_back({"library", [&, algorithm](int i) {
                       library.run(gemms[static_cast<std::size_t>(i) % gemms.size()], algorithm, space_.data,
                                   stream_);
                     }});
    time(all, s.flops() > 3e10 ? 3 : 12);
    const auto faster = [](const Candidate& a, const Candidate& b) { return a.us < b.us; };
    const auto split = all.begin() + static_cast<std::ptrdiff_t>(ours);
    const Candidate &best = *std::min_element(all.begin(), split, faster),
                    &theirs = *std::min_element(split, all.end(), faster), &chosen = all[0];
    fmt::print(
        "M={:<5} N={:<5} K={:<5} library {:8.2f} us  {:<9} {:8.2f} us {:.3f}x {:4.0f} TFLOP/s {:.2f} TB/s",
        s.m, s.n, s.k, theirs.us, chosen.name, chosen.us, theirs.us / chosen.us, s.flops() / chosen.us / 1e6,
        static_cast<double>(bytes) / chosen.us / 1e6);
    if (cuts) fmt::print("  best {:<9} {:.3f}x", best.name, theirs.us / best.us);
    fmt::print("\n");
    std::fflush(stdout);
    std::string others;
    for (std::size_t i = 1; i < ours; ++i)
      others += fmt::format(R"({}"{}": {:.3f})", i > 1 ? ", " : "", all[i].name, all[i].us);
    return fmt::format(
        R"({{"m": {}, "n": {}, "k": {}, "cut": "{}", "us": {:.3f}, "library_us": {:.3f}, "cuts": {{{}}}}})",
        s.m, s.n, s.k, chosen.name, chosen.us, theirs.us, others);
  }

 private:
  static constexpr int64_t kRows = 256 << 20;
  Memory weights_{kWeightBytes}, x_{kRows}, y_{kRows}, space_{kLibraryBytes};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  rlk::cuda::linear::Card card_;

  cudaGraphExec_t recorded(const Candidate& c, int count) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    c.run(0);
    check(cudaStreamSynchronize(stream_));
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) c.run(i);
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    check(cudaGraphDestroy(graph));
    return executable;
  }

  // Medians of 9 rounds of `count` calls.
  void time(std::vector<Candidate>& all, int count) {
    std::vector<cudaGraphExec_t> graphs;
    graphs.reserve(all.size());
    for (const Candidate& c : all) graphs.push_back(recorded(c, count));
    std::vector<std::vector<double>> times(all.size());
    for (int round = 0; round < 9; ++round)
      for (std::size_t i = 0; i < all.size(); ++i) {
        check(cudaGraphLaunch(graphs[i], stream_));
        check(cudaEventRecord(begin_, stream_));
        check(cudaGraphLaunch(graphs[i], stream_));
        check(cudaEventRecord(end_, stream_));
        check(cudaEventSynchronize(end_));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_, end_));
        times[i].push_back(1e3 * static_cast<double>(ms) / count);
      }
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::sort(times[i].begin(), times[i].end());
      all[i].us = times[i][times[i].size() / 2];
      cudaGraphExecDestroy(graphs[i]);
    }
  }
};

}  // namespace

int main(int argc, char** argv) try {
  std::string json;
  double seconds = 1e9;
  bool cuts = false;
  Form form = Form::forward;
  std::vector<Size> sizes;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    Size s{};
    if (a == "--json" && i + 1 < argc)
      json = argv[++i];
    else if (a == "--seconds" && i + 1 < argc)
      seconds = std::atof(argv[++i]);
    else if (a == "--cuts")
      cuts = true;
    else if (a == "--form" && i + 1 < argc && form_of(argv[i + 1], form))
      ++i;
    else if (std::sscanf(a.c_str(), "%ldx%ldx%ld", &s.m, &s.n, &s.k) == 3)
      sizes.push_back(s);
    else
      throw std::runtime_error(
          fmt::format("'{}' is neither a size MxNxK nor --json FILE, --seconds S, --cuts, --form", a));
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    fmt::print("[skip] no CUDA device\n");
    return 0;
  }
  if (sizes.empty()) sizes = page_sizes();
  Bench bench;
  std::vector<std::string> lines;
  const auto begin = std::chrono::steady_clock::now();
  for (const Size& s : sizes) {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds) break;
    lines.push_back(bench.race(s, form, cuts));
  }
  if (json.empty()) return 0;
  std::FILE* const file = std::fopen(json.c_str(), "w");
  if (!file) throw std::runtime_error("cannot write " + json);
  fmt::print(file, "[{}]\n", fmt::join(lines, ",\n "));
  return std::fclose(file) == 0 ? 0 : 1;
} catch (const std::exception& e) {
  fmt::print(stderr, "linear_cuda_bench: {}\n", e.what());
  return 1;
}
