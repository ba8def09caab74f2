// From the typed arguments of qk_norm_rope to a Problem.
#pragma once

#include "arithmetic/fp8_bind.hpp"
#include "arithmetic/qk_norm_rope/problem.hpp"
#include "arithmetic/rows_bind.hpp"
#include "rlk/ops.hpp"

namespace rlk::rms32_rope32 {

template <class View>
Place place_of(const View& v) {
  if (!v) return {};
  return {const_cast<void*>(static_cast<const void*>(v.template data<char>())), v.stride(0), v.stride(1)};
}

inline rotary::Integers integers_of(const In& v) {
  if (!v) return {};
  return {v.data<char>(), v.dtype() == DType::i64};
}

inline Problem problem_of(const QkNormRope& a) {
  Problem p;
  p.tokens = a.q.dim(0);
  p.dims = static_cast<std::int32_t>(a.q.dim(2));
  p.turned = static_cast<std::int32_t>(2 * a.cos.dim(1));
  p.type = rows::type_of(a.q.dtype());
  p.table_type = rows::type_of(a.cos.dtype());
  p.eps = static_cast<float>(a.eps);
  p.offset = a.weight_offset;
  p.early = a.cast == QkNormRope::Cast::early;
  p.adjacent = a.pairing == QkNormRope::Pairing::adjacent;
  p.q = {a.q.dim(1), place_of(a.q), place_of(a.q_out), {}};
  p.k = {a.k.dim(1), place_of(a.k), place_of(a.k_out), place_of(a.k_cache)};
  if (!p.k.y && !p.k.cache) p.k.heads = 0;  // nobody asks for them
  if (a.v) {
    p.v = {a.v.dim(1), place_of(a.v), {}, place_of(a.v_cache)};
    p.v_dims = static_cast<std::int32_t>(a.v.dim(2));
  }
  for (const InOut& cache : {a.k_cache, a.v_cache}) p.f8 |= cache && cache.dtype() == DType::f8_e4m3;
  p.k.factors = rows::factors_of(a.k_scale), p.v.factors = rows::factors_of(a.v_scale);
  if (a.q_weight) {
    p.q.weight = a.q_weight.data<char>(), p.k.weight = a.k_weight.data<char>();
    p.weight_type = rows::type_of(a.q_weight.dtype());
  }
  p.cos = a.cos.data<char>(), p.sin = a.sin.data<char>();
  p.cos_row = a.cos.stride(0), p.sin_row = a.sin.stride(0), p.rows = a.cos.dim(0);
  p.positions = integers_of(a.positions);
  p.slots = integers_of(a.slots);
  p.places = a.k_cache ? a.k_cache.dim(0) : a.v_cache ? a.v_cache.dim(0) : 0;
  return p;
}

}  // namespace rlk::rms32_rope32
