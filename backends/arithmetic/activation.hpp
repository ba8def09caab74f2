// Gated activations and their slopes, in fp32 (arithmetic ids act32 and rms32): templates over float or a GCC vector of
// float. Every operation is rounded to nearest; exp_32 is that of math.hpp.
//
//   logistic(t) = 1 / (1 + exp_32(-t))        g * logistic(t) is computed as g / (1 + exp_32(-t))
//
// Beyond exp_32's range the quotient is 0 or g without a NaN: silu(-inf) = -0, and a slope never multiplies Inf by 0.
#pragma once

#include "arithmetic/math.hpp"

namespace rlk::activation {

template <class T>
RLK_HD T logistic(T t) {
  const T minus = -t;
  return (T{} + 1) / (simt::exp<T>(minus) + 1);
}

// g * logistic(t), where t goes to -inf with g, from e = exp_32(-t).
template <class T>
RLK_HD T gated_by(T g, T e) {
  const T infinity = T{} + __builtin_inff();
  const T quotient = g / (e + 1);
  return g == -infinity ? -T{} : quotient;
}
template <class T>
RLK_HD T gated(T g, T t) {
  const T minus = -t;
  return gated_by<T>(g, simt::exp<T>(minus));
}

// d/dg of g * logistic(t) with dt/dg = slope, times `factor`: factor s (1 + g slope (1 - s)) from left to right, and +0
// where s is 0. 1 - s is e s with e = exp_32(-t): the difference would keep nothing of it where s is close to 1.
template <class T>
RLK_HD T times_slope_by(T factor, T g, T e, T slope) {
  const T one = T{} + 1, zero = T{};
  const T s = one / (e + 1);
  const T rest = e * s;
  const T bend = simt::fused(g * slope, rest, one);
  const T inner = rest == zero ? one : bend;
  const T product = factor * s * inner;
  return s == zero ? zero : product;
}
template <class T>
RLK_HD T times_slope(T factor, T g, T t, T slope) {
  const T minus = -t;
  return times_slope_by<T>(factor, g, simt::exp<T>(minus), slope);
}

enum class Gate : std::int32_t { silu, sigmoid };

template <class T>
RLK_HD T value(Gate kind, T g) {
  return kind == Gate::silu ? gated<T>(g, g) : logistic<T>(g);
}
template <class T>
RLK_HD T slope(Gate kind, T g) {
  const T one = T{} + 1, zero = T{}, minus = -g;
  if (kind == Gate::silu) return times_slope<T>(one, g, g, one);
  const T e = simt::exp<T>(minus);
  const T s = one / (e + 1);
  const T product = s * (e * s);
  return s == zero ? zero : product;
}

}  // namespace rlk::activation
