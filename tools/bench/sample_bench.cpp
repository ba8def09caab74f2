// sample on the CPU with and without filters, one thread, processor time, so that other work on the machine counts little; and
// its quality, chi-square of a million draws against fp64 probabilities.
//
//   sample_bench [rows=256 [vocabulary=151936 [rounds=5]]]
//   sample_bench quality [draws=1000000 [V]]     one row of V entries; without V of 8, of 1000 and of 151936: minutes
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/rlk.hpp"
#include "timing.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

std::vector<float> normal(std::size_t n, double deviation, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> distribution(0, deviation);
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(distribution(random));
  return x;
}

struct Filters {
  const char* name;
  bool top_k = false, top_p = false, min_p = false;
};

void time_calls(std::int64_t n, std::int64_t v, int rounds) {
  const std::vector<float> logits = normal(static_cast<std::size_t>(n * v), 2, 1);
  std::vector<std::uint16_t> halves(logits.size());
  std::transform(logits.begin(), logits.end(), halves.begin(), rlk::float_to_bf16);
  const auto count = static_cast<std::size_t>(n);
  std::vector<std::int64_t> seed(count, 7), position(count), token(count);
  std::iota(position.begin(), position.end(), 0);
  std::vector<std::int32_t> top_k(count, 50);
  std::vector<float> temperature(count, 0.8f), top_p(count, 0.95f), min_p(count, 0.01f), logp(count);
  const auto column = [&](auto& x, DType t) { return Tensor(x.data(), {n}, t); };
  const Tensor s = column(seed, DType::i64), at = column(position, DType::i64), k = column(top_k, DType::i32),
               t = column(temperature, DType::f32), p = column(top_p, DType::f32),
               m = column(min_p, DType::f32), out = column(token, DType::i64), l = column(logp, DType::f32);
  fmt::print("| [{}, {}] | dtype | ms |\n|---|---|---|\n", n, v);
  for (DType type : {DType::bf16, DType::f32})
    for (const Filters& f : {Filters{"token"}, Filters{"top_k 50", true}, Filters{"top_p 0.95", false, true},
                             Filters{"all filters", true, true, true}}) {
      const Tensor z(
          type == DType::f32 ? static_cast<void*>(const_cast<float*>(logits.data())) : halves.data(), {n, v},
          type);
      rlk::Sample a{.logits = z, .temperature = t, .seed = s, .position = at, .token = out, .logp = l};
      if (f.top_k) a.top_k = k;
      if (f.top_p) a.top_p = p;
      if (f.min_p) a.min_p = m;
      std::vector<double> times;
      for (int round = 0; round < rounds; ++round) {
        const double start = milliseconds(CLOCK_PROCESS_CPUTIME_ID);
        if (const rlk::Status status = rlk::sample(a, {.threads = 1}); !status) {
          fmt::print(stderr, "{}\n", status.message());
          std::exit(1);
        }
        times.push_back(milliseconds(CLOCK_PROCESS_CPUTIME_ID) - start);
      }
      fmt::print("| {}, logp | {} | {:.0f} |\n", f.name, rlk::name_of(type), median(times));
    }
}

// Chi-square of draws from one row; cells that expect less than ten draws are one.
void judge(std::size_t v, double deviation, std::size_t draws) {
  std::vector<float> logits = normal(v, deviation, 5);
  const double most = *std::max_element(logits.begin(), logits.end());
  std::vector<double> expected, seen(v);
  for (float z : logits) expected.push_back(std::exp(z - most));
  const double scale = static_cast<double>(draws) / std::accumulate(expected.begin(), expected.end(), 0.0);
  constexpr std::size_t kChunk = 4096;
  std::vector<std::int64_t> seed(kChunk, 20261122), position(kChunk), token(kChunk);
  for (std::size_t first = 0; first < draws; first += kChunk) {
    const auto n = static_cast<std::int64_t>(std::min(kChunk, draws - first));
    std::iota(position.begin(), position.end(), static_cast<std::int64_t>(first));
    const Tensor z(logits.data(), {n, static_cast<std::int64_t>(v)}, DType::f32, {kDLCPU, 0}, {0, 1}),
        s(seed.data(), {n}, DType::i64), at(position.data(), {n}, DType::i64),
        out(token.data(), {n}, DType::i64);
    if (!rlk::sample({.logits = z, .seed = s, .position = at, .token = out})) std::exit(1);
    for (std::int64_t i = 0; i < n; ++i)
      seen[static_cast<std::size_t>(token[static_cast<std::size_t>(i)])] += 1;
  }
  double chi = 0, rest = 0, rest_expected = 0, freedom = -1;
  const auto add = [&](double n, double e) { chi += (n - e) * (n - e) / e, ++freedom; };
  for (std::size_t i = 0; i < v; ++i) {
    if (const double e = expected[i] * scale; e >= 10)
      add(seen[i], e);
    else
      rest += seen[i], rest_expected += e;
  }
  if (rest_expected >= 10) add(rest, rest_expected);
  fmt::print("| {} | {} | {:.1f} | {:.0f} | {:+.2f} |\n", v, draws, chi, freedom,
             (chi - freedom) / std::sqrt(2 * freedom));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, long long preset) { return argc > i ? std::atoll(argv[i]) : preset; };
  if (argc > 1 && std::string_view(argv[1]) == "quality") {
    const auto draws = static_cast<std::size_t>(number(2, 1000000));
    fmt::print("| V | draws | chi-square | degrees of freedom | deviations |\n|---|---|---|---|---|\n");
    for (const long long v : {8, 1000, 151936})
      if (number(3, v) == v) judge(static_cast<std::size_t>(v), v == 8 ? 1 : 2, draws);
    return 0;
  }
  time_calls(number(1, 256), number(2, 151936), static_cast<int>(number(3, 5)));
}
