// From the typed arguments of the KDA ops to a Problem, and what no KDA implementation of ours takes.
#pragma once

#include <cmath>

#include "arithmetic/kda/problem.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::kda {

// [batch, token, head, ..], or [batch, head, ..] without tokens.
template <class View>
Tensor tensor_of(const View& v, bool has_token = true) {
  if (!v) return {};
  Tensor t{const_cast<void*>(static_cast<const void*>(v.template data<char>())), float_of(v.dtype())};
  t.batch = v.stride(0);
  t.token = has_token ? v.stride(1) : 0;
  t.head = v.stride(has_token ? 2 : 1);
  return t;
}

template <class View>
States states_of(const View& v) {
  if (!v) return {};
  return {const_cast<void*>(static_cast<const void*>(v.template data<char>())), float_of(v.dtype()),
          v.stride(0), v.stride(1)};
}

// The options every op shares.
template <class Args>
void set_gate(const Args& a, Problem& p) {
  p.gate = static_cast<Gate>(static_cast<int>(a.gate));
  p.lower_bound = a.lower_bound;
  p.a_log = a.a_log.template data<float>();
  p.dt_bias = a.dt_bias.template data<float>();
}

template <class Args>
void set_options(const Args& a, Problem& p) {
  set_gate(a, p);
  p.scale = a.scale != 0 ? a.scale : 1 / std::sqrt(double(p.k_dim));
  p.v_first = a.state_v_first;
  p.l2norm = a.qk_l2norm;
  p.beta_sigmoid = a.beta_sigmoid;
  p.neg_eigval = a.allow_neg_eigval;
}

// What kda_fwd, kda_bwd and kda_step share.
template <class Args>
Problem inputs_of(const Args& a) {
  Problem p;
  p.batch = a.q.dim(0);
  p.tokens = a.q.dim(1);
  p.sequences = a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : p.batch;
  p.heads = static_cast<int>(a.q.dim(2));
  p.value_heads = static_cast<int>(a.v.dim(2));
  p.k_dim = static_cast<int>(a.q.dim(3));
  p.v_dim = static_cast<int>(a.v.dim(3));
  p.chunk = static_cast<int>(a.chunk_size);
  p.cu_seqlens = a.cu_seqlens.template data<std::int64_t>();
  set_options(a, p);
  p.q = tensor_of(a.q);
  p.k = tensor_of(a.k);
  p.v = tensor_of(a.v);
  p.g = tensor_of(a.g);
  p.beta = tensor_of(a.beta);
  return p;
}

template <class Args>
Problem sequences_of(const Args& a) {
  Problem p = inputs_of(a);
  p.initial = states_of(a.initial_state);
  p.chunk_states = states_of(a.chunk_states);
  return p;
}

// Without a token only states are left to be written. Where there are none either, the other sizes may be as
// large as 64 bits hold, and must not be counted through.
inline Problem without_idle_sequences(Problem p) {
  if (p.batch != 0 && p.tokens != 0) return p;
  p.tokens = 0;
  if (!p.cu_seqlens && !p.initial && !p.final && !p.d_final && !p.d_initial) p.batch = p.sequences = 0;
  return p;
}

inline Problem problem_of(const KdaFwd& a) {
  Problem p = sequences_of(a);
  p.out = tensor_of(a.out);
  p.final = states_of(a.final_state);
  p.chunk_inverses = tensor_of(a.chunk_inverses);
  return without_idle_sequences(p);
}

inline Problem problem_of(const KdaBwd& a) {
  Problem p = sequences_of(a);
  p.d_out = tensor_of(a.d_out);
  p.d_final = states_of(a.d_final_state);
  p.d_q = tensor_of(a.d_q);
  p.d_k = tensor_of(a.d_k);
  p.d_v = tensor_of(a.d_v);
  p.d_g = tensor_of(a.d_g);
  p.d_beta = tensor_of(a.d_beta);
  p.d_initial = states_of(a.d_initial_state);
  p.d_a_log = a.d_a_log.data<float>();
  p.d_dt_bias = a.d_dt_bias.data<float>();
  return without_idle_sequences(p);
}

// One token per sequence; `initial` and `final` are the state before and after.
inline Problem problem_of(const KdaDecode& a) {
  Problem p;
  p.batch = p.sequences = a.q.dim(0);
  p.tokens = 1;
  p.heads = static_cast<int>(a.q.dim(1));
  p.value_heads = static_cast<int>(a.v.dim(1));
  p.k_dim = static_cast<int>(a.q.dim(2));
  p.v_dim = static_cast<int>(a.v.dim(2));
  set_options(a, p);
  p.q = tensor_of(a.q, false);
  p.k = tensor_of(a.k, false);
  p.v = tensor_of(a.v, false);
  p.g = tensor_of(a.g, false);
  p.beta = tensor_of(a.beta, false);
  p.out = tensor_of(a.out, false);
  p.initial = states_of(a.state);
  p.final = states_of(a.state_out);
  return p;
}

inline Step step_of(const KdaStep& a) {
  Step p;
  static_cast<Problem&>(p) = inputs_of(a);
  p.out = tensor_of(a.out);
  p.initial = p.final = states_of(a.state);
  p.layout = cache_layout(p.k_dim, p.v_dim, p.chunk);
  p.cache = states_of(a.cache);
  p.rows = a.rows.data<char>();
  p.wide_rows = a.rows.dtype() == DType::i64;
  return p;
}

// The gate alone: rows [.., HV, K] flattened to tokens of one batch row.
template <class Args>
Problem gate_problem_of(const Args& a) {
  Problem p;
  p.value_heads = static_cast<int>(a.g.dim(-2));
  p.k_dim = static_cast<int>(a.g.dim(-1));
  const std::int64_t row = std::int64_t(p.value_heads) * p.k_dim;
  p.batch = p.sequences = 1;
  p.tokens = row ? a.g.numel() / row : 0;
  set_gate(a, p);
  const auto dense = [&](const auto& v) {
    Tensor t;
    if (!v) return t;
    t = {const_cast<void*>(static_cast<const void*>(v.template data<char>())), float_of(v.dtype())};
    t.token = row;
    t.head = p.k_dim;
    return t;
  };
  p.g = dense(a.g);
  if constexpr (requires { a.d_out; }) {
    p.d_out = dense(a.d_out);
    p.d_g = dense(a.d_g);
    p.d_a_log = a.d_a_log.template data<float>();
    p.d_dt_bias = a.d_dt_bias.template data<float>();
  } else {
    p.out = dense(a.out);
  }
  return p;
}

// The state's two inner dimensions must be dense; only the reference writes fp64.
template <class View>
bool has_loose_matrix(const View& v) {
  return v && (v.stride(3) != 1 || v.stride(2) != v.dim(3)) && v.dim(2) * v.dim(3) > 1;
}
template <class... View>
rlk_verdict check_views(const View&... views) {
  if (((views && views.dtype() == DType::f64) || ...)) return refuse("fp64 results", {}, "ask for fp32");
  return kAccept;
}
template <class... View>
rlk_verdict check_matrices(const View&... views) {
  if ((has_loose_matrix(views) || ...))
    return refuse("a state whose K x V matrices are strided", {}, "make them dense");
  return kAccept;
}
inline rlk_verdict both(const rlk_verdict& a, const rlk_verdict& b) { return a.code != RLK_OK ? a : b; }

// `records` says whether the implementation makes and reads chunk_records.
template <class Args>
rlk_verdict check_records(const Args& a, bool records) {
  if (a.chunk_records && !records)
    return refuse("chunk_records is given, which only the arithmetic sm90/kda64 makes and reads", {},
                  "leave it out of the forward and of the backward, which then recomputes");
  return kAccept;
}
inline rlk_verdict check(const KdaFwd& a, bool records = false) {
  if (const rlk_verdict v = check_records(a, records); v.code != RLK_OK) return v;
  return both(check_views(a.out, a.final_state, a.chunk_states, a.chunk_inverses),
              check_matrices(a.initial_state, a.final_state, a.chunk_states));
}
inline rlk_verdict check(const KdaBwd& a, bool records = false) {
  if (const rlk_verdict v = check_records(a, records); v.code != RLK_OK) return v;
  if (a.chunk_states && a.chunk_states.dtype() != DType::f32)
    return refuse("chunk_states in 16 bits", {}, "keep them in fp32, or leave them out and recompute");
  return both(check_views(a.d_q, a.d_k, a.d_v, a.d_g, a.d_beta, a.d_initial_state, a.d_a_log, a.d_dt_bias),
              check_matrices(a.initial_state, a.d_final_state, a.d_initial_state, a.chunk_states));
}
inline rlk_verdict check(const KdaDecode& a) {
  return both(check_views(a.out, a.state_out), check_matrices(a.state, a.state_out));
}
inline rlk_verdict check(const KdaStep& a) { return both(check_views(a.out), check_matrices(a.state)); }
inline rlk_verdict check(const KdaGate& a) { return check_views(a.out); }
inline rlk_verdict check(const KdaGateBwd& a) { return check_views(a.d_g, a.d_a_log, a.d_dt_bias); }

}  // namespace rlk::kda
