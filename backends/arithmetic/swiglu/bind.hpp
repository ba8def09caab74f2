// From the typed arguments of swiglu and swiglu_bwd to a Problem.
#pragma once

#include "arithmetic/rows_bind.hpp"
#include "arithmetic/swiglu/swiglu.hpp"
#include "rlk/ops.hpp"

namespace rlk::act32 {

// The second half of every row.
inline Tensor second_half(Tensor t, std::int64_t width) {
  if (t) t.data = static_cast<char*>(t.data) + width * rows::size_of(t.type);
  return t;
}

template <class Args>
Problem options_of(const Args& a) {
  Problem p;
  p.act = static_cast<Act>(static_cast<int>(a.act));
  p.twice = a.roundings == Args::Roundings::twice;
  p.limit = static_cast<float>(a.limit);
  p.alpha = static_cast<float>(a.alpha);
  p.offset = static_cast<float>(a.up_offset);
  p.width = a.up ? a.gate.dim(-1) : a.gate.dim(-1) / 2;
  p.gate = rows::tensor_of(a.gate);
  p.up = a.up ? rows::tensor_of(a.up) : second_half(p.gate, p.width);
  return p;
}

inline Problem problem_of(const Swiglu& a) {
  Problem p = options_of(a);
  p.out = rows::tensor_of(a.out);
  p.axes = rows::axes_of(a.gate, {&p.gate, &p.up, &p.out});
  return p;
}

inline Problem problem_of(const SwigluBwd& a) {
  Problem p = options_of(a);
  p.d_out = rows::tensor_of(a.d_out);
  p.d_gate = rows::tensor_of(a.d_gate);
  p.d_up = a.up ? rows::tensor_of(a.d_up) : second_half(p.d_gate, p.width);
  p.axes = rows::axes_of(a.gate, {&p.gate, &p.up, &p.d_out, &p.d_gate, &p.d_up});
  return p;
}

}  // namespace rlk::act32
