// What dispatch costs, in nanoseconds: a bound call, a cached call at 2, 4 and 12 tensors, a cold resolve.
// Prints the fastest of several repetitions (the others tell of the machine's load) and whether each figure
// is within its limit.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <map>
#include <string>

#include "noop.hpp"
#include "rlk/rlk.hpp"

using namespace rlk::bench;

namespace {

void plain_pointer(benchmark::State& state) {
  const NoopCall<2> call;
  auto* run = NoopOp<2>::kImplementation.run;
  benchmark::DoNotOptimize(run);
  rlk_call facts{};
  for (auto _ : state) benchmark::DoNotOptimize(run(call.slots(), &facts));
}

void bound(benchmark::State& state) {
  const NoopCall<4> call;
  rlk::BoundOp op = rlk::check(rlk::bind(call.args));
  for (auto _ : state) benchmark::DoNotOptimize(static_cast<bool>(op.run()));
}

template <int Tensors>
void cached(benchmark::State& state) {
  const NoopCall<Tensors> call;
  for (auto _ : state) benchmark::DoNotOptimize(static_cast<bool>(call.call()));
}

void resolve_noop(benchmark::State& state) {
  const NoopCall<4> call;
  for (auto _ : state) benchmark::DoNotOptimize(rlk::resolve(call.args).fingerprint());
}

// A real op with all its candidates.
void resolve_lm_head(benchmark::State& state) {
  float memory[64] = {};
  rlk::Tensor hidden(memory, {2, 4}, rlk::DType::f32), weight(memory + 8, {3, 4}, rlk::DType::f32),
      out(memory + 32, {2, 3}, rlk::DType::f32);
  const rlk::LmHead args{.hidden = hidden, .weight = weight, .out = out};
  for (auto _ : state) benchmark::DoNotOptimize(rlk::resolve(args).fingerprint());
}

struct Figure {
  const char* name;
  void (*body)(benchmark::State&);
  double limit_ns;  // 0: twice the plain call; below 0: no limit
};
constexpr Figure kFigures[] = {
    {"plain function-pointer call", plain_pointer, -1}, {"bound call", bound, 0},
    {"cached call, 2 tensors", cached<2>, 20},          {"cached call, 4 tensors", cached<4>, 20},
    {"cached call, 12 tensors", cached<12>, 40},        {"cold resolve, one candidate", resolve_noop, 2000},
    {"cold resolve, lm_head", resolve_lm_head, 2000},
};

class Fastest : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration || run.error_occurred) continue;
      double& ns = fastest.try_emplace(run.run_name.function_name, 1e300).first->second;
      ns = std::min(ns, run.GetAdjustedCPUTime());
    }
  }
  std::map<std::string, double> fastest;
};

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (rlk_register_backend(&noop_backend(), "bench") != RLK_OK) {
    std::fprintf(stderr, "%s\n", rlk_last_error());
    return 1;
  }
  for (const Figure& f : kFigures)
    benchmark::RegisterBenchmark(f.name, f.body)->MinTime(0.02)->Repetitions(20);
  Fastest reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  const double plain = reporter.fastest["plain function-pointer call"];
  bool good = true;
  std::printf("%-30s %10s %10s\n", "", "ns", "limit");
  for (const Figure& f : kFigures) {
    const auto at = reporter.fastest.find(f.name);
    if (at == reporter.fastest.end()) continue;
    const double limit = f.limit_ns == 0 ? 2 * plain : f.limit_ns;
    const bool met = limit < 0 || at->second <= limit;
    good &= met;
    std::printf("%-30s %10.1f ", f.name, at->second);
    limit < 0 ? std::printf("%10s\n", "-") : std::printf("%10.1f %s\n", limit, met ? "" : "MISSED");
  }
  return good ? 0 : 1;
}
