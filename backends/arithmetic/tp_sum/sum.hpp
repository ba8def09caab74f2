// tp_sum as plain data, and the top of the tree (arithmetic id tree8). Templates over float or a GCC vector of float.
#pragma once

#include "arithmetic/rows.hpp"

namespace rlk::tree8 {

// `partials` is the first of `count`, `step` elements apart.
struct Problem {
  rows::Axes axes;
  std::int64_t width = 0, step = 0;
  int count = 1;
  rows::Tensor partials, residual, y;
  const void* bias = nullptr;
  rows::Type bias_type = rows::Type::f32;
};

template <class T>
RLK_HD T four(T a, T b, T c, T d) {
  return (a + b) + (c + d);
}
template <class T>
RLK_HD T eight(T a, T b, T c, T d, T e, T f, T g, T h) {
  return four(a, b, c, d) + four(e, f, g, h);
}

}  // namespace rlk::tree8
