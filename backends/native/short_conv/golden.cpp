// short_conv and its gradients in fp64, channel by channel, one rounding of every result.
#include <cmath>
#include <vector>

#include "arithmetic/short_conv/bind.hpp"
#include "native/levels.hpp"
#include "native/short_conv/bounds.hpp"

namespace rlk::native {
namespace {

using namespace rlk::conv32;

// One channel of a call.
struct Channel {
  const Problem& p;
  std::int64_t d;

  double weight(int tap) const { return rows::load(p.weight.type, p.weight.data, d * p.taps + tap); }
  double input(const Span& s, std::int64_t at) const {
    const void* row = p.input(s, at);
    return row ? rows::load(p.x.type, row, d) : 0;
  }
  double sum(const Span& s, std::int64_t at) const {
    double z = 0;
    for (int t = 0; t < p.taps; ++t) z = std::fma(weight(t), input(s, at - p.back() + t), z);
    return p.bias ? z + rows::load(p.bias.type, p.bias.data, d) : z;
  }

  void forward(const Span& s) const {
    for (std::int64_t at = 0; at < s.length(); ++at)
      rows::store(p.y.type, p.y.row(p.axes, s.begin + at), d, silu<double>(sum(s, at)));
    for (int r = 0; p.final && r < p.back(); ++r)
      rows::store(p.final.type, p.final.row(s.number, r), d, input(s, s.length() - p.back() + r));
  }

  // `total` has a sum for each tap and one for the bias.
  void backward(const Span& s, double (&total)[kMostTaps + 1]) const {
    std::vector<double> g(static_cast<std::size_t>(s.length()));
    for (std::int64_t at = 0; at < s.length(); ++at) {
      const double d_y = rows::load(p.d_y.type, p.d_y.row(p.axes, s.begin + at), d);
      const double x = g[static_cast<std::size_t>(at)] = d_silu<double>(d_y, sum(s, at));
      for (int t = 0; t < p.taps; ++t) total[t] = std::fma(x, input(s, at - p.back() + t), total[t]);
      total[p.taps] += x;
    }
    for (std::int64_t at = -p.back(); at < s.length(); ++at) {
      double x = 0;
      if (const std::int64_t r = at - (s.length() - p.back()); p.d_final && r >= 0)
        x = rows::load(p.d_final.type, p.d_final.row(s.number, r), d);
      for (std::int64_t out = std::min(at + p.back(), s.length() - 1); out >= std::max<std::int64_t>(at, 0);
           --out)
        x = std::fma(weight(p.back() - static_cast<int>(out - at)), g[static_cast<std::size_t>(out)], x);
      if (at >= 0 && p.d_x) rows::store(p.d_x.type, p.d_x.row(p.axes, s.begin + at), d, x);
      if (at < 0 && p.d_initial)
        rows::store(p.d_initial.type, p.d_initial.row(s.number, p.back() + at), d, x);
    }
  }
};

// Without a row or a state to write there may be more sequences than anybody can count.
std::int64_t sequences(const Problem& p) {
  return p.axes.rows == 0 && !p.final && !p.d_initial ? 0 : p.sequences;
}

rlk_code run(const ShortConv& a, const Call& call) {
  if (const rlk_code code = short_conv::check_bounds(a, call); code != RLK_OK) return code;
  const Problem p = problem_of(a);
  call.parallel_for(p.width, [&](std::int64_t d) {
    for (std::int64_t n = 0; n < sequences(p); ++n) Channel{p, d}.forward(p.sequence(n));
  });
  return RLK_OK;
}

rlk_code run_backward(const ShortConvBwd& a, const Call& call) {
  if (const rlk_code code = short_conv::check_bounds(a, call); code != RLK_OK) return code;
  const Problem p = problem_of(a);
  call.parallel_for(p.width, [&](std::int64_t d) {
    double total[kMostTaps + 1] = {};
    for (std::int64_t n = 0; n < sequences(p); ++n) Channel{p, d}.backward(p.sequence(n), total);
    for (int t = 0; p.d_weight && t < p.taps; ++t)
      rows::store(p.d_weight.type, p.d_weight.data, d * p.taps + t, total[t]);
    if (p.d_bias) rows::store(p.d_bias.type, p.d_bias.data, d, total[p.taps]);
  });
  return RLK_OK;
}

constexpr Facts kFacts = golden_facts("ascending fp64 sums, one rounding");

}  // namespace

extern const rlk_implementation short_conv_golden, short_conv_bwd_golden;
constinit const rlk_implementation short_conv_golden = implement<ShortConv, run>(kFacts);
constinit const rlk_implementation short_conv_bwd_golden = implement<ShortConvBwd, run_backward>(kFacts);

}  // namespace rlk::native
