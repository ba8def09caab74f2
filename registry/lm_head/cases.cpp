// Calls of lm_head worth trying: edges of K blocks and lanes, every dtype and result dtype, biases, hard
// data.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

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

// What is served: long sums with few columns, whole vocabularies with short sums. One of each dtype.
constexpr Size kServed[] = {{2, 16, 65539}, {1, 8, 151936}, {3, 3072, 5},
                            {2, 4096, 17},  {2, 8200, 17},  {2, 16400, 9}};

Size drawn_size(const CaseSink& sink) {
  // Tiles and blocks are multiples of something: half of the sizes are too.
  const auto size = [&](int64_t most) {
    return sink.draw(0, 1) ? sink.draw(1, most) : 24 * sink.draw(1, std::max<int64_t>(1, most / 24));
  };
  return {sink.draw(1, 40), size(1600), size(300)};
}

void served_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    const auto brief = [&](Case c) {
      c.brief = true;
      c.large = false;
      sink(std::move(c));
    };
    for (Size s : kServed) forward_case(brief, s, t, DType::f32, false, {}, "normal");
    const auto sampled = [&](Case c) {
      c.sampled = c.large = true;
      sink(std::move(c));
    };
    forward_case(sampled, {2, 2320, 33001}, t, t, false, {Fill::quick}, "quick");
    for (int i = 0; i < 4; ++i)
      forward_case(brief, drawn_size(sink), t, i % 2 ? t : DType::f32, false, {}, "drawn");
    forward_case(sink, {0, 64, 17}, t, t, false, {}, "no rows");
    for (DType out : {DType::f32, t}) {  // an empty sum is +0, and the bias is all there is
      forward_case(sink, {3, 0, 17}, t, out, false, {}, "no depth");
      forward_case(sink, {35, 0, 97}, t, out, true, {}, "no depth");
      if (t == DType::f32) break;
    }
  }
}

// Rows of one kind each, where every output is one product: what is flushed, saturated or skipped shows, and
// no order of additions matters.
void special_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    const double tiny = t == DType::f16    ? 0x1p-24
                        : t == DType::bf16 ? 0x1p-133
                                           : 0x1p-149,
                 least = t == DType::f16 ? 0x1p-14 : 0x1p-126,
                 most = t == DType::f16    ? 65504
                        : t == DType::bf16 ? 0x1.fep127
                                           : 0x1.fffffep127,
                 far = t == DType::f16 ? 0x1p15 : 0x1p100;
    const double inf = std::numeric_limits<double>::infinity();
    const double specials[] = {
        tiny, -tiny * 3, least - tiny, least, -0.0,         far, far * 1.0078125, far * 0.9921875,
        most, -most,     inf,          -inf,  std::nan(""), 1,   1.0 / 3,         0};
    constexpr int64_t k = 40, v = 24;
    Fill rows{Fill::values}, columns{Fill::values};
    rows.list.assign(std::size(specials) * k, 0.0);
    for (std::size_t m = 0; m < std::size(specials); ++m) rows.list[m * k + 7 * m % k] = specials[m];
    // Column n meets every special with one factor; the last but one is infinite where the rows are zero.
    constexpr double kFactors[] = {1, -1, 0.5, 2, 0.25, 0.75, 0, -0.0, 0x1p-10, 0x1p10, -3, 1.5};
    for (int64_t n = 0; n < v; ++n)
      for (int64_t i = 0; i < k; ++i)
        columns.list.push_back(n == v - 2 ? (i == 1 ? inf : 1)
                                          : kFactors[static_cast<std::size_t>(n) % std::size(kFactors)]);
    for (DType out : {DType::f32, t}) {
      Case c;
      c.name = fmt::format("special values {}->{}", name_of(t), name_of(out));
      c.inputs = {{"hidden", {static_cast<int64_t>(std::size(specials)), k}, t, rows},
                  {"weight", {v, k}, t, columns}};
      c.results = {{"out", out}};
      c.reduction = k;
      sink(std::move(c));
      if (t == DType::f32) break;
    }
    const double span = t == DType::f16 ? 14 : 125;
    const auto ruled = [&](Case c) {
      c.ruled = c.brief = true;
      sink(std::move(c));
    };
    forward_case(ruled, {9, 130, 65}, t, DType::f32, false, {Fill::powers_of_two, -span, span},
                 "all exponents");
    forward_case(ruled, {9, 130, 65}, t, DType::f32, false,
                 {Fill::normal, 0, t == DType::f16 ? 0x1p-20 : 0x1p-65}, "subnormal results");
    forward_case(ruled, {7, 70, 33}, t, t, false, {Fill::normal, 0, t == DType::f16 ? 200.0 : 0x1p62},
                 "overflow");
  }
}

// Values that a shortcut may take for something else.
void data_cases(const CaseSink& sink) {
  const std::pair<const char*, Fill> data[] = {
      {"equal rows", {Fill::same_rows}},     {"sorted", {Fill::sorted, -1, 1}},
      {"descending", {Fill::sorted, 3, -1}}, {"large", {Fill::normal, 0, 200}},
      {"small", {Fill::normal, 0, 0x1p-6}},  {"positive", {Fill::uniform, 0, 1}},
      {"negative", {Fill::uniform, -1, 0}},  {"zeros", {Fill::constant, 0}},
      {"integers", {Fill::integers, -9, 10}}};
  for (DType t : kDTypes) {
    for (const auto& [name, fill] : data)
      forward_case(sink, {6, 72, 29}, t, DType::f32, false, fill, name, true);
    Case c;
    c.name = fmt::format("hidden and weight in one memory {}", name_of(t));
    c.inputs = {{"hidden", {12, 72}, t, {}}, {"weight", {12, 72}, t, {}}};
    c.results = {{"out", DType::f32}};
    c.shared = {{"hidden", "weight"}};
    c.brief = true;
    c.reduction = 72;
    sink(std::move(c));
    forward_case(sink, {5, 72, 29}, t, DType::f32, true, {}, "normal");
  }
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
  data_cases(sink);
  special_cases(sink);
  served_cases(sink);
}

namespace {
void backward_case(const CaseSink& sink, Size s, DType t, DType out, Fill fill, const char* data,
                   bool wide = false) {
  Case c;
  c.name = fmt::format("m={} k={} v={} {}->{} {}", s.m, s.k, s.v, name_of(t), name_of(out), data);
  c.inputs = {{"d_out", {s.m, s.v}, wide ? DType::f32 : t, fill},
              {"hidden", {s.m, s.k}, t, fill},
              {"weight", {s.v, s.k}, t, fill}};
  c.results = {{"d_hidden", out}, {"d_weight", out}, {"d_bias", out}};
  c.reduction = s.v;
  c.large = s.m * s.k * s.v > 2'000'000;
  sink(std::move(c));
}
}  // namespace

void lm_head_bwd_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (std::size_t i = 0; i < std::size(kSizes); ++i)
      backward_case(sink, kSizes[i], t, i % 2 ? DType::f32 : t, {}, "normal");
  const std::pair<const char*, Fill> data[] = {{"equal rows", {Fill::same_rows}},
                                               {"ones", {Fill::constant, 1}},
                                               {"one-hot", {Fill::one_hot}},
                                               {"sorted", {Fill::sorted, -1, 1}},
                                               {"zeros", {Fill::constant, 0}}};
  for (DType t : kDTypes) {
    for (const auto& [name, fill] : data) backward_case(sink, {9, 40, 37}, t, DType::f32, fill, name);
    if (t != DType::f32) backward_case(sink, {7, 48, 33}, t, t, {}, "fp32 cotangent", true);
    const auto brief = [&](Case c) {
      c.brief = true;
      c.large = false;
      sink(std::move(c));
    };
    for (int i = 0; i < 3; ++i) {
      const Size s = drawn_size(sink);
      backward_case(brief, {s.m, std::min<int64_t>(s.k, 400), s.v}, t, i % 2 ? t : DType::f32, {}, "drawn");
    }
    // Long sums of each gradient: over the vocabulary, and over the batch.
    backward_case(brief, {2, 9, 65539}, t, DType::f32, {}, "normal");
    backward_case(brief, {2100, 9, 11}, t, DType::f32, {}, "normal");
    backward_case(brief, {2, 4100, 5}, t, DType::f32, {}, "normal");
    backward_case(brief, {0, 40, 17}, t, t, {}, "no rows");
    const auto ruled = [&](Case c) {
      c.ruled = c.brief = true;
      sink(std::move(c));
    };
    const double span = t == DType::f16 ? 14 : 125;
    backward_case(ruled, {9, 30, 25}, t, DType::f32, {Fill::powers_of_two, -span, span}, "all exponents");
  }
}

Bound lm_head_bound(const BoundQuery& q) {
  // Matrix units that count subnormals as zero say so in their rule.
  if (q.arithmetic == "amx/k32" || q.arithmetic.starts_with("avx512bf16/") || q.arithmetic == "cdna2/k4") {
    Bound b = lm_head_bound({q.result, q.input, q.output, "", q.reduction});
    b.flushes = true;
    return b;
  }
  // At K=4096: 4e-6 in fp32, 1e-5 from tensor cores; errors grow at most linearly in K.
  const double length = std::max(1.0, static_cast<double>(q.reduction) / 4096),
               sum = length * (q.input == DType::f32 ? 4e-6 : 1e-5);
  if (q.output == DType::f32) return {Bound::peak, sum, 0};
  return {.value = q.output == DType::bf16 ? 0.0020 : 0.00026, .ulps = 1, .unrounded = sum};
}
// d_hidden sums over the vocabulary, as long as a case says; the others over its rows, never more than 4096.
Bound lm_head_bwd_bound(const BoundQuery& q) {
  BoundQuery own = q;
  if (std::string_view(q.result) != "d_hidden") own.reduction = 0;
  return lm_head_bound(own);
}

}  // namespace rlk::registry
