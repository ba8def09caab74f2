// From the typed arguments of sample and sample_verify to a Problem.
#pragma once

#include <algorithm>

#include "arithmetic/rows_bind.hpp"
#include "arithmetic/sample/sample.hpp"
#include "rlk/ops.hpp"

namespace rlk::sampling {

template <class T>
Column<const T> column_of(const In& v) {
  return v ? Column<const T>{v.data<T>(), v.stride(0)} : Column<const T>{};
}
template <class T>
Column<T> column_of(const Out& v) {
  return v ? Column<T>{v.data<T>(), v.stride(0)} : Column<T>{};
}
inline IntegerColumn integers_of(const In& v) {
  return v ? IntegerColumn{v.data<char>(), v.dtype() == DType::i64, v.stride(0)} : IntegerColumn{};
}

template <class Args>
Problem inputs_of(const Args& a) {
  Problem p;
  p.rows = a.logits.dim(0);
  p.whole = p.vocab = a.vocab ? a.vocab : a.logits.dim(1);
  p.logits = a.logits.template data<char>();
  p.type = rows::type_of(a.logits.dtype());
  p.stride = a.logits.stride(0);
  p.round = a.logits_round == Args::LogitsRound::bf16   ? Type::bf16
            : a.logits_round == Args::LogitsRound::fp16 ? Type::f16
                                                        : Type::f32;
  p.softcap = static_cast<float>(a.softcap);
  p.raw_temperature = a.raw_temperature;
  p.min_p_first = a.filter_order == Args::FilterOrder::min_p_first;
  p.temperature = column_of<float>(a.temperature);
  p.top_p = column_of<float>(a.top_p);
  p.min_p = column_of<float>(a.min_p);
  p.top_k = integers_of(a.top_k);
  p.seed = integers_of(a.seed);
  p.stream = integers_of(a.stream);
  p.position = integers_of(a.position);
  return p;
}

inline Problem problem_of(const Sample& a) {
  Problem p = inputs_of(a);
  if (a.token) p.token = {a.token.data<char>(), a.token.dtype() == DType::i64, a.token.stride(0)};
  p.logp = column_of<float>(a.logp);
  p.logp_raw = column_of<float>(a.logp_raw);
  p.count = column_of<std::int32_t>(a.count);
  if (a.keep) p.keep = a.keep.data<std::int32_t>(), p.keep_stride = a.keep.stride(0);
  p.bad_count = a.bad_count.data<std::int32_t>();
  return p;
}

inline Problem problem_of(const SampleVerify& a) {
  Problem p = inputs_of(a);
  p.recorded = integers_of(a.token);
  p.recorded_logp = column_of<float>(a.logp);
  p.recorded_logp_raw = column_of<float>(a.logp_raw);
  p.status = column_of<std::int32_t>(a.status);
  return p;
}

inline Problem problem_of(const SamplePart& a) {
  Problem p = inputs_of(a);
  const std::int64_t end = std::min(p.whole, (a.leaf_first + a.leaf_count) * p.leaf());
  p.first = a.vocab_start;
  p.vocab = end - p.first;
  p.step = static_cast<Step>(a.step);
  p.digit = static_cast<int>(a.digit);
  p.part = static_cast<int>(a.leaf_first / a.leaf_count);
  p.first_leaf = static_cast<int>(a.leaf_first), p.leaves = static_cast<int>(a.leaf_count);
  if (a.state) p.state = a.state.data<std::int64_t>(), p.state_stride = a.state.stride(0);
  if (a.partials) p.partials = a.partials.data<std::int64_t>(), p.partials_stride = a.partials.stride(0);
  if (a.keep) p.keep = a.keep.data<std::int32_t>(), p.keep_stride = a.keep.stride(0);
  return p;
}

inline MergeProblem problem_of(const SampleMerge& a) {
  MergeProblem p;
  p.parts = a.partials.dim(0), p.rows = a.partials.dim(1);
  p.step = static_cast<Step>(a.step);
  p.digit = static_cast<int>(a.digit);
  p.raw_temperature = a.raw_temperature;
  p.partials = a.partials.data<std::int64_t>();
  p.part_stride = a.partials.stride(0), p.row_stride = a.partials.stride(1);
  p.temperature = column_of<float>(a.temperature);
  p.top_p = column_of<float>(a.top_p);
  p.top_k = integers_of(a.top_k);
  if (a.state) p.state = a.state.data<std::int64_t>(), p.state_stride = a.state.stride(0);
  if (a.next) p.next = a.next.data<std::int64_t>(), p.next_stride = a.next.stride(0);
  if (a.token) p.token = {a.token.data<char>(), a.token.dtype() == DType::i64, a.token.stride(0)};
  p.logp = column_of<float>(a.logp);
  p.logp_raw = column_of<float>(a.logp_raw);
  p.count = column_of<std::int32_t>(a.count);
  p.bad_count = a.bad_count.data<std::int32_t>();
  return p;
}

}  // namespace rlk::sampling
