// Calls of ratio_kl worth trying: every estimator, policies that have hardly moved and far ones, masks of both kinds, and
// numbers that are none at masked tokens.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Config {
  const char* name = "plain";
  const char* estimator = "k3";
  bool ref = true, large = false, brief = false;
  double moved = 0.3;  // deviation of the differences
  DType mask = DType::none;
  bool held = false;  // d to +-20 and kl to +-10
};

Case base(const std::vector<int64_t>& shape, const Config& o) {
  Case c;
  c.name = fmt::format("{} {} [{}]", o.name, o.estimator, fmt::join(shape, ","));
  c.attributes = {{"estimator", std::string(o.estimator)}};
  c.attributes.insert(c.attributes.end(),
                      {{"d_clamp", o.held ? 20.0 : 0.0}, {"kl_clamp", o.held ? 10.0 : 0.0}});
  // Far differences are exact: of others as large, rounding alone changes the exponential by many ulps.
  const Fill logs = o.moved > 1 ? Fill{Fill::integers, -12, 0} : Fill{Fill::normal, -1, o.moved};
  c.inputs = {{"logp", shape, DType::f32, logs}, {"old_logp", shape, DType::f32, logs}};
  if (o.ref) c.inputs.push_back({"ref_logp", shape, DType::f32, logs});
  if (o.mask != DType::none) c.inputs.push_back({"mask", shape, o.mask, {Fill::integers, 0, 2}});
  c.large = o.large, c.brief = o.brief || o.large;
  return c;
}

void forward(const CaseSink& sink, Case c) {
  c.results = {{"ratio", DType::f32}};
  if (c.inputs.size() > 2 && c.inputs[2].argument == "ref_logp") c.results.push_back({"kl", DType::f32});
  sink(std::move(c));
}
void backward(const CaseSink& sink, Case c) {
  const std::vector<int64_t> shape = c.inputs[0].shape;
  const bool ref = c.inputs.size() > 2 && c.inputs[2].argument == "ref_logp";
  c.inputs.push_back({"d_ratio", shape, DType::f32});
  if (ref) c.inputs.push_back({"d_kl", shape, DType::f32});
  c.results = {{"d_logp", DType::f32}};
  sink(std::move(c));
}

// Both ends of every clamp, infinities on either side and on both, NaN; and all of them once more where the mask is 0.
Case special(const char* estimator, bool held) {
  Case c = base({32}, {.name = held ? "special" : "special, unlimited",
                       .estimator = estimator,
                       .brief = true,
                       .mask = DType::f32,
                       .held = held});
  const std::vector<double> logp = {-1,  -30, 0,  -0.0, -kInf, -1,    -kInf, NAN,
                                    -25, -1,  -3, -1e4, -1,    -1e-7, -2,    -104};
  const std::vector<double> old = {-30, -1,  -0.0, 0,  -1,   -kInf, -kInf, -1,
                                   -1,  -25, -3,   -1, -1e4, -2e-7, -1,    -1};
  const std::vector<double> ref = {-1, -1,  0,  -0.0, -1, -1,      -kInf, -1,
                                   -4, -12, -3, -1,   -1, -1.5e-7, -kInf, NAN};
  std::vector<double> mask(16, 1.0);
  mask.insert(mask.end(), 16, 0.0);
  c.inputs[0].fill = {Fill::values, 0, 0, logp}, c.inputs[1].fill = {Fill::values, 0, 0, old};
  c.inputs[2].fill = {Fill::values, 0, 0, ref}, c.inputs[3].fill = {Fill::values, 0, 0, mask};
  return c;
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  for (const char* estimator : {"k1", "k2", "k3", "k3_st"}) {
    make(sink, base({75}, {.estimator = estimator}));
    make(sink,
         base({75}, {.name = "bool mask", .estimator = estimator, .brief = true, .mask = DType::boolean}));
    make(sink, base({400}, {.name = "on policy", .estimator = estimator, .brief = true, .moved = 1e-4}));
    make(sink, base({400}, {.name = "hardly moved", .estimator = estimator, .brief = true, .moved = 1e-7}));
    for (bool held : {false, true})
      make(sink, base({300}, {.name = held ? "far, held" : "far",
                              .estimator = estimator,
                              .brief = true,
                              .moved = 8,
                              .held = held}));
    make(sink, special(estimator, true));
    make(sink, special(estimator, false));
  }
  make(sink, base({5, 33}, {.name = "fp32 mask", .mask = DType::f32}));
  make(sink, base({64}, {.name = "no reference", .ref = false}));
  make(sink, base({0}, {.name = "no tokens", .brief = true}));
  make(sink, base({sink.draw(1, 3000)}, {.name = "drawn", .brief = true, .mask = DType::u8}));
  make(sink, base({65536 + 7}, {.name = "long", .large = true, .mask = DType::boolean}));
}

}  // namespace

void ratio_kl_cases(const CaseSink& sink) { all_cases(sink, forward); }
void ratio_kl_bwd_cases(const CaseSink& sink) { all_cases(sink, backward); }

// 5e-7 relative. Sums of two gradients may cancel.
Bound ratio_kl_bound(const BoundQuery&) { return {Bound::elementwise, 0, 8}; }
Bound ratio_kl_bwd_bound(const BoundQuery&) { return {Bound::elementwise, 0x1p-20, 8}; }

}  // namespace rlk::registry
