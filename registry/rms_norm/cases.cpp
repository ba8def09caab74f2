// Calls of rms_norm worth trying: widths around the lanes of its sum, heads inside a wider row, every option, and rows
// whose squares vanish, overflow, or hold Inf and NaN.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Config {
  const char* name = "plain";
  bool weight = true, residual = false, gate = false, wide = false;  // wide: fp32 weight and residual
  bool offset = false, early = false, sigmoid = false;
  bool computed = false,
       from_x = false;  // of a gradient with a residual: whether it has the sum, or makes it
  bool brief = false;
  Fill x{};
};

CaseTensor rows(const char* name, const std::vector<int64_t>& shape, DType t, const Fill& fill = {}) {
  return {name, shape, t, fill};
}

Case base(const char* x, const std::vector<int64_t>& shape, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} {}=[{}] {}", o.name, x, fmt::join(shape, ","), name_of(t));
  c.attributes = {{"weight_offset", int64_t{o.offset}},
                  {"cast", std::string(o.early ? "early" : "end")},
                  {"gate_act", std::string(o.sigmoid ? "sigmoid" : "silu")}};
  c.reduction = shape.back();
  c.brief = o.brief;
  return c;
}

void forward(const CaseSink& sink, const std::vector<int64_t>& shape, DType t, const Config& o) {
  Case c = base("x", shape, t, o);
  const DType wide = o.wide ? DType::f32 : t;
  c.inputs = {rows("x", shape, t, o.x)};
  if (o.weight) c.inputs.push_back({"weight", {shape.back()}, wide});
  if (o.residual) c.inputs.push_back(rows("residual", shape, wide, {Fill::normal, 0, 3}));
  if (o.gate) c.inputs.push_back(rows("gate", shape, t, {Fill::normal, 0, 4}));
  c.results = {{"y", t}, {"rstd", DType::f32}};
  if (o.residual) c.results.push_back({"sum", wide});
  sink(std::move(c));
}

void backward(const CaseSink& sink, const std::vector<int64_t>& shape, DType t, const Config& o) {
  Case c = base("d_y", shape, t, o);
  const DType wide = o.wide ? DType::f32 : t;
  c.inputs = {rows("d_y", shape, t),
              rows("x", shape, o.residual && !o.from_x && !o.computed ? wide : t, o.x)};
  if (o.weight) c.inputs.push_back({"weight", {shape.back()}, wide});
  if (o.gate) c.inputs.push_back(rows("gate", shape, t, {Fill::normal, 0, 4}));
  if (o.residual) c.inputs.push_back(rows("d_sum", shape, wide));
  if (o.from_x || o.computed) c.inputs.push_back(rows("residual", shape, wide, {Fill::normal, 0, 3}));
  if (o.computed) c.inputs.push_back(rows("sum", shape, wide));
  c.results = {{"d_x", t}};
  if (o.residual) c.results.push_back({"d_residual", wide});
  if (o.weight) c.results.push_back({"d_weight", wide});
  if (o.gate) c.results.push_back({"d_gate", t});
  sink(std::move(c));
}

Fill special() {
  constexpr double inf = std::numeric_limits<double>::infinity();
  return {Fill::values, 0, 0, {1, -2, 0.5, inf, 3, 1, 1,     1,      0,     -0.0,
                               0, 0,  1,   NAN, 1, 2, 1e-30, -1e-30, 2e-30, 0}};
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  for (DType t : kDTypes) {
    for (int64_t h : {64, 1000, 1024, 1025}) make(sink, {5, h}, t, Config{});
    make(sink, {2, 3, 4, 128}, t, {.name = "heads", .offset = true});
    make(sink, {3, 96}, t, {.name = "no weight", .weight = false});
    make(sink, {3, 2100}, t, {.name = "residual", .residual = true});
    make(sink, {3, 130}, t, {.name = "fp32 residual", .residual = true, .wide = true});
    make(sink, {3, 200}, t, {.name = "early", .residual = true, .early = true});
    make(sink, {3, 200}, t, {.name = "silu gate", .gate = true});
    make(sink, {3, 200}, t, {.name = "sigmoid gate", .gate = true, .sigmoid = true});
    make(sink, {300, 24}, t, {.name = "many rows", .brief = true});
    make(sink, {0, 64}, t, {.name = "no rows", .brief = true});
    make(sink, {5, 4}, t, {.name = "special", .brief = true, .x = special()});
    make(sink, {4, 64}, t, {.name = "loud channel", .brief = true, .x = {Fill::heavy_tailed}});
    make(sink, {2, 5000}, t, {.name = "wide early", .wide = true, .early = true, .brief = true});
    make(sink, {sink.draw(1, 9), sink.draw(32, 1500)}, t, {.name = "drawn", .residual = true, .brief = true});
  }
}

}  // namespace

void rms_norm_cases(const CaseSink& sink) {
  all_cases(sink, forward);
  // The gradient of a row of one is what rounding leaves of eps.
  for (DType t : kDTypes) forward(sink, {5, 1}, t, {.name = "one column"});
}
void rms_norm_bwd_cases(const CaseSink& sink) {
  all_cases(sink, backward);
  for (DType t : kDTypes) {
    backward(sink, {3, 2100}, t, {.name = "x and residual", .residual = true, .from_x = true});
    backward(sink, {3, 130}, t,
             {.name = "x and fp32 residual", .residual = true, .wide = true, .from_x = true});
    backward(sink, {130, 40}, t,
             {.name = "gate and residual", .residual = true, .gate = true, .from_x = true, .brief = true});
    backward(sink, {3, 130}, t, {.name = "sum", .residual = true, .wide = true, .computed = true});
  }
}

// The sum's error is a few ulps of fp32 whatever the width. A value close to the middle of two of x's dtype is rounded
// early to either of them, which are an ulp apart: two of the product's ulps at most, and half a one for its own rounding.
Bound rms_norm_bound(const BoundQuery& q) {
  return {Bound::elementwise, 0x1p-21, q.output == DType::f32 ? 4.0 : 2.5};
}
Bound rms_norm_bwd_bound(const BoundQuery&) { return {Bound::elementwise, 0x1p-18, 1}; }

}  // namespace rlk::registry
