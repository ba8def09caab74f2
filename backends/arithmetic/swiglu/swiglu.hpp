// swiglu in fp32 (arithmetic id act32): the call as plain data, and what is done to one element. Templates over float, a GCC
// vector of float, or double (golden), for native code and GPU kernels alike.
//
// All activations are g / (1 + exp(-t)): silu has t = g, silu_clamped t = alpha g, and gelu_tanh twice tanh's argument, since
// (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)).
#pragma once

#include "arithmetic/activation.hpp"
#include "arithmetic/rows.hpp"

namespace rlk::act32 {

using rows::Tensor;
using rows::Type;

enum class Act : std::int32_t { silu, gelu_tanh, silu_clamped };

// `up` and `d_up` are tensors of their own, wherever they lie.
struct Problem {
  rows::Axes axes;
  std::int64_t width = 0;
  Act act = Act::silu;
  bool twice = false;
  float limit = 0, alpha = 0, offset = 0;
  Tensor gate, up, out, d_out, d_gate, d_up;
};

// 2 sqrt(2 / pi), and that times 0.044715.
template <class T>
struct Gelu {
  static constexpr float kFirst = 1.595769122f, kThird = 0.07135481283f;
};
template <>
struct Gelu<double> {
  static constexpr double kFirst = 1.5957691216057308, kThird = 0.07135481627260025;
};

// What goes into the sigmoid, its derivative, and the factor before it.
template <class T>
struct Inside {
  T g, t, slope;
};
template <class T>
RLK_HD Inside<T> inside(const Problem& p, T gate) {
  const T one = T{} + 1;
  if (p.act == Act::silu) return {gate, gate, one};
  if (p.act == Act::gelu_tanh) {
    const T square = gate * gate, first = T{} + Gelu<T>::kFirst, third = T{} + Gelu<T>::kThird;
    return {gate, gate * simt::fused(square, third, first), simt::fused(square, 3 * third, first)};
  }
  const T limit = T{} + p.limit, alpha = T{} + p.alpha;
  const T held = gate > limit ? limit : gate;
  return {held, alpha * held, alpha};
}

template <class T>
RLK_HD T held_up(const Problem& p, T up) {
  if (p.act != Act::silu_clamped) return up;
  const T limit = T{} + p.limit, minus = -limit;
  const T below = up > limit ? limit : up;
  const T held = below < minus ? minus : below;
  return held + p.offset;
}

// exp_32(-t), which the activation and its slope share.
template <class T>
RLK_HD T falling(const Inside<T>& in) {
  const T minus = -in.t;
  return simt::exp<T>(minus);
}

// act(gate), before any rounding.
template <class T>
RLK_HD T activated(const Inside<T>& in, T e) {
  return activation::gated_by<T>(in.g, e);
}
template <class T>
RLK_HD T activated(const Problem& p, T gate) {
  const Inside<T> in = inside(p, gate);
  return activated(in, falling(in));
}

template <class T>
RLK_HD T d_gate(const Problem& p, const Inside<T>& in, T e, T d_out, T gate, T up) {
  const T d = activation::times_slope_by<T>(d_out * held_up(p, up), in.g, e, in.slope);
  if (p.act != Act::silu_clamped) return d;
  return gate > T{} + p.limit ? T{} : d;
}
template <class T>
RLK_HD T d_gate(const Problem& p, T d_out, T gate, T up) {
  const Inside<T> in = inside(p, gate);
  return d_gate(p, in, falling(in), d_out, gate, up);
}

// From act(gate) as the product took it.
template <class T>
RLK_HD T d_up(const Problem& p, T d_out, T activated, T up) {
  const T d = d_out * activated;
  if (p.act != Act::silu_clamped) return d;
  const T limit = T{} + p.limit, minus = -limit;
  const T above = up > limit ? T{} : d;
  return up < minus ? T{} : above;
}

}  // namespace rlk::act32
