// tp_sum and its gradients as plain data, and the top of the tree (arithmetic id tree8). Templates over float or a GCC vector
// of float.
#pragma once

#include "arithmetic/rows.hpp"

namespace rlk::tree8 {

inline constexpr int kMost = 8;  // partial sums

// The first `count` of the partial sums, from the first row that is summed on.
struct Problem {
  rows::Axes axes;
  std::int64_t width = 0;
  int count = 1;
  rows::Tensor partials[kMost], residual, y;
  const void* bias = nullptr;
  rows::Type bias_type = rows::Type::f32;
};

// d_y to the gradients of partial sums, +0 to their rows that were not summed; and to the residual's.
struct Spread {
  std::int64_t rows = 0, width = 0, first = 0,
               count = 0;  // of partials; those summed are [first, first + count)
  int results = 0;
  rows::Tensor d_y, d_partials[kMost], d_residual;

  RLK_HD bool summed(std::int64_t row) const { return row >= first && row < first + count; }
};
RLK_HD void* line(const rows::Tensor& t, std::int64_t row) {
  return static_cast<char*>(t.data) + row * t.stride[0] * rows::size_of(t.type);
}

template <class T>
RLK_HD T four(T a, T b, T c, T d) {
  return (a + b) + (c + d);
}
template <class T>
RLK_HD T eight(T a, T b, T c, T d, T e, T f, T g, T h) {
  return four(a, b, c, d) + four(e, f, g, h);
}

}  // namespace rlk::tree8
