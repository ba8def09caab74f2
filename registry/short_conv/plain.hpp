// short_conv and its gradients in plain loops over elements, independent of every kernel: in fp64 the reference, in fp32 the
// written rule of conv32. `Math` has the two functions that differ, and how a channel's gradients are added up over rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "registry/reference.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::short_conv {

// A sequence's rows among all of x.
struct Span {
  int64_t number, begin, end;
};

template <class Args>
std::vector<Span> sequences(const Args& a) {
  std::vector<Span> all;
  const int64_t tokens = a.x.dim(1), n = a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : a.x.dim(0);
  for (int64_t i = 0; i < n; ++i) {
    if (a.cu_seqlens) {
      const auto* bounds = a.cu_seqlens.template data<int64_t>();
      all.push_back({i, bounds[i], bounds[i + 1]});
    } else {
      all.push_back({i, i * tokens, (i + 1) * tokens});
    }
  }
  return all;
}

// A call's tensors and sizes, in numbers of type T.
template <class T, class Args>
struct Operands {
  const Args& a;
  Rows x{a.x}, weight{a.weight};
  int64_t taps = a.weight.dim(1), channels = a.x.dim(2);

  T w(int64_t d, int64_t tap) const { return static_cast<T>(weight.get(d, tap)); }
  // Input `at` of a sequence; those before its first are its state.
  T input(const Span& s, int64_t at, int64_t d) const {
    if (at >= 0) return static_cast<T>(x.get(s.begin + at, d));
    if (!a.initial_state) return 0;
    return static_cast<T>(Rows(a.initial_state).get((s.number + 1) * (taps - 1) + at, d));
  }
  // What goes through silu.
  T sum(const Span& s, int64_t at, int64_t d) const {
    T z = 0;
    for (int64_t tap = 0; tap < taps; ++tap) z = std::fma(w(d, tap), input(s, at - (taps - 1) + tap, d), z);
    return a.bias ? z + static_cast<T>(Rows(a.bias).get(0, d)) : z;
  }
};

template <class Math>
void forward(const ShortConv& a) {
  using T = typename Math::Number;
  const Operands<T, ShortConv> of{a};
  for (const Span& s : sequences(a))
    for (int64_t d = 0; d < of.channels; ++d) {
      for (int64_t at = 0; at < s.end - s.begin; ++at)
        Math::set(a.y, s.begin + at, d, Math::silu(of.sum(s, at, d)));
      for (int64_t r = 0; a.final_state && r < of.taps - 1; ++r)
        Math::set(a.final_state, s.number * (of.taps - 1) + r, d,
                  of.input(s, s.end - s.begin - (of.taps - 1) + r, d));
    }
}

template <class Math>
void backward(const ShortConvBwd& a) {
  using T = typename Math::Number;
  const Operands<T, ShortConvBwd> of{a};
  const int64_t back = of.taps - 1;
  for (int64_t d = 0; d < of.channels; ++d) {
    std::vector<typename Math::Sum> d_weight(static_cast<std::size_t>(of.taps));
    typename Math::Sum d_bias;
    for (const Span& s : sequences(a)) {
      const int64_t length = s.end - s.begin;
      std::vector<T> g;  // gradients of the sums
      for (int64_t at = 0; at < length; ++at) {
        const T d_y = static_cast<T>(Rows(a.d_y).get(s.begin + at, d));
        g.push_back(Math::times_slope(d_y, of.sum(s, at, d)));
        for (int64_t tap = 0; tap < of.taps; ++tap)
          d_weight[static_cast<std::size_t>(tap)].add(g.back(), of.input(s, at - back + tap, d),
                                                      s.begin + at);
        d_bias.add(g.back(), 1, s.begin + at);
      }
      for (int64_t at = -back; at < length; ++at) {
        T sum = 0;
        if (const int64_t r = at - (length - back); a.d_final_state && r >= 0)
          sum = static_cast<T>(Rows(a.d_final_state).get(s.number * back + r, d));
        for (int64_t out = std::min(at + back, length - 1); out >= std::max<int64_t>(at, 0); --out)
          sum = std::fma(of.w(d, back - (out - at)), g[static_cast<std::size_t>(out)], sum);
        if (at >= 0)
          Math::set(a.d_x, s.begin + at, d, sum);
        else
          Math::set(a.d_initial_state, (s.number + 1) * back + at, d, sum);
      }
    }
    for (int64_t tap = 0; tap < of.taps; ++tap)
      Math::set(a.d_weight, d, tap, d_weight[static_cast<std::size_t>(tap)].value());
    Math::set(a.d_bias, 0, d, d_bias.value());
  }
}

}  // namespace rlk::registry::short_conv
