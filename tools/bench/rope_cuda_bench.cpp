// The rope family on an NVIDIA GPU, as users get it, against a plain copy of the same bytes in the same run:
//
//   rope_cuda_bench
//
// One line per op and shape: the median, what that is in GB/s, and the share of the copy (1: as fast). bf16;
// the bytes of the tables are not counted. Each replay of a graph calls the op once on each of several sets
// of buffers and tables, together far larger than L2, so every call finds its data in memory; candidates take
// turns. Then what a call costs the host: arguments read, implementation resolved, kernel launched.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy_cuda.h"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using std::int64_t;

constexpr DLDevice kGpu{kDLCUDA, 0};
constexpr int64_t kPool = int64_t{4} << 30, kCold = 1200 << 20;  // bytes; a graph touches at least kCold

void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

// Normal bf16 numbers: a block that is repeated, of odd size so that rows differ.
void fill(void* memory, int64_t bytes) {
  std::vector<std::uint16_t> block((8 << 20) + 1237);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::uint16_t& x : block) {
    const float f = normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &f, 4);
    x = static_cast<std::uint16_t>(bits >> 16);
  }
  const auto size = static_cast<int64_t>(block.size() * 2);
  for (int64_t at = 0; at < bytes; at += size)
    check(cudaMemcpy(static_cast<char*>(memory) + at, block.data(),
                     static_cast<std::size_t>(std::min(size, bytes - at)), cudaMemcpyHostToDevice));
}

// A candidate does its work on one set of buffers.
struct Candidate {
  std::string name;
  std::function<void(int64_t set)> call;
};

class Bench {
 public:
  Bench() {
    check(cudaMalloc(&pool_, kPool));
    fill(pool_, kPool);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaEventCreate(&begin_)), check(cudaEventCreate(&end_));
  }

  // q and k rotated in one launch, forward and backward.
  void rotate(rlk::Rope::Layout layout, int64_t b, int64_t h, int64_t s, int64_t d) {
    const bool heads_first = layout == rlk::Rope::Layout::bhsd;
    const int64_t part = b * h * s * d * 2, table = s * (d / 2) * 4, set = 4 * part + 2 * table;
    const auto tensor = [&](int64_t i, int which) {
      return Tensor(at(i * set + which * part), {b, heads_first ? h : s, heads_first ? s : h, d}, DType::bf16,
                    kGpu);
    };
    const auto tables = [&](int64_t i, int which) {
      return Tensor(at(i * set + 4 * part + which * table), {s, d / 2}, DType::f32, kGpu);
    };
    const int64_t sets = sets_of(set, 4 * part);
    for (int64_t i = 0; i < sets; ++i) build_tables(tables(i, 0), tables(i, 1), d, s);
    const auto forward = [&](int64_t i) {
      const Tensor q = tensor(i, 0), k = tensor(i, 1), out = tensor(i, 2), k_out = tensor(i, 3),
                   cos = tables(i, 0), sin = tables(i, 1);
      rlk::check(
          rlk::rope({.x = q, .cos = cos, .sin = sin, .k = k, .out = out, .k_out = k_out, .layout = layout},
                    {.stream = stream_}));
    };
    const auto backward = [&](int64_t i) {
      const Tensor q = tensor(i, 0), k = tensor(i, 1), out = tensor(i, 2), k_out = tensor(i, 3),
                   cos = tables(i, 0), sin = tables(i, 1);
      rlk::check(rlk::rope_bwd({.d_out = q,
                                .cos = cos,
                                .sin = sin,
                                .d_k_out = k,
                                .d_x = out,
                                .d_k = k_out,
                                .layout = static_cast<rlk::RopeBwd::Layout>(layout)},
                               {.stream = stream_}));
    };
    race(fmt::format("({},{},{},{}) {}", b, h, s, d, heads_first ? "bhsd" : "bshd"), sets, set, 4 * part,
         {{"rope", forward}, {"rope_bwd", backward}});
  }

  // Latent attention: s tokens, h heads, `nope` dims that pass and `turn` that turn; sbhd.
  void latent(int64_t s, int64_t h, int64_t nope, int64_t turn) {
    const int64_t row = (nope + turn) * 2, part = s * h * row, table = s * (turn / 2) * 4,
                  set = 2 * (part + table);
    const auto tensor = [&](int64_t i, int which) {
      return Tensor(at(i * set + which * part), {s, 1, h, nope + turn}, DType::bf16, kGpu);
    };
    const auto tables = [&](int64_t i, int which) {
      return Tensor(at(i * set + 2 * part + which * table), {s, turn / 2}, DType::f32, kGpu);
    };
    const int64_t sets = sets_of(set, 2 * part);
    for (int64_t i = 0; i < sets; ++i) build_tables(tables(i, 0), tables(i, 1), turn, s);
    const std::string shape = fmt::format("({},1,{},{}+{}) sbhd", s, h, nope, turn);
    race(shape, sets, set, 2 * part,
         {{"rope_mla_q",
           [&](int64_t i) {
             const Tensor x = tensor(i, 0), out = tensor(i, 1), cos = tables(i, 0), sin = tables(i, 1);
             rlk::check(rlk::rope_mla_q({.x = x, .cos = cos, .sin = sin, .out = out, .rotary_dim = turn},
                                        {.stream = stream_}));
           }},
          {"rope_mla_q_bwd", [&](int64_t i) {
             const Tensor g = tensor(i, 0), d_x = tensor(i, 1), cos = tables(i, 0), sin = tables(i, 1);
             rlk::check(rlk::rope_mla_q_bwd(
                 {.d_out = g, .cos = cos, .sin = sin, .d_x = d_x, .rotary_dim = turn}, {.stream = stream_}));
           }}});
    // In place only the turning dims move: `turn` of every `nope + turn`.
    const int64_t moved = s * h * turn * 2;
    race(shape, sets, set, 2 * moved,
         {{"rope_ in place",
           [&](int64_t i) {
             const Tensor x = tensor(i, 0), cos = tables(i, 0), sin = tables(i, 1);
             rlk::check(rlk::rope_({.x = x,
                                    .cos = cos,
                                    .sin = sin,
                                    .layout = rlk::RopeInPlace::Layout::sbhd,
                                    .pairing = rlk::RopeInPlace::Pairing::adjacent,
                                    .rotary_dim = turn,
                                    .rotary_offset = nope},
                                   {.stream = stream_}));
           }},
          {"copy, same places", [&](int64_t i) {
             char* x = at(i * set) + nope * 2;
             check(copy_rows(x, x, s * h, static_cast<int>(turn * 2), row, stream_));
           }}});
  }

  // The key-value split, with tables as Megatron-LM has them: full width, in the data's type.
  void split(int64_t s, int64_t h, int64_t k_dim, int64_t v_dim, int64_t turn) {
    const int64_t rows = s * h * 2, kv = rows * (k_dim + v_dim), key = rows * (k_dim + turn),
                  value = rows * v_dim, emb = s * turn * 2, table = s * turn * 2,
                  data = kv + key + value + emb, set = data + 2 * table;
    struct Buffers {
      Tensor kv, emb, key, value, cos, sin;
    };
    const auto buffers = [&](int64_t i) {
      char* p = at(i * set);
      const auto next = [&](int64_t bytes) { return std::exchange(p, p + bytes); };
      void *a = next(kv), *b = next(key), *c = next(value), *d = next(emb), *cos = next(table),
           *sin = next(table);
      return Buffers{Tensor(a, {s, 1, h, k_dim + v_dim}, DType::bf16, kGpu),
                     Tensor(d, {s, 1, 1, turn}, DType::bf16, kGpu),
                     Tensor(b, {s, 1, h, k_dim + turn}, DType::bf16, kGpu),
                     Tensor(c, {s, 1, h, v_dim}, DType::bf16, kGpu),
                     Tensor(cos, {s, turn}, DType::bf16, kGpu),
                     Tensor(sin, {s, turn}, DType::bf16, kGpu)};
    };
    const int64_t sets = sets_of(set, data);
    for (int64_t i = 0; i < sets; ++i) build_tables(buffers(i).cos, buffers(i).sin, turn, s, true);
    race(fmt::format("({},1,{},{}+{}+{}) sbhd", s, h, k_dim, v_dim, turn), sets, set, data,
         {{"rope_mla_kv",
           [&](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(rlk::rope_mla_kv({.kv = t.kv,
                                          .k_pos_emb = t.emb,
                                          .cos = t.cos,
                                          .sin = t.sin,
                                          .key = t.key,
                                          .value = t.value,
                                          .k_dim = k_dim},
                                         {.stream = stream_}));
           }},
          {"rope_mla_kv_bwd", [&](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(rlk::rope_mla_kv_bwd({.d_key = t.key,
                                              .d_value = t.value,
                                              .cos = t.cos,
                                              .sin = t.sin,
                                              .d_kv = t.kv,
                                              .d_k_pos_emb = t.emb,
                                              .k_dim = k_dim},
                                             {.stream = stream_}));
           }}});
  }

  // The host's part of a call, on data so small that the device keeps up.
  void host() {
    const Tensor q(at(0), {1, 4, 16, 128}, DType::bf16, kGpu),
        k(at(1 << 20), {1, 4, 16, 128}, DType::bf16, kGpu),
        out(at(2 << 20), {1, 4, 16, 128}, DType::bf16, kGpu),
        k_out(at(3 << 20), {1, 4, 16, 128}, DType::bf16, kGpu), cos(at(4 << 20), {16, 64}, DType::f32, kGpu),
        sin(at(5 << 20), {16, 64}, DType::f32, kGpu);
    const rlk::Rope args{.x = q, .cos = cos, .sin = sin, .k = k, .out = out, .k_out = k_out};
    const rlk::Options options{.stream = stream_};
    std::vector<double> times;
    for (int round = 0; round < 51; ++round) {
      constexpr int kCalls = 200;
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) rlk::check(rlk::rope(args, options));
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
      times.push_back(took.count() / kCalls);
      check(cudaStreamSynchronize(stream_));
    }
    fmt::print("host cost of one call of rope, q and k: {:.2f} us\n", median(times));
  }

 private:
  char* at(int64_t offset) const { return static_cast<char*>(pool_) + offset; }

  static int64_t sets_of(int64_t set, int64_t moved) {
    return std::clamp<int64_t>((kCold + moved - 1) / moved, 3, kPool / set);
  }

  static double median(std::vector<double>& v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }

  void build_tables(const Tensor& cos, const Tensor& sin, int64_t rotary_dim, int64_t rows,
                    bool full = false) {
    rlk::check(rlk::rope_tables({.cos = cos,
                                 .sin = sin,
                                 .rotary_dim = rotary_dim,
                                 .rows = rows,
                                 .width = full ? rlk::RopeTables::Width::full : rlk::RopeTables::Width::half},
                                {.stream = stream_}));
  }

  // `moved` bytes, half of them read and half written, against the faster of two copies.
  void race(const std::string& shape, int64_t sets, int64_t set, int64_t moved,
            std::vector<Candidate> candidates) {
    const std::size_t ours = candidates.size();
    for (int packs : {1, 4}) {
      candidates.push_back({"copy", [=, this](int64_t i) {
                              const int64_t half = moved / 32 * 16;
                              check(copy_packs(at(i * set), at(i * set) + half, half, packs, stream_));
                            }});
    }
    std::vector<cudaGraphExec_t> graphs(candidates.size());
    std::vector<std::vector<double>> times(candidates.size());
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      for (int64_t i = 0; i < sets; ++i) candidates[c].call(i);
      cudaGraph_t graph = nullptr;
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      for (int64_t i = 0; i < sets; ++i) candidates[c].call(i);
      check(cudaStreamEndCapture(stream_, &graph));
      check(cudaGraphInstantiate(&graphs[c], graph, 0));
      check(cudaGraphDestroy(graph));
    }
    for (int round = 0; round < 31; ++round) {
      for (std::size_t c = 0; c < candidates.size(); ++c) {
        check(cudaEventRecord(begin_, stream_));
        check(cudaGraphLaunch(graphs[c], stream_));
        check(cudaEventRecord(end_, stream_));
        check(cudaEventSynchronize(end_));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_, end_));
        times[c].push_back(1e3 * static_cast<double>(ms) / static_cast<double>(sets));
      }
    }
    for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
    const double copy = std::min(median(times[ours]), median(times[ours + 1]));
    const auto line = [&](const std::string& name, double us) {
      fmt::print("{:<18} {:<24} {:8.2f} us {:6.0f} GB/s  {:.3f}\n", name, shape, us,
                 static_cast<double>(moved) / us / 1e3, copy / us);
    };
    for (std::size_t c = 0; c < ours; ++c) line(candidates[c].name, median(times[c]));
    line("copy", copy);
    std::fflush(stdout);
  }

  void* pool_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

int main() try {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    fmt::print("[skip] no CUDA device\n");
    return 0;
  }
  Bench bench;
  for (auto layout : {rlk::Rope::Layout::bhsd, rlk::Rope::Layout::bshd}) {
    for (int64_t tokens : {2048, 4096, 8192}) bench.rotate(layout, 1, 32, tokens, 128);
    bench.rotate(layout, 8, 32, 4096, 128);
  }
  bench.latent(4096, 32, 128, 64);
  bench.split(4096, 32, 128, 128, 64);
  bench.host();
  return 0;
} catch (const std::exception& e) {
  fmt::print(stderr, "rope_cuda_bench: {}\n", e.what());
  return 1;
}
