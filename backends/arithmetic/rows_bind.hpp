// From tensors of a call to rows.hpp: leading axes are joined where every tensor walks them as one.
#pragma once

#include <initializer_list>

#include "arithmetic/rows.hpp"
#include "rlk/tensor.hpp"

namespace rlk::rows {

inline Type type_of(DType t) {
  return t == DType::bf16 ? Type::bf16 : t == DType::f16 ? Type::f16 : Type::f32;
}

template <class View>
Tensor tensor_of(const View& v) {
  if (!v) return {};
  Tensor t{const_cast<void*>(static_cast<const void*>(v.template data<char>())), type_of(v.dtype())};
  for (int i = 0; i + 1 < v.rank(); ++i) t.stride[i] = v.stride(i);
  return t;
}

// The axes of `v` but the last, joined; `tensors` have the same ones.
template <class View>
Axes axes_of(const View& v, std::initializer_list<Tensor*> tensors) {
  Axes axes;
  for (int i = 0; i + 1 < v.rank(); ++i) {
    const std::int64_t n = v.dim(i);
    if (n == 1) continue;
    axes.rows = n == 0 ? 0 : axes.rows * n;
    bool joins = axes.count > 0;
    for (const Tensor* t : tensors)
      if (*t && joins) joins = t->stride[axes.count - 1] == n * t->stride[i];
    const int at = joins ? axes.count - 1 : axes.count++;
    axes.size[at] = joins ? axes.size[at] * n : n;
    for (Tensor* t : tensors) t->stride[at] = t->stride[i];
    if (axes.rows == 0) break;  // other sizes may be as large as 64 bits hold
  }
  if (axes.count == 0) axes.count = 1, axes.size[0] = 1;
  return axes;
}

}  // namespace rlk::rows
