// From the typed arguments of tp_sum and tp_sum_bwd to a Problem and a Spread.
#pragma once

#include "arithmetic/rows_bind.hpp"
#include "arithmetic/tp_sum/sum.hpp"
#include "rlk/ops.hpp"

namespace rlk::tree8 {

// A matrix, or the t-th of a stack, from `row` on.
template <class View>
rows::Tensor matrix_of(const View& v, std::int64_t t = 0, std::int64_t row = 0) {
  if (!v) return {};
  rows::Tensor m = rows::tensor_of(v);
  const bool stacked = v.rank() == 3;
  if (stacked) m.stride[0] = v.stride(1);
  m.data = static_cast<char*>(m.data) +
           ((stacked ? t * v.stride(0) : 0) + row * m.stride[0]) * rows::size_of(m.type);
  return m;
}

// The partial sums of a stack, or those that lie in tensors of their own; the number of them.
template <class View>
int matrices_of(const View& first, const View* const (&others)[kMost - 1], std::int64_t row,
                rows::Tensor (&to)[kMost]) {
  int count = 0;
  if (first && first.rank() == 3) {
    for (; count < first.dim(0); ++count) to[count] = matrix_of(first, count, row);
    return count;
  }
  if (first) to[count++] = matrix_of(first, 0, row);
  for (const View* other : others)
    if (*other) to[count++] = matrix_of(*other, 0, row);
  return count;
}

inline Problem problem_of(const TpSum& a) {
  Problem p;
  p.width = a.y.dim(1);
  p.count =
      matrices_of(a.partials, {&a.p1, &a.p2, &a.p3, &a.p4, &a.p5, &a.p6, &a.p7}, a.row_first, p.partials);
  p.residual = rows::tensor_of(a.residual);
  p.y = rows::tensor_of(a.y);
  rows::Tensor* const x = p.partials;
  p.axes = rows::axes_of(a.y, {x, x + 1, x + 2, x + 3, x + 4, x + 5, x + 6, x + 7, &p.residual, &p.y});
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = rows::type_of(a.bias.dtype());
  return p;
}

inline Spread spread_of(const TpSumBwd& a) {
  Spread p;
  p.rows = a.partials.dim(-2), p.width = a.partials.dim(-1);
  p.first = a.row_first, p.count = a.d_y.dim(0);
  p.results = matrices_of(a.d_partials, {&a.d_p1, &a.d_p2, &a.d_p3, &a.d_p4, &a.d_p5, &a.d_p6, &a.d_p7}, 0,
                          p.d_partials);
  p.d_y = matrix_of(a.d_y), p.d_residual = matrix_of(a.d_residual);
  return p;
}

}  // namespace rlk::tree8
