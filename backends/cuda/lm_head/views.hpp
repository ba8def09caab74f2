// From the op's tensors to the products' operands: leading dimensions collapsed to rows, dtypes named, sizes
// checked.
#pragma once

#include <algorithm>

#include "cuda/lm_head/gemm.h"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::cuda::lm_head {

// All dimensions but the last as rows with one stride, or ok = false where no single stride describes them.
struct RowsOf {
  std::int64_t rows = 1, stride = 0;
  bool ok = true;
};

template <bool Writable>
RowsOf rows_of(const View<Writable>& t) {
  RowsOf r;
  bool placed = false;
  for (int i = std::min(t.rank(), RLK_MAX_RANK) - 2; i >= 0; --i) {
    const std::int64_t size = t.dim(i);
    if (size == 1) continue;
    if (!placed)
      r.stride = t.stride(i);
    else if (r.rows != 0 && t.stride(i) != r.stride * r.rows)
      r.ok = false;
    placed = true;
    r.rows *= size;
  }
  if (!placed) r.stride = t.dim(-1);
  if (r.rows > 1 && r.stride < t.dim(-1)) r.ok = false;  // broadcast or reversed rows
  return r;
}

// A tensor as rows by what is summed over, or as what is summed over by rows.
template <bool Writable>
Operand operand(const View<Writable>& t, bool k_contiguous) {
  return {t.template data<void>(), rows_of(t).stride, k_contiguous, float_of(t.dtype())};
}

inline Gemm forward_product(const LmHead& a) {
  const RowsOf hidden = rows_of(a.hidden), out = rows_of(a.out);
  Gemm g;
  g.m = hidden.rows, g.n = a.weight.dim(0), g.k = a.weight.dim(1);
  g.a = operand(a.hidden, true), g.b = operand(a.weight, true);
  g.c = a.out.data<void>(), g.ldc = out.stride, g.out = float_of(a.out.dtype());
  g.bias = a.bias ? a.bias.data<void>() : nullptr;
  return g;
}

// d_hidden[M, K] = d_out[M, V] * weight[V, K]: the chain runs over V.
inline Gemm d_hidden_product(const LmHeadBwd& a) {
  const RowsOf d_out = rows_of(a.d_out), out = rows_of(a.d_hidden);
  Gemm g;
  g.m = d_out.rows, g.n = a.weight.dim(1), g.k = a.weight.dim(0);
  g.a = operand(a.d_out, true), g.b = operand(a.weight, false);
  g.c = a.d_hidden.data<void>(), g.ldc = out.stride, g.out = float_of(a.d_hidden.dtype());
  return g;
}

// d_weight[V, K] = d_out[M, V]^T * hidden[M, K]: the chain runs over M.
inline Gemm d_weight_product(const LmHeadBwd& a) {
  const RowsOf d_out = rows_of(a.d_out), out = rows_of(a.d_weight);
  Gemm g;
  g.m = a.weight.dim(0), g.n = a.weight.dim(1), g.k = d_out.rows;
  g.a = operand(a.d_out, false), g.b = operand(a.hidden, false);
  g.c = a.d_weight.data<void>(), g.ldc = out.stride, g.out = float_of(a.d_weight.dtype());
  return g;
}

// What TMA needs of both operands.
inline rlk_verdict check_aligned(const Operand& a, const Operand& b) {
  if (aligned16(a) && aligned16(b)) return kAccept;
  return refuse("an input's rows do not start on 16 bytes, as TMA needs", {},
                "pad rows to a multiple of 8 elements: same bits");
}

// What every implementation here needs of a product; `argument` names it in the refusal.
template <bool Writable>
rlk_verdict check_rows(const View<Writable>& t, int argument) {
  if (!rows_of(t).ok)
    return refuse("the leading dimensions have no single row stride", {}, "make them contiguous", argument);
  if (t.dtype() == DType::f64)
    return refuse("fp64 results come from the reference only", {}, "fp32", argument);
  return kAccept;
}

inline rlk_verdict check_products(const LmHead& a) {
  rlk_verdict v = check_rows(a.hidden, 0);
  if (v.code == RLK_OK) v = check_rows(a.weight, 1);
  return v.code == RLK_OK ? check_rows(a.out, 3) : v;
}
inline rlk_verdict check_products(const LmHeadBwd& a) {
  rlk_verdict v = check_rows(a.d_out, 0);
  if (v.code == RLK_OK) v = check_rows(a.hidden, 1);
  if (v.code == RLK_OK) v = check_rows(a.weight, 2);
  if (v.code == RLK_OK && a.d_hidden) v = check_rows(a.d_hidden, 3);
  if (v.code == RLK_OK && a.d_weight) v = check_rows(a.d_weight, 4);
  if (v.code == RLK_OK && a.d_bias && a.d_bias.dtype() == DType::f64) v = check_rows(a.d_bias, 5);
  return v;
}

}  // namespace rlk::cuda::lm_head
