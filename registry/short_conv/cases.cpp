// Calls of short_conv worth trying: sequences shorter than the filter and empty ones, lengths around the blocks of its sums,
// packed and with states, both tails of the exponential, Inf and NaN.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Shape {
  int64_t batch, tokens, channels, taps;
};
struct Config {
  const char* name = "plain";
  bool bias = false, state = false, wide = false;  // wide: fp32 weight and bias
  std::vector<double> bounds{};                    // cu_seqlens
  bool brief = false;
  Fill x{};
};

int64_t sequences(const Shape& s, const Config& o) {
  return o.bounds.empty() ? s.batch : static_cast<int64_t>(o.bounds.size()) - 1;
}

Case base(const Shape& s, DType t, const Config& o) {
  Case c;
  c.name =
      fmt::format("{} b={} t={} d={} w={} {}", o.name, s.batch, s.tokens, s.channels, s.taps, name_of(t));
  const DType wide = o.wide ? DType::f32 : t;
  c.inputs = {{"x", {s.batch, s.tokens, s.channels}, t, o.x},
              {"weight", {s.channels, s.taps}, wide, {Fill::normal, 0, 0.7}}};
  if (o.bias) c.inputs.push_back({"bias", {s.channels}, wide});
  if (o.state) c.inputs.push_back({"initial_state", {sequences(s, o), s.taps - 1, s.channels}, t});
  if (!o.bounds.empty())
    c.inputs.push_back({"cu_seqlens", {sequences(s, o) + 1}, DType::i64, {Fill::values, 0, 1, o.bounds}});
  c.reduction = std::max(s.taps, s.tokens);
  c.brief = o.brief;
  c.most_rows = std::max<int64_t>(20, 4096 / std::max<int64_t>(s.tokens, 1));
  return c;
}

void forward(const CaseSink& sink, const Shape& s, DType t, const Config& o) {
  Case c = base(s, t, o);
  c.results = {{"y", t}, {"final_state", t}};
  sink(std::move(c));
}
void backward(const CaseSink& sink, const Shape& s, DType t, const Config& o) {
  Case c = base(s, t, o);
  c.inputs.push_back({"d_y", {s.batch, s.tokens, s.channels}, t});
  if (o.state)
    c.inputs.push_back({"d_final_state", {sequences(s, o), s.taps - 1, s.channels}, o.wide ? DType::f32 : t});
  const DType wide = o.wide ? DType::f32 : t;
  c.results = {{"d_x", t}, {"d_weight", wide}};
  if (o.bias) c.results.push_back({"d_bias", wide});
  if (o.state) c.results.push_back({"d_initial_state", wide});
  sink(std::move(c));
}

Fill tails() {
  constexpr double inf = std::numeric_limits<double>::infinity();
  return {Fill::values, 0, 0, {0.0, -0.0, 60,   -60, 90,  -90,  104, -104, 1, -1, 0.5, 1e-30, 200, -200,
                               inf, 1,    -inf, 1,   NAN, -0.0, 1,   2,    3, -3, 4,   -4,    5,   6}};
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  for (DType t : kDTypes) {
    for (int64_t taps : {2, 3, 4}) {
      make(sink, {2, 37, 40, taps}, t, {});
      make(sink, {3, 5, 33, taps}, t, {.name = "state", .bias = true, .state = true});
    }
    make(sink, {5, 1, 72, 4}, t, {.name = "decode", .state = true});
    make(sink, {1, 50, 64, 4}, t,
         {.name = "packed", .bias = true, .state = true, .bounds = {0, 1, 3, 3, 6, 20, 20, 50}});
    make(sink, {1, 50, 24, 3}, t, {.name = "packed, no state", .bounds = {0, 0, 2, 31, 50}, .brief = true});
    make(sink, {2, 2, 16, 4}, t, {.name = "short", .state = true, .wide = true});
    make(sink, {3, 131, 24, 4}, t, {.name = "blocks", .bias = true, .brief = true});
    make(sink, {2, 9, 1100, 4}, t, {.name = "tiles", .bias = true, .state = true, .brief = true});
    make(sink, {1, 1, 1, 2}, t, {.name = "one", .bias = true, .brief = true});
    make(sink, {2, 0, 16, 4}, t, {.name = "no tokens", .state = true, .brief = true});
    make(sink, {0, 4, 16, 4}, t, {.name = "no rows", .brief = true});
    make(sink, {2, 4, 0, 4}, t, {.name = "no channels", .state = true, .brief = true});
    make(sink, {1, 14, 28, 4}, t, {.name = "tails", .brief = true, .x = tails()});
    make(sink, {2, 6, 64, 4}, t, {.name = "loud channel", .brief = true, .x = {Fill::heavy_tailed}});
    make(sink, {sink.draw(1, 3), sink.draw(1, 300), sink.draw(1, 90), sink.draw(2, 4)}, t,
         {.name = "drawn", .bias = true, .state = true, .brief = true});
  }
}

}  // namespace

void short_conv_cases(const CaseSink& sink) { all_cases(sink, forward); }
void short_conv_bwd_cases(const CaseSink& sink) { all_cases(sink, backward); }

// silu of a sum that cancels keeps the sum's own error, which is small against the row's largest.
Bound short_conv_bound(const BoundQuery& q) {
  return {Bound::elementwise, 0x1p-20, q.output == DType::f32 ? 8.0 : 1.0};
}
Bound short_conv_bwd_bound(const BoundQuery& q) {
  // In the tail exp(z) is off by the last places of z and of its product with log2 e, up to 2^-18 in all at 32 and 2^-17 at 64,
  // and a channel may have nothing else; beyond that a gradient is nothing.
  return {Bound::elementwise, 0x1p-17, q.output == DType::f32 ? 8.0 : 1.0, false, 0x1p-80};
}

}  // namespace rlk::registry
