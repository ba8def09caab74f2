// From the typed arguments of policy_loss and loss_reduce to plain data.
#pragma once

#include "arithmetic/loss_bind.hpp"
#include "arithmetic/policy_loss/policy.hpp"
#include "rlk/ops.hpp"

namespace rlk::loss32 {

template <class Args>
Weighting weighting_of(const Args& a) {
  Weighting w{static_cast<Agg>(a.agg), static_cast<float>(a.kl_coef), static_cast<float>(a.entropy_coef)};
  if (!a.denominator) return w;
  w.denominator = a.denominator.template data<char>();
  const DType t = a.denominator.dtype();
  w.type = t == DType::f32   ? Weighting::f32
           : t == DType::f64 ? Weighting::f64
           : t == DType::i32 ? Weighting::i32
                             : Weighting::i64;
  return w;
}

inline PolicyProblem problem_of(const PolicyLoss& a) {
  PolicyProblem p;
  p.tokens = a.logp.numel();
  if (a.cu_seqlens)
    p.packed = bounds_of(a.cu_seqlens, p.tokens), p.sequences = p.packed.parts;
  else
    p.sequences = a.logp.dim(0), p.width = a.logp.dim(1);
  p.logp = floats(a.logp), p.old = floats(a.old_logp), p.advantage = floats(a.advantages);
  p.rollout = floats(a.rollout_logp), p.ref = floats(a.ref_logp), p.entropy = floats(a.entropy);
  p.advantage_of_sequence = a.advantages_per == PolicyLoss::AdvantagesPer::sequence;
  p.mask = mask_of(a.mask);
  p.level = static_cast<Level>(a.level);
  p.form = static_cast<Form>(a.form);
  p.is_mode = static_cast<IsMode>(a.is_mode);
  p.is_level = static_cast<IsLevel>(a.is_level);
  p.clip_low = static_cast<float>(a.clip_low), p.clip_high = static_cast<float>(a.clip_high);
  p.dual_clip = static_cast<float>(a.dual_clip);
  p.tau_positive = static_cast<float>(a.tau_positive), p.tau_negative = static_cast<float>(a.tau_negative);
  p.clamp = static_cast<float>(a.clamp), p.sequence_clamp = static_cast<float>(a.sequence_clamp);
  p.is_low = static_cast<float>(a.is_low), p.is_high = static_cast<float>(a.is_high);
  p.kl = {static_cast<Kl>(a.kl), limit_of(a.d_clamp), limit_of(a.kl_clamp)};
  p.weighting = weighting_of(a);
  p.loss = floats(a.loss), p.totals = floats(a.totals), p.metrics = floats(a.metrics);
  p.factor = floats(a.factor), p.entropy_factor = floats(a.entropy_factor);
  return p;
}

inline FactorProblem problem_of(const PolicyLossBwd& a) {
  return {a.factor.numel(),         floats(a.d_loss), floats(a.factor),
          floats(a.entropy_factor), floats(a.d_logp), floats(a.d_entropy)};
}

}  // namespace rlk::loss32
