// swiglu as plainly as it can be said, in fp64, one rounding of every result.
#include "registry/reference.hpp"

#include <algorithm>
#include <numbers>

#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }

// One element: act(g) and its slope, what up became and its slope.
struct Element {
  double value, slope, up, up_slope;
};

// g s(t), and its slope s + g s (1 - s) dt/dg, where t goes to infinity with g.
void gated(double g, double t, double dt, Element& e) {
  const double s = sigmoid(t), rest = sigmoid(-t);
  e.value = g == -INFINITY ? 0 : g * s;
  e.slope = s == 0 ? 0 : rest == 0 ? s : s + g * s * rest * dt;
}

template <class Args>
Element element(const Args& a, double g, double u) {
  Element e{0, 0, u, 1};
  const double c = 2 * std::sqrt(2 / std::numbers::pi);
  if (a.act == Args::Act::silu) {
    gated(g, g, 1, e);
  } else if (a.act == Args::Act::gelu_tanh) {  // (1 + tanh z) / 2 is the sigmoid of 2 z
    gated(g, c * (g + 0.044715 * g * g * g), c * (1 + 3 * 0.044715 * g * g), e);
  } else {
    const double alpha = static_cast<float>(a.alpha), limit = static_cast<float>(a.limit);
    const double held = g > limit ? limit : g;
    gated(held, alpha * held, alpha, e);
    if (g > limit) e.slope = 0;
    e.up_slope = u > limit || u < -limit ? 0 : 1;
    e.up = (std::isnan(u) ? u : std::clamp(u, -limit, limit)) + static_cast<float>(a.up_offset);
  }
  if (a.roundings == Args::Roundings::twice) e.value = round_to(a.gate.dtype(), e.value);
  return e;
}

// gate and up of a row, whether they lie in one tensor or in two.
template <class Args>
struct Pair {
  Rows gate, up;
  int64_t width, first;
  explicit Pair(const Args& a)
      : gate(a.gate),
        up(a.up ? a.up : a.gate),
        width(a.up ? gate.width() : gate.width() / 2),
        first(a.up ? 0 : width) {}
  Element at(const Args& a, int64_t m, int64_t i) const {
    return element(a, gate.get(m, i), up.get(m, first + i));
  }
};

}  // namespace

int32_t swiglu_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const Swiglu*>(slots);
  const Pair<Swiglu> in(a);
  for (int64_t m = 0; m < in.gate.count(); ++m)
    for (int64_t i = 0; i < in.width; ++i) {
      const Element e = in.at(a, m, i);
      Rows(a.out).set(m, i, e.value * e.up);
    }
  return RLK_OK;
}

int32_t swiglu_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const SwigluBwd*>(slots);
  const Pair<SwigluBwd> in(a);
  for (int64_t m = 0; m < in.gate.count(); ++m)
    for (int64_t i = 0; i < in.width; ++i) {
      const Element e = in.at(a, m, i);
      const double d = Rows(a.d_out).get(m, i);
      const double d_up = e.up_slope == 0 ? 0 : d * e.value;
      if (a.d_gate) Rows(a.d_gate).set(m, i, e.slope == 0 ? 0 : d * e.up * e.slope);
      if (a.d_gate && !a.up) Rows(a.d_gate).set(m, in.width + i, d_up);
      if (a.d_up) Rows(a.d_up).set(m, i, d_up);
    }
  return RLK_OK;
}

}  // namespace rlk::registry
