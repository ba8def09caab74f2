// From the typed arguments of logp, logp_bwd and their relatives to a Problem.
#pragma once

#include <algorithm>

#include "arithmetic/logp/logp.hpp"
#include "arithmetic/rows_bind.hpp"
#include "rlk/ops.hpp"

namespace rlk::lse128 {

template <class View>
Matrix matrix_of(const View& v) {
  if (!v) return {};
  return {const_cast<void*>(static_cast<const void*>(v.template data<char>())), rows::type_of(v.dtype()),
          v.stride(0)};
}

// All but logits and results; `columns` are those of the logits, were they a tensor.
template <class Args>
Problem options_of(const Args& a, std::int64_t columns) {
  using Round = typename Args::LogitsRound;
  Problem p;
  p.rows = a.target.dim(0);
  p.columns = columns;
  p.vocab = a.vocab ? a.vocab : columns;
  p.leaf = 16 * ((p.vocab + 127) / 128);
  p.first = static_cast<int>(a.leaf_first), p.count = static_cast<int>(a.leaf_count);
  p.start = std::min(p.vocab, p.first * p.leaf);
  p.here = std::min(p.vocab, (p.first + p.count) * p.leaf) - p.start;
  p.round = a.logits_round == Round::bf16   ? Type::bf16
            : a.logits_round == Round::fp16 ? Type::f16
                                            : Type::f32;
  p.cap = static_cast<float>(a.softcap), p.temperature = static_cast<float>(a.temperature);
  p.ignored = a.ignore_index;
  p.target = a.target.template data<char>(), p.wide = a.target.dtype() == DType::i64;
  p.temperatures = a.temperatures.template data<float>();
  p.keep = a.keep.template data<std::uint32_t>();
  if (a.keep) p.words = a.keep.dim(1);
  return p;
}

template <class Args>
void add_results(Problem& p, const Args& a) {
  p.logp = a.logp.template data<float>(), p.lse = a.lse.template data<float>();
  p.entropy = a.entropy.template data<float>(), p.stats = a.stats.template data<float>();
}

template <class Args>
void add_cotangents(Problem& p, const Args& a) {
  p.given = a.stats.template data<float>();
  p.d_logp = a.d_logp.template data<float>(), p.d_entropy = a.d_entropy.template data<float>();
}

inline Problem problem_of(const Logp& a) {
  Problem p = options_of(a, a.logits.dim(1));
  p.logits = matrix_of(a.logits);
  add_results(p, a);
  p.bad_count = a.bad_count.data<std::int32_t>();
  return p;
}
inline Problem problem_of(const LogpBwd& a) {
  Problem p = options_of(a, a.logits.dim(1));
  p.logits = matrix_of(a.logits), p.d_logits = matrix_of(a.d_logits);
  add_cotangents(p, a);
  return p;
}

inline Merge merge_of(const LogpMerge& a) {
  Merge m;
  m.p.rows = a.partials.dim(1), m.parts = static_cast<int>(a.partials.dim(0));
  m.p.temperature = static_cast<float>(a.temperature), m.p.temperatures = a.temperatures.data<float>();
  m.partials = a.partials.data<float>();
  add_results(m.p, a);
  return m;
}

}  // namespace rlk::lse128
