// Calls of KDA with the gate inside, as the golden cases have them, on any seed; the truth comes from the fp64 reference. A sum that
// happens to cancel on one seed does not on the next, so an implementation is judged on several.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "kda_case.hpp"

namespace kda_test {

// At width 128 d_a_log is about a tenth of its scale on 5 and 6 (softplus) and on 7 and 8 (bounded).
inline constexpr std::uint32_t kSeeds[] = {1, 5, 6, 7, 8};

struct Seeded {
  const char* name;
  Shape shape;
};
// The golden cases with a gate, and what a model of Kimi's kind runs.
inline std::vector<Seeded> seeded(int k, int v) {
  using rlk::kda::Gate;
  return {
      {"softplus", {.tokens = 96, .heads = 2, .value_heads = 2, .k = k, .v = v, .gate = Gate::softplus}},
      {"bounded", {.tokens = 96, .heads = 2, .value_heads = 2, .k = k, .v = v, .gate = Gate::bounded}},
      {"kimi", {.tokens = 129, .k = k, .v = v, .gate = Gate::bounded, .norm = true, .sigmoid = true}},
      {"kimi, softplus",
       {.tokens = 129, .k = k, .v = v, .gate = Gate::softplus, .norm = true, .sigmoid = true}},
      {"kimi, grouped",
       {.tokens = 200,
        .value_heads = 2,
        .k = k,
        .v = v,
        .gate = Gate::bounded,
        .norm = true,
        .sigmoid = true}},
  };
}

inline void scale(Buffer& b, float by) {
  for (std::size_t i = 0; i < b.size(); ++i)
    rlk::kda::store(b.bytes.data(), b.type, std::int64_t(i), by * b[i]);
}
inline Case seeded_case(const Shape& s, std::uint32_t seed) {
  Case c = random_case(s, seed);
  // Of the golden cases' size.
  scale(c.in.at("h0"), 2), scale(c.in.at("dht"), 3);
  for (float& x : c.dt_bias) x *= 2;
  if (s.norm)
    for (const char* name : {"q", "k"}) scale(c.in.at(name), std::sqrt(float(s.k)));
  return c;
}

// Every result of the reference in fp32.
inline Case exact_case(const Shape& s, std::uint32_t seed) {
  Case c = seeded_case(s, seed);
  for (auto& [name, b] : c.out) b = Buffer(Float::f32, b.size());
  const rlk::Status status = run(c, "native.golden");
  REQUIRE_MESSAGE(status, status.message());
  return c;
}

// By what an error of d_a_log is measured: the truth, or where the terms of the tokens cancel, the root of the sum of their squares.
inline double a_log_scale(const Case& exact) {
  const auto HV = std::size_t(exact.p.value_heads), K = std::size_t(exact.p.k_dim);
  const bool softplus = exact.p.gate == rlk::kda::Gate::softplus;
  double truth = 0, terms = 0;
  for (std::size_t t = 0; t < exact.tokens(); ++t)
    for (std::size_t h = 0; h < HV; ++h) {
      double term = 0;
      for (std::size_t d = 0; d < K; ++d) {
        const std::size_t i = (t * HV + h) * K + d;
        const double x = double(exact.in.at("g")[i]) + exact.dt_bias[h * K + d];
        // The raw gate's gradient over its slope, times the decay; the bounded gate's slope and derivative differ in x alone.
        const double per = softplus ? std::log1p(std::exp(x)) * (1 + std::exp(-x)) : x;
        term += double(exact.out.at("dg")[i]) * per;
      }
      terms += term * term;
    }
  for (float x : exact.d_a_log) truth += double(x) * x;
  return std::sqrt(std::max(truth, terms));
}

// How far each result of a call is from the truth.
inline std::map<std::string, double> errors_of(const Case& c, const Case& exact) {
  std::map<std::string, double> errors;
  for (const auto& [name, b] : c.out) {
    const std::vector<float> truth = exact.out.at(name).values();
    errors[name] = rms_ratio(b, truth);
    if (name != "dA_log") continue;
    double square = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) square += std::pow(double(b[i]) - truth[i], 2);
    errors[name] = std::sqrt(square) / a_log_scale(exact);
  }
  return errors;
}

// The bounds of 16-bit data.
inline double bound16(const std::string& result) {
  if (result == "o" || result == "ht") return 0.005;
  if (result == "dg" || result == "dbeta") return 0.02;
  return result == "dA_log" ? 0.003 : 0.008;
}

}  // namespace kda_test
