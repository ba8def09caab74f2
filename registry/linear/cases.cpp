// Calls of linear worth trying: edges of leaves and lanes, leaves that are empty or longer than a kernel's block, every part
// of a sum, biases and residuals, hard data.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "registry/linear/geometry.hpp"
#include "registry/op.hpp"

namespace rlk::registry {
namespace {

struct Size {
  int64_t m, k, n;
};
constexpr Size kSizes[] = {{1, 1, 1},    {1, 64, 17},   {2, 127, 16},  {3, 128, 33}, {5, 129, 40},
                           {7, 100, 65}, {4, 2049, 31}, {17, 256, 96}, {33, 96, 48}, {61, 320, 70}};
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Config {
  const char* name = "normal";
  Fill fill{};
  DType bias = DType::none, residual = DType::none;
  int64_t first = 0, count = 8, total = 0;
  bool cancels = false, brief = false, sampled = false, ruled = false;
  const char* gate_up = nullptr;  // of swiglu, where it is asked for
  bool twice = false;
  bool before = false;                             // gradients are added to others
  const std::vector<int64_t>* segments = nullptr;  // sizes of the whole N
};

// Small integers sum exactly in any order, so the roundings of what is added have one right answer.
Fill fill_of(const Config& o) {
  const bool adds = o.bias != DType::none || o.residual != DType::none;
  return adds && !o.gate_up ? Fill{Fill::integers, -40, 41} : o.fill;
}

void judge(Case& c, const Config& o, int64_t work) {
  c.brief = o.brief, c.sampled = o.sampled, c.ruled = o.ruled, c.cancels = o.cancels;
  c.large = o.sampled || (!o.brief && work > 4'000'000);
}

void forward(const CaseSink& sink, Size s, DType t, DType y, const Config& o = {}) {
  Case c;
  const Fill fill = fill_of(o);
  c.name = fmt::format("m={} k={} n={} {}->{} {}", s.m, s.k, s.n, name_of(t), name_of(y), o.name);
  c.inputs = {{"x", {s.m, s.k}, t, fill}, {"weight", {s.n, s.k}, t, fill}};
  const Fill loud{Fill::normal, 0, 3000};  // as large as the sums
  if (o.bias != DType::none) c.inputs.push_back({"bias", {s.n}, o.bias, loud});
  if (o.residual != DType::none) c.inputs.push_back({"residual", {s.m, s.n}, o.residual, loud});
  c.exact = !o.ruled && (o.bias != DType::none || o.residual != DType::none);
  c.results = {{"y", y}};
  c.attributes = {{"leaf_first", o.first}, {"leaf_count", o.count}, {"k_total", o.total}};
  if (o.gate_up) {
    c.attributes.insert(c.attributes.end(), {{"activation", "swiglu"}, {"gate_up", o.gate_up}});
    if (o.twice) c.attributes.push_back({"roundings", "twice"});
  }
  c.reduction = s.k;
  judge(c, o, s.m * s.k * s.n);
  sink(std::move(c));
}

void backward(const CaseSink& sink, Size s, DType t, DType result, const Config& o = {}, bool wide = false) {
  Case c;
  c.name = fmt::format("m={} k={} n={} {}->{} {}", s.m, s.k, s.n, name_of(t), name_of(result), o.name);
  c.inputs = {{"d_y", {s.m, s.n}, wide ? DType::f32 : t, o.fill},
              {"x", {s.m, s.k}, t, o.fill},
              {"weight", {s.n, s.k}, t, o.fill}};
  c.results = {{"d_x", o.count == 8 ? result : DType::f32},
               {"d_weight", result},
               {"d_bias", result},
               {"d_residual", result}};
  c.attributes = {{"d_x_leaf_first", o.first}, {"d_x_leaf_count", o.count}, {"n_total", o.total}};
  if (o.segments) {
    const std::vector<double> sizes(o.segments->begin(), o.segments->end());
    c.inputs.push_back(
        {"segments", {static_cast<int64_t>(sizes.size())}, DType::i64, {Fill::values, 0, 0, sizes}});
  }
  if (o.before) {
    const Fill loud{Fill::normal, 0, 3000};
    c.inputs.push_back({"d_weight_before", {s.n, s.k}, DType::f32, loud});
    c.inputs.push_back({"d_bias_before", {s.n}, DType::f32, loud});
    c.results[1].second = c.results[2].second = DType::f32;
    c.exact = true;
  }
  c.reduction = std::max(s.n, s.m);
  judge(c, o, s.m * s.k * s.n);
  sink(std::move(c));
}

// Every part of a sum of length `total`, also where the last leaves are short or empty: run(length, options).
template <class Run>
void parts(int64_t total, Run run) {
  struct Part {
    int64_t first, count;
    const char* name;
  };
  constexpr Part kParts[] = {{0, 4, "leaves 0-3"}, {4, 4, "leaves 4-7"}, {2, 2, "leaves 2-3"},
                             {6, 2, "leaves 6-7"}, {0, 1, "leaf 0"},     {6, 1, "leaf 6"},
                             {7, 1, "leaf 7"}};
  for (const auto& [first, count, name] : kParts)
    run(leaves::length(total, first, count),
        Config{.name = name, .first = first, .count = count, .total = total});
}

// swiglu of rounded products: by the written rule, for the distance from the truth is that of two roundings more.
void gated_cases(const CaseSink& sink, DType t) {
  const auto gated = [&](Size s, DType y, Config o) {
    // Products of deviation 3 reach both ends of the sigmoid.
    o.fill = {Fill::normal, 0, std::sqrt(3 / std::sqrt(static_cast<double>(std::max<int64_t>(s.k, 1))))};
    o.ruled = true;
    forward(sink, s, t, y, o);
  };
  for (const char* where : {"stacked", "interleaved64"}) {
    const auto name = [&](const char* what) { return fmt::format("swiglu {}{}", where, what); };
    const std::string plain = name(""), bias = name(", bias"), twice = name(", twice"),
                      wide = name(", wide bias"), none = name(", no rows"), flat = name(", no depth");
    const bool runs = where[0] == 'i';
    gated({5, 130, runs ? 256 : 70}, t, {.name = plain.c_str(), .gate_up = where});
    gated({17, 96, 128}, DType::f32, {.name = plain.c_str(), .gate_up = where});
    gated({3, 300, runs ? 384 : 194}, t, {.name = bias.c_str(), .bias = t, .gate_up = where});
    gated({4, 140, runs ? 128 : 38}, t, {.name = twice.c_str(), .bias = t, .gate_up = where, .twice = true});
    gated({2, 33, 128}, DType::f32,
          {.name = wide.c_str(), .bias = DType::f32, .brief = true, .gate_up = where});
    gated({0, 64, 128}, t, {.name = none.c_str(), .brief = true, .gate_up = where});
    gated({3, 0, 128}, t, {.name = flat.c_str(), .bias = t, .brief = true, .gate_up = where});
  }
  gated({1, 1, 2}, t, {.name = "swiglu", .brief = true, .gate_up = "stacked"});
  gated({2, 40, 0}, t, {.name = "swiglu, no columns", .brief = true, .gate_up = "stacked"});
  gated({2, 1030, 1100}, t, {.name = "swiglu", .brief = true, .gate_up = "stacked"});
}

void data_cases(const CaseSink& sink) {
  const std::pair<const char*, Fill> data[] = {
      {"ones", {Fill::constant, 1}},         {"heavy-tailed", {Fill::heavy_tailed}},
      {"linspace", {Fill::linspace, -1, 1}}, {"cancellation", {Fill::cancellation}},
      {"one-hot", {Fill::one_hot}},          {"powers of two", {Fill::powers_of_two, -8, 8}},
      {"equal rows", {Fill::same_rows}},     {"zeros", {Fill::constant, 0}}};
  for (DType t : kDTypes) {
    for (const auto& [name, fill] : data)
      forward(sink, {5, 1100, 29}, t, DType::f32, {.name = name, .fill = fill, .cancels = true});
    Case c;
    c.name = fmt::format("order of addition {}", name_of(t));
    c.inputs = {{"x", {1, 2100}, t, {}}, {"weight", {1, 2100}, t, {}}};
    c.results = {{"y", DType::f32}};
    c.order_probe = {"x", "weight", "y"};
    sink(std::move(c));
    const double span = t == DType::f16 ? 14 : 125;
    const auto ruled = [&](const char* name, const Fill& fill) {
      forward(sink, {9, 330, 65}, t, DType::f32, {.name = name, .fill = fill, .brief = true, .ruled = true});
    };
    ruled("all exponents", {Fill::powers_of_two, -span, span});
    ruled("subnormal results", {Fill::normal, 0, t == DType::f16 ? 0x1p-20 : 0x1p-65});
    ruled("overflow", {Fill::normal, 0, t == DType::f16 ? 200.0 : 0x1p62});
  }
}

// Products of -0, subnormal or infinite, one to a row, so that a leaf of -0 meets leaves of +0.
void special_cases(const CaseSink& sink) {
  const double inf = std::numeric_limits<double>::infinity();
  for (DType t : kDTypes) {
    const double tiny = t == DType::f16 ? 0x1p-24 : t == DType::bf16 ? 0x1p-133 : 0x1p-149;
    const double values[] = {tiny, -tiny, -0.0, inf, -inf, std::nan(""), 1.0 / 3, 0};
    constexpr int64_t k = 150;
    Fill rows{Fill::values};
    rows.list.assign(std::size(values) * k, 0.0);
    for (std::size_t m = 0; m < std::size(values); ++m) rows.list[m * k + 37 * m % k] = values[m];
    const auto factors = [&](const char* name, std::vector<double> list, bool ruled) {
      Case c;
      c.name = fmt::format("{} {}", name, name_of(t));
      c.inputs = {{"x", {static_cast<int64_t>(std::size(values)), k}, t, rows},
                  {"weight", {7, k}, t, {Fill::values, 0, 0, std::move(list)}}};
      c.results = {{"y", DType::f32}};
      c.reduction = k;
      c.ruled = c.brief = ruled;
      sink(std::move(c));
    };
    factors("special values", {1, -1, 0.25, -0.0, 0x1p-10, -0x1p-10, 3}, false);
    // To a matrix unit that counts subnormals as zero, an infinite one of them is a NaN.
    factors("subnormal weights", {1, -1, 0.25, -0.0, tiny, -tiny, 3}, true);
  }
}

}  // namespace

void linear_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    for (std::size_t i = 0; i < std::size(kSizes); ++i) forward(sink, kSizes[i], t, i % 2 ? t : DType::f32);
    const DType added[][2] = {{t, DType::none}, {DType::none, t}, {t, t}};
    for (const auto& [bias, residual] : added) {
      const char* name = bias == DType::none       ? "residual"
                         : residual == DType::none ? "bias"
                                                   : "bias, residual";
      forward(sink, {5, 130, 37}, t, t, {.name = name, .bias = bias, .residual = residual});
    }
    forward(sink, {3, 70, 18}, t, DType::f32,
            {.name = "fp32 bias, residual", .bias = DType::f32, .residual = DType::f32});
    parts(300, [&](int64_t k, const Config& o) { forward(sink, {6, k, 21}, t, DType::f32, o); });
    parts(100, [&](int64_t k, const Config& o) { forward(sink, {3, k, 9}, t, DType::f32, o); });
    forward(sink, {0, 64, 17}, t, t, {.name = "no rows", .brief = true});
    forward(sink, {3, 0, 17}, t, t, {.name = "no depth", .bias = t, .residual = t, .brief = true});
    // Long leaves, in one kernel's pieces; what is served.
    forward(sink, {2, 8300, 17}, t, DType::f32, {.brief = true});
    forward(sink, {17, 8300, 35}, t, DType::f32, {.brief = true});
    forward(sink, {2, 9728, 2560}, t, t, {.name = "quick", .fill = {Fill::quick}, .sampled = true});
    for (int i = 0; i < 3; ++i)
      forward(sink, {sink.draw(1, 40), sink.draw(1, 1600), sink.draw(1, 200)}, t, i % 2 ? t : DType::f32,
              {.name = "drawn", .brief = true});
    gated_cases(sink, t);
  }
  data_cases(sink);
  special_cases(sink);
}

namespace {
// Fused projections, whole and in part: sizes between multiples of 16, one that has no late leaves, one that is empty.
void segment_cases(const CaseSink& sink, DType t) {
  const std::vector<int64_t> lists[] = {{256, 128, 128}, {150, 40, 3}, {70, 0, 200}, {300}};
  struct Part {
    int64_t first, count;
  };
  for (const auto& sizes : lists)
    for (const auto& [first, count] : {Part{0, 8}, Part{4, 4}, Part{2, 2}, Part{7, 1}}) {
      int64_t whole = 0, held = 0;
      for (const int64_t n : sizes) whole += n, held += leaves::length(n, first, count);
      const std::string name =
          fmt::format("segments {}, leaves {} to {}", fmt::join(sizes, "+"), first, first + count - 1);
      backward(sink, {5, 21, held}, t, t,
               {.name = name.c_str(), .first = first, .count = count, .total = whole, .segments = &sizes});
    }
}
}  // namespace

void linear_bwd_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    for (std::size_t i = 0; i < std::size(kSizes); ++i) {
      Size s = kSizes[i];
      std::swap(s.k, s.n);
      backward(sink, s, t, i % 2 ? DType::f32 : t);
    }
    for (const auto& [name, fill] : {std::pair<const char*, Fill>{"ones", {Fill::constant, 1}},
                                     {"one-hot", {Fill::one_hot}},
                                     {"equal rows", {Fill::same_rows}}})
      backward(sink, {9, 40, 137}, t, DType::f32, {.name = name, .fill = fill});
    if (t != DType::f32) backward(sink, {7, 48, 133}, t, t, {.name = "fp32 cotangent"}, true);
    parts(300, [&](int64_t n, const Config& o) { backward(sink, {4, 11, n}, t, t, o); });
    backward(sink, {9, 40, 137}, t, t, {.name = "before", .fill = {Fill::integers, -40, 41}, .before = true});
    segment_cases(sink, t);
    // Blocks of tokens, and long leaves.
    backward(sink, {4100, 5, 7}, t, DType::f32, {.brief = true});
    backward(sink, {2, 9, 8300}, t, DType::f32, {.brief = true});
    backward(sink, {0, 40, 17}, t, t, {.name = "no rows", .brief = true});
    backward(sink, {sink.draw(1, 40), sink.draw(1, 300), sink.draw(1, 600)}, t, t,
             {.name = "drawn", .brief = true});
    const double span = t == DType::f16 ? 14 : 125;
    backward(
        sink, {9, 30, 225}, t, DType::f32,
        {.name = "all exponents", .fill = {Fill::powers_of_two, -span, span}, .brief = true, .ruled = true});
  }
}

namespace {
// The error of an fp32 sum, and half an ulp where it is rounded to 16 bits.
Bound rounded(DType output, double sum) {
  if (output == DType::f32) return {Bound::peak, sum, 0};
  return {Bound::elementwise, sum, 0.5};
}
bool flushes(const BoundQuery& q) {
  return q.arithmetic == "amx/k32/tree8" || q.arithmetic == "avx512bf16/tree8";
}
}  // namespace

// 3e-6 of the peak up to K = 16384.
Bound linear_bound(const BoundQuery& q) {
  Bound b = rounded(q.output, std::max(1.0, static_cast<double>(q.reduction) / 16384) * 3e-6);
  b.flushes = flushes(q);
  return b;
}
// Sums over tokens are chains of up to 4096.
Bound linear_bwd_bound(const BoundQuery& q) {
  if (q.result == "d_x") return linear_bound(q);
  Bound b = rounded(q.output, 1e-5);
  b.flushes = flushes(q);
  return b;
}

}  // namespace rlk::registry
