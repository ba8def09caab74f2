// linear on the CPU beside lm_head, whose sums are one chain, through the same kernels and through oneDNN: the products of
// decoder layers in bf16, on one thread, taken in turn in the same run. Figures are medians in GFLOP/s of processor time, so
// that other work on the machine counts little. swiglu: by linear itself, and by the op after it, half of N being gates.
//
//   linear_bench [rounds=7 [N K]]
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

double seconds(const std::function<rlk::Status()>& run, bool& served) {
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double start = now();
  served = static_cast<bool>(run());
  return now() - start;
}

struct Matrix {
  std::int64_t rows, columns;
  std::vector<std::uint16_t> numbers;  // near 1 in bf16, of both signs
  Matrix(std::int64_t n, std::int64_t k) : rows(n), columns(k), numbers(static_cast<std::size_t>(n * k)) {
    std::uint32_t state = 1;
    for (std::uint16_t& x : numbers) {
      state = state * 1664525u + 1013904223u;
      x = static_cast<std::uint16_t>(0x3f80u | (state >> 16 & 0x807fu));
    }
  }
  Tensor tensor() { return {numbers.data(), {rows, columns}, DType::bf16}; }
};

struct Column {
  const char* name;
  std::function<rlk::Status()> run;
  std::vector<double> rates;
};

void table(std::int64_t m, std::int64_t n, std::int64_t k, int rounds) {
  Matrix x(m, k), weight(n, k), y(m, n), d_x(m, k), d_weight(n, k);
  std::vector<std::uint16_t> gated(static_cast<std::size_t>(m * (n / 2)));
  const auto linear = [&](const char* id) {
    return [&, id] {
      const Tensor tx = x.tensor(), tw = weight.tensor(), ty = y.tensor();
      return rlk::linear({.x = tx, .weight = tw, .y = ty}, {.backend = id, .threads = 1});
    };
  };
  const auto fused = [&](const char* id) {
    return [&, id] {
      const Tensor tx = x.tensor(), tw = weight.tensor(), to(y.numbers.data(), {m, n / 2}, DType::bf16);
      rlk::Linear a{.x = tx, .weight = tw, .y = to};
      a.activation = rlk::Linear::Activation::swiglu;
      return rlk::linear(a, {.backend = id, .threads = 1});
    };
  };
  const auto composed = [&](const char* id) {
    return [&, id] {
      const Tensor tx = x.tensor(), tw = weight.tensor(), ty = y.tensor(),
                   to(gated.data(), {m, n / 2}, DType::bf16);
      const rlk::Status status = rlk::linear({.x = tx, .weight = tw, .y = ty}, {.backend = id, .threads = 1});
      return status ? rlk::swiglu({.gate = ty, .out = to}, {.backend = "native", .threads = 1}) : status;
    };
  };
  const auto head = [&](const char* id) {
    return [&, id] {
      const Tensor tx = x.tensor(), tw = weight.tensor(), ty = y.tensor();
      return rlk::lm_head({.hidden = tx, .weight = tw, .out = ty}, {.backend = id, .threads = 1});
    };
  };
  const auto linear_bwd = [&](const char* id) {
    return [&, id] {
      const Tensor td = y.tensor(), tx = x.tensor(), tw = weight.tensor(), to = d_x.tensor(),
                   tv = d_weight.tensor();
      return rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = to, .d_weight = tv},
                             {.backend = id, .threads = 1});
    };
  };
  const auto head_bwd = [&](const char* id) {
    return [&, id] {
      const Tensor td = y.tensor(), tx = x.tensor(), tw = weight.tensor(), to = d_x.tensor(),
                   tv = d_weight.tensor();
      return rlk::lm_head_bwd({.d_out = td, .hidden = tx, .weight = tw, .d_hidden = to, .d_weight = tv},
                              {.backend = id, .threads = 1});
    };
  };
  std::vector<Column> columns = {
      {"linear", linear("native.amx"), {}},         {"fma32", linear("native.avx512"), {}},
      {"swiglu", fused("native.avx512"), {}},       {"after", composed("native.avx512"), {}},
      {"lm_head", head("native.amx"), {}},          {"onednn", head("onednn.bf16"), {}},
      {"linear_bwd", linear_bwd("native.amx"), {}}, {"fma32", linear_bwd("native.avx512"), {}},
      {"lm_head_bwd", head_bwd("native.amx"), {}},  {"onednn", head_bwd("onednn.bf16"), {}}};
  const double flops = 2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  for (int round = 0; round <= rounds; ++round)
    for (std::size_t i = 0; i < columns.size(); ++i) {
      bool served = false;
      const double time = seconds(columns[i].run, served);
      if (round > 0) columns[i].rates.push_back(served ? flops * (i < 6 ? 1 : 2) / time : 0);
    }
  fmt::print("{:6} {:6} {:6}", n, k, m);
  for (Column& c : columns) {
    std::sort(c.rates.begin(), c.rates.end());
    fmt::print(" {:11.1f}", c.rates[c.rates.size() / 2]);
  }
  fmt::print("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const std::int64_t n = argc > 3 ? std::atoll(argv[2]) : 0, k = argc > 3 ? std::atoll(argv[3]) : 0;
  if (rounds <= 0 || n < 0 || k < 0 || n > 65536 || k > 65536 || n * k > std::int64_t{1} << 28) {
    fmt::print(stderr, "usage: linear_bench [rounds [N K]], N and K at most 65536, N K at most 2^28\n");
    return 2;
  }
  fmt::print(
      "GFLOP/s of processor time, bf16, one thread, median of {}; 0: not served here\n{:>6} {:>6} {:>6} "
      "{:>11} {:>11} "
      "{:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}\n",
      rounds, "N", "K", "M", "linear", "fma32", "swiglu", "after", "lm_head", "onednn", "linear_bwd", "fma32",
      "lm_head_bwd", "onednn");
  const std::vector<std::pair<std::int64_t, std::int64_t>> sizes =
      n ? std::vector<std::pair<std::int64_t, std::int64_t>>{{n, k}}
        : std::vector<std::pair<std::int64_t, std::int64_t>>{
              {1024, 1024}, {6144, 2048}, {2048, 6144}, {4096, 4096}, {2880, 2880}};
  for (const auto& [columns, depth] : sizes)
    for (const std::int64_t m : {1, 16, 64, 512}) table(m, columns, depth, rounds);
}
