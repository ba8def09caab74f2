// act32 as the page has it, in plain loops, independent of every kernel. fma64 has no rule here: another exponential in fp64
// may differ in its last bit.
#include <cmath>

#include "registry/exp32.hpp"
#include "registry/op.hpp"
#include "registry/reference.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

float get(const Rows& t, int64_t row, int64_t i) { return static_cast<float>(t.get(row, i)); }
void set(const Out& view, int64_t row, int64_t i, float x) {
  Rows(view).set(row, i, view.dtype() == DType::f32 ? canonical(x) : x);
}

// g' / (1 + exp(-t)): g', t and dt/dg'.
struct Inside {
  float g, t, slope;
};
template <class Args>
Inside inside(const Args& a, float g) {
  if (a.act == Args::Act::silu) return {g, g, 1.0f};
  if (a.act == Args::Act::gelu_tanh) {
    const float first = 1.595769122f, third = 0.07135481283f, square = g * g;
    return {g, g * std::fma(square, third, first), std::fma(square, 3.0f * third, first)};
  }
  const auto limit = static_cast<float>(a.limit), alpha = static_cast<float>(a.alpha);
  const float held = g > limit ? limit : g;
  return {held, alpha * held, alpha};
}

// One element: act(gate) as it multiplies, up as it is multiplied.
struct Element {
  Inside in;
  float act, up, s, rest;
  bool gate_held = false, up_held = false;
};
template <class Args>
Element element(const Args& a, float gate, float up) {
  Element e{inside(a, gate), 0, up, 0, 0};
  const float below = 1.0f + exp32(-e.in.t);
  e.act = e.in.g == -INFINITY ? -0.0f : e.in.g / below;
  e.s = 1.0f / below;
  e.rest = exp32(-e.in.t) * e.s;
  if (a.roundings == Args::Roundings::twice) e.act = static_cast<float>(round_to(a.gate.dtype(), e.act));
  if (a.act == Args::Act::silu_clamped) {
    const auto limit = static_cast<float>(a.limit);
    e.gate_held = gate > limit, e.up_held = up > limit || up < -limit;
    e.up = (up > limit ? limit : up < -limit ? -limit : up) + static_cast<float>(a.up_offset);
  }
  return e;
}

template <class Args, class Body>
void for_elements(const Args& a, Body body) {
  const Rows gate(a.gate), up(a.up ? a.up : a.gate);
  const int64_t width = a.up ? gate.width() : gate.width() / 2, first = a.up ? 0 : width;
  for (int64_t m = 0; m < gate.count(); ++m)
    for (int64_t i = 0; i < width; ++i) body(m, i, width, element(a, get(gate, m, i), get(up, m, first + i)));
}

}  // namespace

bool swiglu_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "act32") return false;
  const auto& a = *reinterpret_cast<const Swiglu*>(q.slots);
  for_elements(a, [&](int64_t m, int64_t i, int64_t, const Element& e) { set(a.out, m, i, e.act * e.up); });
  return true;
}

bool swiglu_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "act32") return false;
  const auto& a = *reinterpret_cast<const SwigluBwd*>(q.slots);
  const Rows d_out(a.d_out);
  for_elements(a, [&](int64_t m, int64_t i, int64_t width, const Element& e) {
    const float d = get(d_out, m, i);
    const float bend = e.rest == 0 ? 1.0f : std::fma(e.in.g * e.in.slope, e.rest, 1.0f);
    const float d_gate = e.s == 0 || e.gate_held ? 0.0f : d * e.up * e.s * bend;
    const float d_up = e.up_held ? 0.0f : d * e.act;
    if (a.d_gate) set(a.d_gate, m, i, d_gate);
    if (a.d_gate && !a.up) set(a.d_gate, m, width + i, d_up);
    if (a.d_up) set(a.d_up, m, i, d_up);
  });
  return true;
}

}  // namespace rlk::registry
