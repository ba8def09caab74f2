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
}

Bound tp_sum_bound(const BoundQuery& q) {
  if (q.output == DType::f32) return {Bound::peak, 4e-7, 0};
  return {Bound::elementwise, 4e-7, 0.5};
}

}  // namespace rlk::registry
