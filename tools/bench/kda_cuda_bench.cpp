// KDA on an NVIDIA GPU, as users get it: forward, backward, and the backward with its inter-chunk gradients
// kept in memory between two kernels, all in one run; long sequences by segments too.
//
//   kda_cuda_bench
//
// "keep" is forward and backward with chunk_records, where the backward's first kernel is a scan.
// Medians of device events; in brackets each kernel alone: preparation, then the scans, then the gradients
// (one kernel, unfused two) and the sum of d_beta. "segments" has in place of the scans the maps of segments,
// their join, and the scans of all segments; "keep" there is its backward with chunk_records. "bytes" is what
// the kernels behind both scans move per token and head: what the fusion saves. Gates are drawn like log
// sigmoids, K = V = 128, bf16, fp32 gates.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_memory.hpp"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using std::int64_t;

constexpr int64_t kK = 128;
constexpr DLDevice kGpu{kDLCUDA, 0};

// `draw` fills a block that is repeated over the memory; its odd size keeps rows different.
template <class T>
void fill(const Memory& memory, int64_t count, const std::function<T()>& draw) {
  std::vector<T> block(static_cast<std::size_t>(std::min<int64_t>(count, (8 << 20) + 1237)));
  for (T& x : block) x = draw();
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(block.size())) {
    const auto part =
        static_cast<std::size_t>(std::min<int64_t>(static_cast<int64_t>(block.size()), count - at));
    check(cudaMemcpy(static_cast<T*>(memory.data) + at, block.data(), part * sizeof(T),
                     cudaMemcpyHostToDevice));
  }
}

std::uint16_t to_bf16(float f) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &f, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

double median_ms(const std::function<void()>& run) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    check(cudaEventRecord(begin));
    run();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Times {
  double whole = 0;
  std::vector<double> parts;  // of each kernel alone, in launch order
};

// The call is recorded once; a copy of the recording with all kernels but one taken out times that one.
std::vector<double> parts_of(const std::function<void(void*)>& call) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  call(stream);
  check(cudaStreamEndCapture(stream, &graph));
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count));
  std::vector<double> parts;
  for (const cudaGraphNode_t kept : nodes) {
    cudaGraph_t one = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaGraphClone(&one, graph));
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNode_t copy = nullptr;
      if (node == kept) continue;
      check(cudaGraphNodeFindInClone(&copy, node, one));
      check(cudaGraphDestroyNode(copy));
    }
    check(cudaGraphInstantiate(&ready, one, 0));
    parts.push_back(median_ms([&] { check(cudaGraphLaunch(ready, nullptr)); }));
    cudaGraphExecDestroy(ready), cudaGraphDestroy(one);
  }
  cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  return parts;
}

template <class Args>
Times time_of(const Args& args, std::string_view backend,
              rlk::Status (*call)(const Args&, const rlk::Options&)) {
  rlk::Options options{.backend = backend};
  const auto bytes = rlk::workspace(args, options);
  if (!bytes) throw std::runtime_error("no implementation on this machine");
  const Memory workspace(static_cast<int64_t>(*bytes));
  options.workspace = workspace.data;
  options.workspace_bytes = *bytes;
  Times times;
  times.whole = median_ms([&] { rlk::check(call(args, options)); });
  times.parts = parts_of([&](void* stream) {
    options.stream = stream;
    rlk::check(call(args, options));
  });
  return times;
}

std::string text_of(const char* name, const Times& times) {
  std::string text = fmt::format("{} {:.3f} (", name, times.whole);
  for (std::size_t i = 0; i < times.parts.size(); ++i)
    text += fmt::format("{}{:.3f}", i == 0 ? "" : " + ", times.parts[i]);
  return text + ")";
}

void measure(int64_t batch, int64_t tokens, int64_t heads) {
  const int64_t rows = batch * tokens * heads, wide = rows * kK;
  const Memory q(2 * wide), k(2 * wide), v(2 * wide), d_out(2 * wide), out(2 * wide), d_q(2 * wide),
      d_k(2 * wide), d_v(2 * wide), g(4 * wide), d_g(4 * wide), beta(4 * rows), d_beta(4 * rows);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto scaled = [&](float by) {
    return [&random, &normal, by] { return to_bf16(by * normal(random)); };
  };
  const float unit = 1 / std::sqrt(static_cast<float>(kK));
  fill<std::uint16_t>(q, wide, scaled(unit)), fill<std::uint16_t>(k, wide, scaled(unit));
  fill<std::uint16_t>(v, wide, scaled(1)), fill<std::uint16_t>(d_out, wide, scaled(1));
  fill<float>(g, wide, [&] { return -std::log1p(std::exp(-normal(random) - 1)); });
  fill<float>(beta, rows, [&] { return 1 / (1 + std::exp(-normal(random))); });

  const auto view = [&](const Memory& m, DType type) {
    return Tensor(m.data, {batch, tokens, heads, kK}, type, kGpu);
  };
  const auto thin = [&](const Memory& m) { return Tensor(m.data, {batch, tokens, heads}, DType::f32, kGpu); };
  const Tensor tq = view(q, DType::bf16), tk = view(k, DType::bf16), tv = view(v, DType::bf16),
               tg = view(g, DType::f32), tb = thin(beta), to = view(out, DType::bf16),
               td = view(d_out, DType::bf16), dq = view(d_q, DType::bf16), dk = view(d_k, DType::bf16),
               dv = view(d_v, DType::bf16), dg = view(d_g, DType::f32), db = thin(d_beta);
  rlk::KdaFwd forward{.q = tq, .k = tk, .v = tv, .g = tg, .beta = tb, .out = to};
  rlk::KdaBwd backward{.q = tq,
                       .k = tk,
                       .v = tv,
                       .g = tg,
                       .beta = tb,
                       .d_out = td,
                       .d_q = dq,
                       .d_k = dk,
                       .d_v = dv,
                       .d_g = dg,
                       .d_beta = db};
  const Times f = time_of(forward, "cuda.sm90", rlk::kda_fwd),
              b = time_of(backward, "cuda.sm90", rlk::kda_bwd),
              u = time_of(backward, "cuda.sm90_unfused", rlk::kda_bwd);
  // States 2 x 2KK / 64; v_new, dx, do, q, k, v at 2K; g and dg at 4K; dq and dk at 2K. Unfused: three fp32
  // tiles of 64 x K and, for each 64 channels, dP and dM go out and come back, and q, k, g are read again.
  constexpr double kFused = 4.0 * kK * kK / 64 + 12.0 * kK + 8.0 * kK + 4.0 * kK;
  constexpr double kUnfused = kFused + 2 * (12.0 * kK + 512.0 * kK / 64) + 8.0 * kK;
  fmt::print("(B={}, T={}, H={})  ms  {}  {}  {}: {:.3f} more for {:.0f} against {:.0f} bytes\n", batch,
             tokens, heads, text_of("forward", f), text_of("backward", b), text_of("unfused", u),
             u.whole - b.whole, kUnfused, kFused);

  const auto records = rlk::infer(forward, "chunk_records");
  if (!records) throw std::runtime_error(std::string(records.status().message()));
  const int64_t kept = records->shape[0] * records->shape[1] * records->shape[2];
  const Memory memory(kept);
  const Tensor tr(memory.data, records->shape, DType::u8, kGpu);
  forward.chunk_records = tr, backward.chunk_records = tr;
  const Times kf = time_of(forward, "cuda.sm90", rlk::kda_fwd),
              kb = time_of(backward, "cuda.sm90", rlk::kda_bwd);
  fmt::print("  keep  {}  {}: both {:.3f} against {:.3f} for {} bytes a token and head kept\n",
             text_of("forward", kf), text_of("backward", kb), kf.whole + kb.whole, f.whole + b.whole,
             kept / rows);

  if (tokens < 32768) return;
  const Times ks = time_of(backward, "cuda.sm90_seg4096", rlk::kda_bwd);
  forward.chunk_records = {}, backward.chunk_records = {};
  const Times sf = time_of(forward, "cuda.sm90_seg4096", rlk::kda_fwd),
              sb = time_of(backward, "cuda.sm90_seg4096", rlk::kda_bwd);
  fmt::print("  segments  {}  {}  {}\n", text_of("forward", sf), text_of("backward", sb),
             text_of("keep", ks));
}

}  // namespace

int main() {
  try {
    measure(8, 4096, 16);
    measure(1, 8192, 32);
    measure(8, 4096, 32);
    measure(1, 32768, 32);
    measure(1, 131072, 8);
    measure(1, 65536, 4);
    measure(1, 131072, 1);
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
