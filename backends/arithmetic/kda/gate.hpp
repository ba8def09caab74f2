// The scalar parts of KDA around the recurrence: gate activation, write strength, normalisation, and their
// derivatives. Templates over float or a vector of float (chunked forms, every executor) and double (the
// golden form).
#pragma once

#include "arithmetic/kda/problem.hpp"
#include "arithmetic/math.hpp"

namespace rlk::kda {

// 1 / sqrt(sum x^2 + kNormEps) normalises q and k.
inline constexpr double kNormEps = 1e-6;

// The gate's parameters for one channel.
template <class F>
struct GateParameters {
  Gate kind;
  F rate;   // e^{a_log}
  F bias;   // dt_bias
  F bound;  // lower_bound

  // log decay from the raw gate
  RLK_HD F value(F raw) const {
    if (kind == Gate::none) return raw;
    const F x = raw + bias;
    if (kind == Gate::softplus) return -(rate * simt::softplus<F>(x));
    return bound * simt::sigmoid<F>(rate * x);
  }

  // d raw from d log-decay
  RLK_HD F grad(F raw, F dg) const {
    if (kind == Gate::none) return dg;
    const F x = raw + bias;
    if (kind == Gate::softplus) return -(rate * simt::sigmoid<F>(x)) * dg;
    const F y = simt::sigmoid<F>(rate * x), complement = simt::sigmoid<F>(-(rate * x));
    return bound * (y * complement) * rate * dg;
  }

  // This element's share of d a_log
  RLK_HD F grad_a_log(F raw, F dg) const {
    if (kind == Gate::none) return F{};
    if (kind == Gate::softplus) return dg * value(raw);
    return grad(raw, dg) * (raw + bias);
  }
};

template <class F>
RLK_HD GateParameters<F> gate_parameters(const Problem& p, int value_head, int channel) {
  GateParameters<F> gate{p.gate, F(1), F(0), F(p.lower_bound)};
  if (p.gate == Gate::none) return gate;
  if (p.a_log) gate.rate = simt::exp<F>(F(p.a_log[value_head]));
  if (p.dt_bias) gate.bias = F(p.dt_bias[std::int64_t(value_head) * p.k_dim + channel]);
  return gate;
}

template <class F>
RLK_HD F write_strength(const Problem& p, F raw) {
  if (!p.beta_sigmoid) return raw;
  const F y = simt::sigmoid<F>(raw);
  return p.neg_eigval ? y + y : y;
}

template <class F>
RLK_HD F write_strength_grad(const Problem& p, F raw, F d) {
  if (!p.beta_sigmoid) return d;
  const F y = simt::sigmoid<F>(raw) * simt::sigmoid<F>(-raw);
  return (p.neg_eigval ? y + y : y) * d;
}

}  // namespace rlk::kda
