// Calls of swiglu worth trying: every activation and rounding, one tensor or two, gates in both tails, Inf and NaN.
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
  const char* act = "silu";
  bool twice = false, packed = false, brief = false;
  Fill gate{Fill::normal, 0, 3}, up{Fill::normal, 0, 3};
};

Case base(std::vector<int64_t> shape, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} {}{}{} [{}] {}", o.name, o.act, o.twice ? " twice" : "", o.packed ? " packed" : "",
                       fmt::join(shape, ","), name_of(t));
  c.attributes = {{"act", std::string(o.act)}, {"roundings", std::string(o.twice ? "twice" : "once")}};
  if (o.packed) {
    shape.back() *= 2;
    c.inputs = {{"gate", shape, t, o.gate}};
  } else {
    c.inputs = {{"gate", shape, t, o.gate}, {"up", shape, t, o.up}};
  }
  c.brief = o.brief;
  return c;
}

void forward(const CaseSink& sink, const std::vector<int64_t>& shape, DType t, const Config& o) {
  Case c = base(shape, t, o);
  c.results = {{"out", t}};
  sink(std::move(c));
}
void backward(const CaseSink& sink, const std::vector<int64_t>& shape, DType t, const Config& o) {
  Case c = base(shape, t, o);
  c.inputs.insert(c.inputs.begin(), {"d_out", shape, t});
  c.results = {{"d_gate", t}};
  if (!o.packed) c.results.push_back({"d_up", t});
  sink(std::move(c));
}

// Both ends of the exponential, signed zeros, Inf and NaN.
Fill tails() {
  constexpr double inf = std::numeric_limits<double>::infinity();
  return {Fill::values,
          0,
          0,
          {0.0, -0.0, 88, -88, 90, -90, 104, -104, 120, -120, 1000, -1000, inf, -inf, NAN, 1}};
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  for (DType t : kDTypes) {
    for (const char* act : {"silu", "gelu_tanh", "silu_clamped"})
      for (bool twice : {false, true}) make(sink, {5, 75}, t, {.act = act, .twice = twice});
    make(sink, {2, 3, 40}, t, {.packed = true});
    make(sink, {3, 33}, t, {.act = "silu_clamped", .packed = true});
    for (const char* act : {"silu", "gelu_tanh", "silu_clamped"})
      make(sink, {2, 16}, t,
           {.name = "tails", .act = act, .brief = true, .gate = tails(), .up = {Fill::constant, 2}});
    make(sink, {16, 2}, t,
         {.name = "loud up",
          .act = "silu_clamped",
          .brief = true,
          .up = {Fill::values, 0, 0, {7, -7, 8, -8, 100}}});
    make(sink, {2, 4100}, t, {.name = "several tiles", .brief = true});
    make(sink, {0, 64}, t, {.name = "no rows", .brief = true});
    make(sink, {3, 0}, t, {.name = "no columns", .brief = true});
    make(sink, {sink.draw(1, 40), sink.draw(1, 300)}, t, {.name = "drawn", .twice = true, .brief = true});
  }
}

}  // namespace

void swiglu_cases(const CaseSink& sink) { all_cases(sink, forward); }
void swiglu_bwd_cases(const CaseSink& sink) { all_cases(sink, backward); }

// The exponential of a large argument is many ulps off by the rounding of the argument alone; against the row's peak that is
// nothing. A value that is rounded twice may go either way the first time: two of the product's ulps at most, and half a one for
// its own rounding.
Bound swiglu_bound(const BoundQuery& q) {
  return {Bound::elementwise, 0x1p-20, q.output == DType::f32 ? 8.0 : 2.5};
}
Bound swiglu_bwd_bound(const BoundQuery& q) { return swiglu_bound(q); }

}  // namespace rlk::registry
