// From the typed arguments of embedding and embedding_bwd to a Problem.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "arithmetic/rows_bind.hpp"
#include "rlk/ops.hpp"

namespace rlk::embed32 {

template <class View>
Matrix matrix_of(const View& v) {
  return {const_cast<void*>(static_cast<const void*>(v.template data<char>())), rows::type_of(v.dtype()),
          v.stride(0)};
}

// What both directions share; `tokens` is out or d_out.
template <class Args, class View>
Problem problem_of(const Args& a, const View& tokens) {
  Problem p;
  p.width = a.weight.dim(1), p.vocab = a.weight.dim(0);
  p.start = a.vocab_start, p.padding = a.padding_idx;
  p.scale = static_cast<float>(a.scale);
  p.wide_ids = a.ids.dtype() == DType::i64;
  p.ids.data = const_cast<char*>(a.ids.template data<char>());
  for (int i = 0; i < a.ids.rank(); ++i) p.ids.stride[i] = a.ids.stride(i);
  p.tokens = rows::tensor_of(tokens);
  p.axes = rows::axes_of(tokens, {&p.ids, &p.tokens});
  return p;
}

inline Problem problem_of(const Embedding& a) {
  Problem p = problem_of(a, a.out);
  p.weight = matrix_of(a.weight);
  p.tokens_end = a.vocab ? a.vocab : a.vocab_start + a.weight.dim(0);
  p.bad_count = a.bad_count.data<std::int32_t>();
  return p;
}
inline Problem problem_of(const EmbeddingBwd& a) {
  Problem p = problem_of(a, a.d_out);
  p.weight = matrix_of(a.d_weight);
  if (a.d_weight_before) p.before = matrix_of(a.d_weight_before);
  return p;
}

}  // namespace rlk::embed32
