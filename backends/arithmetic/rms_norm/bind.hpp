// From the typed arguments of rms_norm and rms_norm_bwd to a Problem.
#pragma once

#include "arithmetic/rms_norm/norm.hpp"
#include "arithmetic/rows_bind.hpp"
#include "rlk/ops.hpp"

namespace rlk::rms32 {

template <class Args>
Problem options_of(const Args& a) {
  Problem p;
  p.eps = static_cast<float>(a.eps);
  p.offset = a.weight_offset;
  p.early = a.cast == Args::Cast::early;
  p.act = a.gate_act == Args::GateAct::silu ? Gate::silu : Gate::sigmoid;
  if (a.weight) p.weight = a.weight.template data<char>(), p.weight_type = rows::type_of(a.weight.dtype());
  p.x = rows::tensor_of(a.x);
  p.gate = rows::tensor_of(a.gate);
  p.rstd = rows::tensor_of(a.rstd);
  p.width = a.x.dim(-1);
  return p;
}

inline Problem problem_of(const RmsNorm& a) {
  Problem p = options_of(a);
  p.residual = rows::tensor_of(a.residual);
  p.y = rows::tensor_of(a.y);
  p.sum = rows::tensor_of(a.sum);
  p.axes = rows::axes_of(a.x, {&p.x, &p.residual, &p.gate, &p.y, &p.sum, &p.rstd});
  return p;
}

inline Problem problem_of(const RmsNormBwd& a) {
  Problem p = options_of(a);
  if (a.sum)
    p.x = rows::tensor_of(a.sum);
  else
    p.residual = rows::tensor_of(a.residual);
  p.d_y = rows::tensor_of(a.d_y);
  p.d_sum = rows::tensor_of(a.d_sum);
  p.d_x = rows::tensor_of(a.d_x);
  p.d_residual = rows::tensor_of(a.d_residual);
  p.d_gate = rows::tensor_of(a.d_gate);
  if (a.d_weight) p.d_weight = a.d_weight.data<char>(), p.d_weight_type = rows::type_of(a.d_weight.dtype());
  p.axes = rows::axes_of(
      a.x, {&p.x, &p.residual, &p.gate, &p.rstd, &p.d_y, &p.d_sum, &p.d_x, &p.d_residual, &p.d_gate});
  return p;
}

}  // namespace rlk::rms32
