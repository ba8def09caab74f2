// From the typed arguments of attention to a Problem.
#pragma once

#include <cmath>

#include "arithmetic/attention/problem.hpp"
#include "arithmetic/rows_bind.hpp"
#include "rlk/ops.hpp"

namespace rlk::attn128 {

template <class View>
Integers integers_of(const View& v) {
  if (!v) return {};
  return {v.template data<char>(), v.dtype() == DType::i64, {v.stride(0), v.rank() > 1 ? v.stride(1) : 0}};
}

template <class View>
Tensor tensor_of(const View& v) {
  if (!v) return {};
  Tensor t{const_cast<void*>(static_cast<const void*>(v.template data<char>())), rows::type_of(v.dtype())};
  t.head = v.stride(-2), t.token = v.stride(-3), t.sequence = v.rank() > 3 ? v.stride(0) : 0;
  return t;
}

inline Problem problem_of(const Attention& a) {
  Problem p;
  p.q = tensor_of(a.q), p.k = tensor_of(a.k), p.v = tensor_of(a.v), p.out = tensor_of(a.out);
  if (a.lse) {
    p.lse.data = a.lse.data<char>();
    p.lse.head = 1, p.lse.token = a.lse.stride(-2), p.lse.sequence = a.lse.rank() > 2 ? a.lse.stride(0) : 0;
  }
  p.cu_q = integers_of(a.cu_q), p.cu_k = integers_of(a.cu_k), p.kv_len = integers_of(a.kv_len);
  p.block_table = integers_of(a.block_table);
  // Without queries there is nothing to do, however large the other sizes are.
  p.sequences = a.q.numel() == 0 ? 0 : a.cu_q ? a.cu_q.dim(0) - 1 : a.q.dim(0);
  p.queries = a.q.numel() == 0 ? 0 : a.q.dim(-3);
  p.room = a.k.dim(-3);
  if (a.block_table) {
    p.page_size = p.room, p.pages = a.k.dim(0);
    if (__builtin_mul_overflow(p.page_size, a.block_table.dim(1), &p.room)) p.room = INT64_MAX;
  }
  p.heads = static_cast<int>(a.k.dim(-2));
  p.group = static_cast<int>(a.q.dim(-2)) / p.heads;
  p.width = static_cast<int>(a.q.dim(-1)), p.value_width = static_cast<int>(a.v.dim(-1));
  p.sinks = a.sinks ? a.sinks.data<float>() : nullptr;
  p.causal = a.causal, p.window = a.window, p.split = a.split;
  p.scale64 = a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(p.width));
  p.cap64 = a.softcap;
  p.scale = static_cast<float>(p.scale64), p.cap = static_cast<float>(p.cap64);
  p.c = p.cap != 0 ? kLog2e : p.scale * kLog2e;
  return p;
}

}  // namespace rlk::attn128
