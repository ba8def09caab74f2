// lm_head on the CPU against what this machine can do, all measured in the same run: fused multiply-adds
// against the measured peak, weight traffic against the measured read bandwidth, oneDNN through dispatch and
// our own matrix-unit kernel against one primitive of the caller's shape. The first table has the fastest of
// several rounds, the others medians, taken in turn, so that a busy moment hits all.
//
//   lm_head_bench [V [onednn|backward|cpu]]
//
// V defaults to 16384, K is 4096. onednn, backward: those comparisons alone. cpu: processor time instead of
// wall time, for a machine that is busy with other things (rates are then per core-second, times cores).
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "rlk/rlk.hpp"

#if RLK_BENCH_DNNL
#  include <dnnl.hpp>
#endif

namespace {

using rlk::DType;
using rlk::Tensor;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kK = 4096;

int cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

bool count_processor_time = false;

double now() {
  if (!count_processor_time) return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec)) / cores();
}

double seconds(const std::function<void()>& run) {
  const double start = now();
  run();
  return now() - start;
}

void on_all_cores(const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int i = 1; i < cores(); ++i) threads.emplace_back(run, i);
  run(0);
  for (auto& t : threads) t.join();
}

#if defined(__GNUC__) && defined(__x86_64__)
#  define RLK_BENCH_WIDE __attribute__((target_clones("avx512f", "fma", "default")))
#else
#  define RLK_BENCH_WIDE
#endif

// Enough independent chains to hide the latency of a fused multiply-add on any width.
constexpr int kChains = 192;
constexpr std::int64_t kSteps = 400'000;
RLK_BENCH_WIDE float multiply_add(float* sums, float a, float b) {
  float x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = sums[i];
  for (std::int64_t step = 0; step < kSteps; ++step)
    for (int i = 0; i < kChains; ++i) x[i] = __builtin_fmaf(x[i], a, b);
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += x[i];
  return total;
}

double peak_flops() {
  const double time = seconds([] {
    on_all_cores([](int) {
      float sums[kChains];
      for (int i = 0; i < kChains; ++i) sums[i] = static_cast<float>(i);
      benchmark::DoNotOptimize(multiply_add(sums, 0.999f, 0.001f));
    });
  });
  return 2.0 * kChains * static_cast<double>(kSteps) * cores() / time;
}

// Eight streams per core: the pattern that gave the most of all tried (1, 2, 4, 8, 16).
RLK_BENCH_WIDE std::uint64_t read_streams(const std::uint64_t* data, std::size_t words) {
  std::uint64_t x[8][8] = {};
  const std::size_t stream = words / 8 / 8 * 8;
  for (std::size_t i = 0; i < stream; i += 8)
    for (std::size_t s = 0; s < 8; ++s)
      for (std::size_t l = 0; l < 8; ++l) x[s][l] ^= data[s * stream + i + l];
  std::uint64_t all = 0;
  for (auto& s : x)
    for (const std::uint64_t l : s) all ^= l;
  return all;
}

double read_bandwidth(const std::vector<std::uint8_t>& bytes) {
  const std::size_t part = bytes.size() / static_cast<std::size_t>(cores()) / 64 * 64;
  const double time = seconds([&] {
    on_all_cores([&](int i) {
      benchmark::DoNotOptimize(read_streams(
          reinterpret_cast<const std::uint64_t*>(bytes.data() + static_cast<std::size_t>(i) * part),
          part / 8));
    });
  });
  return static_cast<double>(part) * cores() / time;
}

std::vector<std::uint8_t> numbers(DType type, std::int64_t count) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count * rlk::size_of(type)));
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const std::uint32_t sign = state & 0x80000000u;
    if (type == DType::f32)
      reinterpret_cast<std::uint32_t*>(bytes.data())[i] = sign | 0x3c000000u | (state >> 8 & 0xffffffu);
    else
      reinterpret_cast<std::uint16_t*>(bytes.data())[i] =
          static_cast<std::uint16_t>((sign >> 16) | (type == DType::bf16 ? 0x3c00u | (state >> 12 & 0xffu)
                                                                         : 0x2800u | (state >> 12 & 0x7ffu)));
  }
  return bytes;
}

struct Problem {
  std::vector<std::uint8_t> hidden, weight;
  std::vector<float> out;
  Tensor h, w, y;
  Problem(DType type, std::int64_t m, std::int64_t v)
      : hidden(numbers(type, m * kK)),
        weight(numbers(type, v * kK)),
        out(static_cast<std::size_t>(m * v)),
        h(hidden.data(), {m, kK}, type),
        w(weight.data(), {v, kK}, type),
        y(out.data(), {m, v}, DType::f32) {}
};

// Best of rounds, a round being one call of each.
std::vector<double> race(const std::vector<std::function<void()>>& runs, int rounds) {
  std::vector<double> best(runs.size(), 1e30);
  for (int round = 0; round <= rounds; ++round)
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const double time = seconds(runs[i]);
      if (round > 0) best[i] = std::min(best[i], time);  // the first round warms up
    }
  return best;
}

// Medians over rounds. A candidate's turn is several calls in a row, of which the first do not count: a
// library's threads may go on spinning for some 15 ms after its last call, in the way of the next candidate.
std::vector<double> medians(const std::vector<std::function<void()>>& runs, int rounds) {
  std::vector<std::vector<double>> times(runs.size());
  for (int round = 0; round < rounds; ++round)
    for (std::size_t i = 0; i < runs.size(); ++i) {
      for (double waited = 0; waited < 0.02;) waited += seconds(runs[i]);
      for (int call = 0; call < 3; ++call) times[i].push_back(seconds(runs[i]));
    }
  std::vector<double> middle;
  for (auto& t : times) {
    std::ranges::sort(t);
    middle.push_back(t[t.size() / 2]);
  }
  return middle;
}

void run(const Problem& p, const char* id) {
  rlk::check(rlk::lm_head({.hidden = p.h, .weight = p.w, .out = p.y}, {.backend = id}));
}

bool runs(const Problem& p, const char* id) {
  return static_cast<bool>(
      rlk::resolve(rlk::LmHead{.hidden = p.h, .weight = p.w, .out = p.y}, {.backend = id}));
}

void native_row(const char* id, DType type, std::int64_t m, std::int64_t v) {
  const Problem p(type, m, v);
  if (!runs(p, id)) return;
  double flops = 0, bandwidth = 0, best = 1e30;
  for (int round = 0; round < 5; ++round) {
    flops = std::max(flops, peak_flops());
    bandwidth = std::max(bandwidth, read_bandwidth(p.weight));
    best = std::min(best, race({[&] { run(p, id); }}, 1)[0]);
  }
  const double rate = 2.0 * static_cast<double>(m * v * kK) / best;
  const double traffic = static_cast<double>(p.weight.size()) / best;
  fmt::print("{:<20} {:<5} {:>5} {:>9.1f} {:>9.1f} {:>7.0f}% {:>9.1f} {:>9.1f} {:>7.0f}%\n", id,
             rlk::name_of(type), m, rate * 1e-9, flops * 1e-9, 100 * rate / flops, traffic * 1e-9,
             bandwidth * 1e-9, 100 * traffic / bandwidth);
}

#if RLK_BENCH_DNNL
void keep(const Problem& p, const char* action) {
  rlk_args* args = rlk_args_new("lm_head_weight");
  rlk_args_tensor(args, "weight", &p.w.dl());
  rlk_args_string(args, "action", action);
  if (rlk_run(args, nullptr) != RLK_OK) fmt::print("lm_head_weight: {}\n", rlk_last_error());
  rlk_args_free(args);
}

// oneDNN's own product of the caller's shape, the weight in its layout or as it lies; nothing where there is
// none.
std::function<void()> one_primitive(const Problem& p, DType type, std::int64_t m, std::int64_t v,
                                    bool packed) try {
  using dnnl::memory;
  const auto data = type == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc source({m, kK}, data, memory::format_tag::ab),
      plain({kK, v}, data, memory::format_tag::ba), any({kK, v}, data, memory::format_tag::any),
      result({m, v}, memory::data_type::f32, memory::format_tag::ab);
#  if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc pd(engine, source, packed ? any : plain, result);
#  else
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(source, packed ? any : plain, result), engine);
#  endif
  memory lies(plain, engine, const_cast<std::uint8_t*>(p.weight.data())), weights = lies;
  if (packed) {
    weights = memory(pd.weights_desc(), engine);
    dnnl::reorder(lies, weights).execute(stream, lies, weights);
    stream.wait();
  }
  const memory from(source, engine, const_cast<std::uint8_t*>(p.hidden.data())),
      to(result, engine, const_cast<float*>(p.out.data()));
  return [=, matmul = dnnl::matmul(pd)]() mutable {
    matmul.execute(stream, {{DNNL_ARG_SRC, from}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, to}});
    stream.wait();
  };
} catch (const dnnl::error&) {
  return nullptr;
}

// GFLOP/s of ours with the weight as it lies and kept packed, each beside oneDNN's one product, and of
// native.
void onednn_row(const char* id, const char* native, DType type, std::int64_t m, std::int64_t v) {
  const Problem p(type, m, v);
  if (!runs(p, id)) return;
  const double flop = 2e-9 * static_cast<double>(m * v * kK);
  fmt::print("{:<13} {:<5} {:>5}", id, rlk::name_of(type), m);
  for (const bool packed : {false, true}) {
    if (packed) keep(p, "keep");
    std::vector<std::function<void()>> turns{[&] { run(p, id); }, [&] { run(p, native); }};
    const auto primitive = one_primitive(p, type, m, v, packed);
    if (primitive) turns.push_back(primitive);
    const auto times = medians(turns, 5);
    fmt::print(" {:>9.1f}", flop / times[0]);
    if (primitive)
      fmt::print(" {:>9.1f} {:>7.2f}x", flop / times[2], times[2] / times[0]);
    else
      fmt::print(" {:>9} {:>8}", "none", "");
    if (packed) fmt::print(" {:>14} {:>9.1f}\n", native, flop / times[1]);
  }
  keep(p, "drop");
}
#endif

// Each gradient alone, bf16 results, by everybody who offers it, in milliseconds.
void backward_rows(std::int64_t v) {
  const char* const ids[] = {"native.amx", "onednn.bf16", "native.avx512"};
  fmt::print("\n{:<9} {:>5}", "backward", "M");
  for (const char* id : ids) fmt::print(" {:>14}", id);
  fmt::print("   (ms)\n");
  for (const bool hidden : {true, false})
    for (const std::int64_t m : {1, 8, 32, 128, 512, 1024}) {
      const Problem p(DType::bf16, m, v);
      std::vector<std::uint8_t> d_out = numbers(DType::bf16, m * v);
      std::vector<std::uint8_t> result(static_cast<std::size_t>(2 * kK * (hidden ? m : v)));
      const Tensor dy(d_out.data(), {m, v}, DType::bf16),
          to(result.data(), {hidden ? m : v, kK}, DType::bf16);
      std::vector<std::function<void()>> runs;
      fmt::print("{:<9} {:>5}", hidden ? "d_hidden" : "d_weight", m);
      for (const char* id : ids) {
        rlk::LmHeadBwd args{.d_out = dy, .hidden = p.h, .weight = p.w};
        (hidden ? args.d_hidden : args.d_weight) = to;
        if (!rlk::resolve(args, {.backend = id})) {
          fmt::print(" {:>14}", "-");
          continue;
        }
        fmt::print(" {:>14.2f}",
                   1e3 * medians({[&] { rlk::check(rlk::lm_head_bwd(args, {.backend = id})); }}, 3)[0]);
      }
      fmt::print("\n");
    }
}

void native_rows(std::int64_t v) {
  fmt::print("{:<20} {:<5} {:>5} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8}\n", "implementation", "dtype", "M",
             "GFLOP/s", "peak", "of it", "GB/s", "read", "of it");
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t m : {1, 4, 8, 32, 128, 512})
      native_row("native.avx512", type, m, m > 128 ? v / 4 : v);
  for (const std::int64_t m : {1, 8, 32, 128, 512}) native_row("native.amx", DType::bf16, m, v);
  for (const std::int64_t m : {1, 128}) native_row("native.avx2", DType::f32, m, v / 4);
  for (const std::int64_t m : {1, 128}) native_row("native.golden", DType::bf16, m, v / 4);
  for (const std::int64_t m : {1, 64}) native_row("native.replay_sm90", DType::bf16, m, v / 8);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t v = argc > 1 ? std::atoll(argv[1]) : 16384;
  const std::string only = argc > 2 ? argv[2] : "";
  count_processor_time = only == "cpu";
  if (v <= 0 || (!only.empty() && only != "cpu" && only != "onednn" && only != "backward")) {
    fmt::print(stderr, "usage: lm_head_bench [V [onednn|backward|cpu]]\n");
    return 2;
  }
  fmt::print("K={} V={} on {} cores, fp32 results, {} time\n\n", kK, v, cores(),
             count_processor_time ? "processor" : "wall");
  if (only == "backward") return backward_rows(v), 0;
  if (only != "onednn") native_rows(v);
#if RLK_BENCH_DNNL
  fmt::print(
      "\nGFLOP/s, and ratios to one primitive of the caller's own shape on the same form of the weight\n");
  fmt::print("{:<13} {:<5} {:>5} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8} {:>14}\n", "oneDNN", "dtype", "M",
             "as it lies", "primitive", "ratio", "packed", "primitive", "ratio", "native");
  for (const std::int64_t m : {1, 4, 16, 32, 64, 96, 128, 512})
    onednn_row("onednn.bf16", "native.amx", DType::bf16, m, v);
  for (const std::int64_t m : {1, 4, 8, 16, 32, 64, 128, 512})
    onednn_row("onednn.avx512bf16", "native.avx512bf16", DType::bf16, m, v);
  for (const std::int64_t m : {1, 32, 128}) onednn_row("onednn.f32", "native.avx512", DType::f32, m, v / 2);
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t m : {1, 4, 8, 16, 32, 64, 128, 512})
      onednn_row("onednn.kb256", "native.kb256", type, m, v / 2);
#endif
  return 0;
}
