// From the typed arguments of short_conv and short_conv_bwd to a Problem.
#pragma once

#include "arithmetic/rows_bind.hpp"
#include "arithmetic/short_conv/conv.hpp"
#include "rlk/ops.hpp"

namespace rlk::conv32 {

template <class View>
State state_of(const View& v) {
  if (!v) return {};
  return {const_cast<void*>(static_cast<const void*>(v.template data<char>())), rows::type_of(v.dtype()),
          v.stride(0), v.stride(1)};
}
template <class View>
Parameter parameter_of(const View& v) {
  if (!v) return {};
  return {const_cast<void*>(static_cast<const void*>(v.template data<char>())), rows::type_of(v.dtype())};
}

template <class Args>
Problem options_of(const Args& a) {
  Problem p;
  p.tokens = a.x.dim(1);
  p.width = a.x.dim(2);
  p.taps = static_cast<int>(a.weight.dim(1));
  p.sequences = a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : a.x.dim(0);
  p.cu_seqlens = a.cu_seqlens.template data<std::int64_t>();
  p.x = rows::tensor_of(a.x);
  p.initial = state_of(a.initial_state);
  p.weight = parameter_of(a.weight);
  p.bias = parameter_of(a.bias);
  return p;
}

inline Problem problem_of(const ShortConv& a) {
  Problem p = options_of(a);
  p.y = rows::tensor_of(a.y);
  p.final = state_of(a.final_state);
  p.axes = rows::axes_of(a.x, {&p.x, &p.y});
  return p;
}

inline Problem problem_of(const ShortConvBwd& a) {
  Problem p = options_of(a);
  p.d_y = rows::tensor_of(a.d_y);
  p.d_x = rows::tensor_of(a.d_x);
  p.d_final = state_of(a.d_final_state);
  p.d_initial = state_of(a.d_initial_state);
  p.d_weight = parameter_of(a.d_weight);
  p.d_bias = parameter_of(a.d_bias);
  p.axes = rows::axes_of(a.x, {&p.x, &p.d_y, &p.d_x});
  return p;
}

}  // namespace rlk::conv32
