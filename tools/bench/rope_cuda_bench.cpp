// The rope family on an NVIDIA GPU, as users get it, against a plain copy of the same bytes in the same run:
//
//   rope_cuda_bench
//
// One line per op and shape: the median, what that is in GB/s, and the share of the copy (1: as fast). bf16;
// the bytes of the tables are not counted. The copy is the fastest of two kernels and cudaMemcpyAsync. A
// graph calls the op on several sets of data and more sets of tables, each together far larger than L2, so
// every call finds both in memory; candidates take turns. Then what a call costs the host: arguments read,
// implementation resolved, kernel launched.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "copy_cuda.h"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using std::int64_t;

constexpr DLDevice kGpu{kDLCUDA, 0};
constexpr int64_t kPool = int64_t{4} << 30;                         // bytes
constexpr int64_t kColdData = 1200 << 20, kColdTables = 160 << 20;  // a graph touches at least as much

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
    const int64_t part = b * h * s * d * 2;
    const Sets sets = sets_of(4 * part, s * (d / 2) * 4);
    build_tables(sets, {s, d / 2}, DType::f32, d);
    struct Buffers {
      Tensor q, k, out, k_out, cos, sin;
    };
    const auto buffers = [=, this](int64_t i) {
      const auto tensor = [&](int which) {
        return Tensor(data(sets, i) + which * part, {b, heads_first ? h : s, heads_first ? s : h, d},
                      DType::bf16, kGpu);
      };
      const auto table = [&](int which) { return table_of(sets, i, which, {s, d / 2}, DType::f32); };
      return Buffers{tensor(0), tensor(1), tensor(2), tensor(3), table(0), table(1)};
    };
    race(fmt::format("({},{},{},{}) {}", b, h, s, d, heads_first ? "bhsd" : "bshd"), sets, 4 * part,
         {{"rope",
           [=, this](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(rlk::rope({.x = t.q,
                                   .cos = t.cos,
                                   .sin = t.sin,
                                   .k = t.k,
                                   .out = t.out,
                                   .k_out = t.k_out,
                                   .layout = layout},
                                  {.stream = stream_}));
           }},
          {"rope_bwd", [=, this](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(rlk::rope_bwd({.d_out = t.q,
                                       .cos = t.cos,
                                       .sin = t.sin,
                                       .d_k_out = t.k,
                                       .d_x = t.out,
                                       .d_k = t.k_out,
                                       .layout = static_cast<rlk::RopeBwd::Layout>(layout)},
                                      {.stream = stream_}));
           }}});
  }

  // Latent attention: s tokens, h heads, `nope` dims that pass and `turn` that turn; sbhd.
  void latent(int64_t s, int64_t h, int64_t nope, int64_t turn) {
    const int64_t row = (nope + turn) * 2, part = s * h * row;
    const Sets sets = sets_of(2 * part, s * (turn / 2) * 4);
    build_tables(sets, {s, turn / 2}, DType::f32, turn);
    struct Buffers {
      Tensor x, out, cos, sin;
    };
    const auto buffers = [=, this](int64_t i) {
      const auto tensor = [&](int which) {
        return Tensor(data(sets, i) + which * part, {s, 1, h, nope + turn}, DType::bf16, kGpu);
      };
      const auto table = [&](int which) { return table_of(sets, i, which, {s, turn / 2}, DType::f32); };
      return Buffers{tensor(0), tensor(1), table(0), table(1)};
    };
    const std::string shape = fmt::format("({},1,{},{}+{}) sbhd", s, h, nope, turn);
    race(shape, sets, 2 * part,
         {{"rope_mla_q",
           [=, this](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(
                 rlk::rope_mla_q({.x = t.x, .cos = t.cos, .sin = t.sin, .out = t.out, .rotary_dim = turn},
                                 {.stream = stream_}));
           }},
          {"rope_mla_q_bwd", [=, this](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(rlk::rope_mla_q_bwd(
                 {.d_out = t.x, .cos = t.cos, .sin = t.sin, .d_x = t.out, .rotary_dim = turn},
                 {.stream = stream_}));
           }}});
    // In place only the turning dims move, `turn` of every `nope + turn`. The line of "copy, same places" is
    // the better of one and four rows to a thread that are read and written back.
    const int64_t moved = s * h * turn * 2;
    const auto rewrite = [=, this](int rows) {
      return [=, this](int64_t i) {
        char* x = data(sets, i) + nope * 2;
        check(copy_rows(x, x, s * h, static_cast<int>(turn * 2), row, rows, stream_));
      };
    };
    race(shape, sets, 2 * moved,
         {{"rope_ in place",
           [=, this](int64_t i) {
             const Buffers t = buffers(i);
             rlk::check(rlk::rope_({.x = t.x,
                                    .cos = t.cos,
                                    .sin = t.sin,
                                    .layout = rlk::RopeInPlace::Layout::sbhd,
                                    .pairing = rlk::RopeInPlace::Pairing::adjacent,
                                    .rotary_dim = turn,
                                    .rotary_offset = nope},
                                   {.stream = stream_}));
           }},
          {"copy, same places", rewrite(1)},
          {"copy, same places", rewrite(4)}});
  }

  // The key-value split, with tables as Megatron-LM has them: full width, in the data's type.
  void split(int64_t s, int64_t h, int64_t k_dim, int64_t v_dim, int64_t turn) {
    const int64_t rows = s * h * 2, kv = rows * (k_dim + v_dim), key = rows * (k_dim + turn),
                  value = rows * v_dim, emb = s * turn * 2, moved = kv + key + value + emb;
    const Sets sets = sets_of(moved, s * turn * 2);
    build_tables(sets, {s, turn}, DType::bf16, turn);
    struct Buffers {
      Tensor kv, key, value, emb, cos, sin;
    };
    const auto buffers = [=, this](int64_t i) {
      char* p = data(sets, i);
      const auto tensor = [&](int64_t bytes, int64_t heads, int64_t dim) {
        return Tensor(std::exchange(p, p + bytes), {s, 1, heads, dim}, DType::bf16, kGpu);
      };
      const auto table = [&](int which) { return table_of(sets, i, which, {s, turn}, DType::bf16); };
      return Buffers{tensor(kv, h, k_dim + v_dim),
                     tensor(key, h, k_dim + turn),
                     tensor(value, h, v_dim),
                     tensor(emb, 1, turn),
                     table(0),
                     table(1)};
    };
    race(fmt::format("({},1,{},{}+{}+{}) sbhd", s, h, k_dim, v_dim, turn), sets, moved,
         {{"rope_mla_kv",
           [=, this](int64_t i) {
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
          {"rope_mla_kv_bwd", [=, this](int64_t i) {
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

  // The host's part of a call, on data so small that the device keeps up, and what of it is the launch.
  void host() {
    const Tensor q(at(0), {1, 4, 16, 128}, DType::bf16, kGpu),
        k(at(1 << 20), {1, 4, 16, 128}, DType::bf16, kGpu),
        out(at(2 << 20), {1, 4, 16, 128}, DType::bf16, kGpu),
        k_out(at(3 << 20), {1, 4, 16, 128}, DType::bf16, kGpu), cos(at(4 << 20), {16, 64}, DType::f32, kGpu),
        sin(at(5 << 20), {16, 64}, DType::f32, kGpu);
    const rlk::Rope args{.x = q, .cos = cos, .sin = sin, .k = k, .out = out, .k_out = k_out};
    const rlk::Options options{.stream = stream_};
    const auto cost = [&](const auto& call) {
      std::vector<double> times;
      for (int round = 0; round < 51; ++round) {
        constexpr int kCalls = 200;
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kCalls; ++i) call();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        times.push_back(took.count() / kCalls);
        check(cudaStreamSynchronize(stream_));
      }
      return median(times);
    };
    const double whole = cost([&] { rlk::check(rlk::rope(args, options)); }),
                 launch = cost([&] { check(copy_packs(at(0), at(1 << 20), 4096, 1, stream_)); });
    fmt::print("host cost of one call of rope, q and k: {:.2f} us, of a kernel launch alone: {:.2f} us\n",
               whole, launch);
  }

 private:
  char* at(int64_t offset) const { return static_cast<char*>(pool_) + offset; }

  // Sets of data, and behind them sets of cos and sin; call i uses set i modulo the number of each.
  struct Sets {
    int64_t set_bytes, sets, table_bytes, tables;
    int64_t calls() const { return std::max(sets, tables); }
  };
  static Sets sets_of(int64_t set_bytes, int64_t table_bytes) {
    const auto over = [](int64_t n, int64_t by) { return (n + by - 1) / by; };
    const int64_t tables = over(kColdTables, 2 * table_bytes), room = kPool - tables * 2 * table_bytes;
    return {set_bytes, std::clamp<int64_t>(over(kColdData, set_bytes), 3, room / set_bytes), table_bytes,
            tables};
  }
  char* data(const Sets& s, int64_t i) const { return at(i % s.sets * s.set_bytes); }
  Tensor table_of(const Sets& s, int64_t i, int which, std::initializer_list<int64_t> shape,
                  DType type) const {
    return Tensor(at(s.sets * s.set_bytes + (i % s.tables * 2 + which) * s.table_bytes), shape, type, kGpu);
  }

  static double median(std::vector<double>& v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }

  void build_tables(const Sets& s, std::initializer_list<int64_t> shape, DType type, int64_t rotary_dim) {
    const int64_t rows = *shape.begin(), width = *(shape.end() - 1);
    for (int64_t i = 0; i < s.tables; ++i) {
      const Tensor cos = table_of(s, i, 0, shape, type), sin = table_of(s, i, 1, shape, type);
      rlk::check(rlk::rope_tables(
          {.cos = cos,
           .sin = sin,
           .rotary_dim = rotary_dim,
           .rows = rows,
           .width = width == rotary_dim ? rlk::RopeTables::Width::full : rlk::RopeTables::Width::half},
          {.stream = stream_}));
    }
  }

  // `moved` bytes, half of them read and half written, against the fastest copy. Candidates of one name share
  // a line, the better one's.
  void race(const std::string& shape, const Sets& sets, int64_t moved, std::vector<Candidate> candidates) {
    const int64_t half = moved / 32 * 16, calls = sets.calls();
    const auto to = [=, this](int64_t i) { return data(sets, i) + half; };
    for (int packs : {1, 4}) {
      candidates.push_back(
          {"copy", [=, this](int64_t i) { check(copy_packs(data(sets, i), to(i), half, packs, stream_)); }});
    }
    candidates.push_back({"copy", [=, this](int64_t i) {
                            check(cudaMemcpyAsync(to(i), data(sets, i), static_cast<std::size_t>(half),
                                                  cudaMemcpyDeviceToDevice, stream_));
                          }});
    std::vector<cudaGraphExec_t> graphs(candidates.size());
    std::vector<std::vector<double>> times(candidates.size());
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      candidates[c].call(0);  // what is loaded at first use
      cudaGraph_t graph = nullptr;
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      for (int64_t i = 0; i < calls; ++i) candidates[c].call(i);
      check(cudaStreamEndCapture(stream_, &graph));
      check(cudaGraphInstantiate(&graphs[c], graph, 0));
      check(cudaGraphDestroy(graph));
      check(cudaGraphLaunch(graphs[c], stream_));
    }
    for (int round = 0; round < 21; ++round) {
      for (std::size_t c = 0; c < candidates.size(); ++c) {
        check(cudaEventRecord(begin_, stream_));
        check(cudaGraphLaunch(graphs[c], stream_));
        check(cudaEventRecord(end_, stream_));
        check(cudaEventSynchronize(end_));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_, end_));
        times[c].push_back(1e3 * static_cast<double>(ms) / static_cast<double>(calls));
      }
    }
    for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
    std::vector<std::pair<std::string, double>> lines;
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      const double us = median(times[c]);
      if (lines.empty() || lines.back().first != candidates[c].name) {
        lines.emplace_back(candidates[c].name, us);
      } else {
        lines.back().second = std::min(lines.back().second, us);
      }
    }
    for (const auto& [name, us] : lines) {
      fmt::print("{:<18} {:<24} {:8.2f} us {:6.0f} GB/s  {:.3f}\n", name, shape, us,
                 static_cast<double>(moved) / us / 1e3, lines.back().second / us);
    }
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
  for (int64_t tokens : {2048, 4096, 8192, 32768}) bench.latent(tokens, 32, 128, 64);
  bench.split(4096, 32, 128, 128, 64);
  bench.host();
  return 0;
} catch (const std::exception& e) {
  fmt::print(stderr, "rope_cuda_bench: {}\n", e.what());
  return 1;
}
