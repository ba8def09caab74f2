// Calls of lm_head worth trying: edges of K blocks and lanes, every dtype and result dtype, biases, hard
// data.
#include <fmt/format.h>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

struct Size {
  int64_t m, k, v;
};
constexpr Size kSizes[] = {{1, 1, 1},    {1, 64, 17},   {2, 1023, 16},  {3, 1024, 33}, {5, 1025, 40},
                           {7, 100, 65}, {8, 2049, 31}, {17, 256, 128}, {33, 96, 48},  {61, 320, 70}};
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

void forward_case(const CaseSink& sink, Size s, DType t, DType out, bool bias, Fill fill, const char* data,
                  bool cancels = false) {
  Case c;
  c.name = fmt::format("m={} k={} v={} {}->{} {}", s.m, s.k, s.v, name_of(t), name_of(out),
                       bias ? "integers, bias" : data);
  c.inputs = {{"hidden", {s.m, s.k}, t, fill}, {"weight", {s.v, s.k}, t, fill}};
  if (bias) {
    // Small integers sum exactly in any order, so the two roundings of a biased result have one right answer.
    c.inputs[0].fill = c.inputs[1].fill = {Fill::integers, -4, 5};
    c.inputs.push_back({"bias", {s.v}, t, {}});
    c.exact = true;
  }
  c.results = {{"out", out}};
  c.reduction = s.k;
  c.cancels = cancels;
  c.large = s.m * s.k * s.v > 4'000'000;
  sink(std::move(c));
}

}  // namespace

void lm_head_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (std::size_t i = 0; i < std::size(kSizes); ++i) {
      forward_case(sink, kSizes[i], t, DType::f32, i % 2 == 1, {}, "normal");
      if (t != DType::f32) forward_case(sink, kSizes[i], t, t, i % 2 == 0, {}, "normal");
    }
  const std::pair<const char*, Fill> hard[] = {
      {"ones", {Fill::constant, 1}},         {"heavy-tailed", {Fill::heavy_tailed}},
      {"linspace", {Fill::linspace, -1, 1}}, {"cancellation", {Fill::cancellation}},
      {"one-hot", {Fill::one_hot}},          {"powers of two", {Fill::powers_of_two, -8, 8}}};
  for (DType t : kDTypes)
    for (const auto& [name, fill] : hard)
      forward_case(sink, {9, 1100, 37}, t, DType::f32, false, fill, name, true);
  for (DType t : kDTypes) {
    Case c;
    c.name = fmt::format("order of addition {}", name_of(t));
    c.inputs = {{"hidden", {1, 2100}, t, {}}, {"weight", {1, 2100}, t, {}}};
    c.results = {{"out", DType::f32}};
    c.order_probe = {"hidden", "weight", "out"};
    sink(std::move(c));
  }
}

void lm_head_bwd_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (std::size_t i = 0; i < std::size(kSizes); ++i) {
      const Size s = kSizes[i];
      const DType out = i % 2 ? DType::f32 : t;
      Case c;
      c.name = fmt::format("m={} k={} v={} {}->{} normal", s.m, s.k, s.v, name_of(t), name_of(out));
      c.inputs = {{"d_out", {s.m, s.v}, t, {}}, {"hidden", {s.m, s.k}, t, {}}, {"weight", {s.v, s.k}, t, {}}};
      c.results = {{"d_hidden", out}, {"d_weight", out}, {"d_bias", out}};
      c.large = s.m * s.k * s.v > 2'000'000;
      sink(std::move(c));
    }
}

Bound lm_head_bound(const BoundQuery& q) {
  if (q.output == DType::bf16) return {Bound::peak, 0.0020, 1};
  if (q.output == DType::f16) return {Bound::peak, 0.00026, 1};
  // Error grows at most linearly in K; 4e-6 at K=4096 is the spec's figure for fp32, 1e-5 for tensor cores.
  return {Bound::peak, q.input == DType::f32 ? 4e-6 : 1e-5, 0};
}
Bound lm_head_bwd_bound(const BoundQuery& q) { return lm_head_bound(q); }

}  // namespace rlk::registry
