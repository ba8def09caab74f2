// From the typed arguments of attention and its kin to a Problem, a Backward and a Merge.
#pragma once

#include <cmath>

#include "arithmetic/attention/backward.hpp"
#include "arithmetic/fp8_bind.hpp"
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

// Keys or values, which are read as q's dtype.
template <class View>
Tensor cache_of(const View& v, const Tensor& q) {
  Tensor t = tensor_of(v);
  if (v.dtype() == DType::f8_e4m3) t.type = q.type, t.f8 = true;
  return t;
}

// [.., heads] as a Tensor of one channel.
template <class View>
Tensor per_head(const View& v) {
  if (!v) return {};
  Tensor t{const_cast<void*>(static_cast<const void*>(v.template data<char>()))};
  t.head = v.stride(-1), t.token = v.stride(-2), t.sequence = v.rank() > 2 ? v.stride(0) : 0;
  return t;
}

// Args is Attention, AttentionPart or AttentionBwd.
template <class Args>
Problem problem_of(const Args& a) {
  Problem p;
  p.q = tensor_of(a.q), p.k = cache_of(a.k, p.q), p.v = cache_of(a.v, p.q);
  if constexpr (requires { a.k_scale; })
    p.k_scale = rows::factors_of(a.k_scale), p.v_scale = rows::factors_of(a.v_scale);
  if constexpr (requires { a.partials; }) {
    p.k_first = integers_of(a.k_first), p.k_last = integers_of(a.k_last);
    p.partials = a.partials.template data<float>();
  } else {
    p.out = tensor_of(a.out), p.lse = per_head(a.lse);
    p.sinks = a.sinks ? a.sinks.template data<float>() : nullptr;
    p.prefix_of = integers_of(a.prefix_of);
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
  p.causal = a.causal, p.window = a.window;
  if constexpr (requires { a.split; }) p.split = a.split;
  p.scale64 = a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(p.width));
  p.cap64 = a.softcap;
  p.scale = static_cast<float>(p.scale64), p.cap = static_cast<float>(p.cap64);
  p.c = p.cap != 0 ? kLog2e : p.scale * kLog2e;
  return p;
}

inline Backward backward_of(const AttentionBwd& a) {
  Backward b{problem_of(a),    tensor_of(a.d_out), per_head(a.d_lse),
             tensor_of(a.d_q), tensor_of(a.d_k),   tensor_of(a.d_v)};
  b.key_batches = a.cu_k ? 1 : a.k.dim(0);
  b.d_sinks = a.d_sinks ? a.d_sinks.data<float>() : nullptr;
  return b;
}

inline Merge merge_of(const AttentionMerge& a) {
  const auto& t = a.partials;
  const bool dense = t.rank() == 6;
  Merge g{t.data<float>()};
  g.part = t.stride(0), g.sequence = dense ? t.stride(1) : 0, g.token = t.stride(-4), g.head = t.stride(-3);
  g.split = t.stride(-2);
  g.parts = t.dim(0), g.sequences = dense ? t.dim(1) : 1, g.tokens = t.dim(-4), g.heads = t.dim(-3);
  g.splits = t.dim(-2), g.width = static_cast<int>(t.dim(-1)) - 2;
  g.sinks = a.sinks ? a.sinks.data<float>() : nullptr;
  g.out = tensor_of(a.out), g.lse = per_head(a.lse);
  return g;
}

}  // namespace rlk::attn128
