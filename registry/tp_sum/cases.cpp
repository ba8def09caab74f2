// Calls of tp_sum worth trying: every T, what is added, halves that cancel, -0, Inf and NaN.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

struct Config {
  const char* name = "normal";
  Fill fill{};
  bool bias = false, residual = false, brief = false;
};

void one(const CaseSink& sink, int64_t t, int64_t m, int64_t n, DType y, const Config& o = {}) {
  Case c;
  c.name = fmt::format("t={} m={} n={} {} {}", t, m, n, name_of(y), o.name);
  // Small integers sum exactly in any order, so the roundings of what is added have one right answer.
  c.exact = o.bias || o.residual;
  c.inputs = {{"partials", {t, m, n}, DType::f32, c.exact ? Fill{Fill::integers, -900, 900} : o.fill}};
  if (o.bias) c.inputs.push_back({"bias", {n}, y, {Fill::normal, 0, 900}});
  if (o.residual) c.inputs.push_back({"residual", {m, n}, y, {Fill::normal, 0, 900}});
  c.results = {{"y", y}};
  c.reduction = t;
  c.brief = o.brief;
  c.cancels = !c.exact;
  sink(std::move(c));
}

}  // namespace

namespace {

struct Form {
  const char* name;
  int64_t t, m, n, first = 0, count = -1;
  bool apart = false;  // in tensors of their own
};
constexpr Form kForms[] = {{"apart", 4, 5, 70, 0, -1, true},
                           {"apart", 8, 3, 33, 0, -1, true},
                           {"apart", 2, 2, 2060, 0, -1, true},
                           {"rows 2 to 4", 4, 7, 33, 2, 3},
                           {"rows 3 on, apart", 2, 6, 40, 3, -1, true},
                           {"rows, none", 2, 4, 16, 4, 0}};

// What the form asks of a call, forward or backward; rows of a slice are not those of partials.
int64_t shape(Case& c, const Form& f) {
  c.attributes = {{"row_first", f.first}, {"row_count", f.count}};
  const bool slice = f.first > 0 || f.count >= 0;
  const auto axis = [&](const char* name, int32_t at) { c.batch_axes.push_back({name, slice ? -1 : at}); };
  if (f.apart || slice) axis("partials", f.apart ? 0 : 1);
  return f.count >= 0 ? f.count : f.m - f.first;
}
constexpr const char* kOthers[] = {"p1", "p2", "p3", "p4", "p5", "p6", "p7"};
constexpr const char* kGradients[] = {"d_p1", "d_p2", "d_p3", "d_p4", "d_p5", "d_p6", "d_p7"};

void forms(const CaseSink& sink, DType y) {
  for (const Form& f : kForms) {
    Case c;
    c.name = fmt::format("t={} m={} n={} {} {}", f.t, f.m, f.n, name_of(y), f.name);
    const int64_t rows = shape(c, f);
    const bool slice = rows != f.m;
    const Fill fill{Fill::integers, -900, 900};
    c.inputs = {{"partials", f.apart ? std::vector{f.m, f.n} : std::vector{f.t, f.m, f.n}, DType::f32, fill}};
    for (int64_t i = 0; f.apart && i + 1 < f.t; ++i) {
      c.inputs.push_back({kOthers[i], {f.m, f.n}, DType::f32, fill});
      if (slice) c.batch_axes.push_back({kOthers[i], -1});
    }
    c.inputs.push_back({"residual", {rows, f.n}, y, {Fill::normal, 0, 900}});
    if (slice) c.batch_axes.push_back({"residual", -1}), c.batch_axes.push_back({"y", -1});
    c.results = {{"y", y}};
    c.reduction = f.t, c.exact = true;
    sink(std::move(c));
  }
}

void backward(const CaseSink& sink, DType t, const Form& f, const Fill& fill = {}) {
  Case c;
  c.name = fmt::format("t={} m={} n={} {} {}", f.t, f.m, f.n, name_of(t), f.name);
  const int64_t rows = shape(c, f);
  const bool slice = rows != f.m;
  c.inputs = {{"d_y", {rows, f.n}, t, fill},
              {"partials", f.apart ? std::vector{f.m, f.n} : std::vector{f.t, f.m, f.n}, DType::f32, {}}};
  c.results = {{"d_partials", DType::f32}, {"d_bias", t}, {"d_residual", t}};
  if (slice || f.apart) c.batch_axes.push_back({"d_partials", slice ? -1 : 0});
  if (slice) c.batch_axes.push_back({"d_y", -1}), c.batch_axes.push_back({"d_residual", -1});
  for (int64_t i = 0; f.apart && i + 1 < f.t; ++i) {
    c.results.push_back({kGradients[i], DType::f32});
    if (slice) c.batch_axes.push_back({kGradients[i], -1});
  }
  c.reduction = rows;
  c.cancels = true;
  sink(std::move(c));
}

}  // namespace

void tp_sum_bwd_cases(const CaseSink& sink) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (DType t : {DType::f32, DType::bf16, DType::f16}) {
    for (int64_t count : {1, 2, 4, 8}) backward(sink, t, {"normal", count, 5, 70});
    for (const Form& f : kForms) backward(sink, t, f);
    backward(sink, t, {"special values", 2, 6, 3},
             {Fill::values, 0, 0, {-0.0, 1, inf, -0.0, NAN, 1e-7, -inf}});
    backward(sink, t, {"two blocks of tokens", 2, 4100, 3});
    backward(sink, t, {"no rows", 2, 0, 16});
    backward(sink, t, {"no columns", 4, 3, 0});
  }
}

void tp_sum_cases(const CaseSink& sink) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (DType y : {DType::f32, DType::bf16, DType::f16})
    for (int64_t t : {1, 2, 4, 8}) {
      one(sink, t, 5, 70, y);
      one(sink, t, 3, 33, y, {.name = "bias", .bias = true});
      one(sink, t, 3, 40, y, {.name = "residual", .residual = true});
      one(sink, t, 2, 17, y, {.name = "bias, residual", .bias = true, .residual = true});
      one(sink, t, 4, 1, y, {.name = "one column", .brief = true});
      one(sink, t, 4, 64, y, {.name = "powers of two", .fill = {Fill::powers_of_two, -9, 9}, .brief = true});
      one(sink, t, 2, 16, y,
          {.name = "special values",
           .fill = {Fill::values, 0, 0, {-0.0, 0, 1, inf, 3e38, -0.0, -inf, 1e-40, NAN, -0.0, 2e38}},
           .brief = true});
      one(sink, t, 2, 4100, y, {.name = "several tiles", .brief = true});
      one(sink, t, 0, 16, y, {.name = "no rows", .brief = true});
      one(sink, t, 3, 0, y, {.name = "no columns", .brief = true});
    }
  for (DType y : {DType::f32, DType::bf16, DType::f16}) forms(sink, y);
}

Bound tp_sum_bound(const BoundQuery& q) {
  if (q.output == DType::f32) return {Bound::peak, 4e-7, 0};
  return {Bound::elementwise, 4e-7, 0.5};
}

// Copies are exact; column sums over tokens as linear's.
Bound tp_sum_bwd_bound(const BoundQuery& q) {
  if (q.result != "d_bias") return {Bound::bits};
  if (q.output == DType::f32) return {Bound::peak, 1e-5, 0};
  return {Bound::elementwise, 1e-5, 0.5};
}

}  // namespace rlk::registry
