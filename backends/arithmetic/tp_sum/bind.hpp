// From the typed arguments of tp_sum to a Problem.
#pragma once

#include "arithmetic/rows_bind.hpp"
#include "arithmetic/tp_sum/sum.hpp"
#include "rlk/ops.hpp"

namespace rlk::tree8 {

inline Problem problem_of(const TpSum& a) {
  Problem p;
  p.width = a.y.dim(1);
  p.count = static_cast<int>(a.partials.dim(0));
  p.step = a.partials.stride(0);
  p.partials = rows::tensor_of(a.partials);
  p.partials.stride[0] = a.partials.stride(1);  // its rows are those of y
  p.residual = rows::tensor_of(a.residual);
  p.y = rows::tensor_of(a.y);
  p.axes = rows::axes_of(a.y, {&p.partials, &p.residual, &p.y});
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = rows::type_of(a.bias.dtype());
  return p;
}

}  // namespace rlk::tree8
