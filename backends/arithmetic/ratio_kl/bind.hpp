// From the typed arguments of ratio_kl and ratio_kl_bwd to a RatioProblem.
#pragma once

#include "arithmetic/loss_bind.hpp"
#include "arithmetic/ratio_kl/ratio_kl.hpp"
#include "rlk/ops.hpp"

namespace rlk::loss32 {

template <class Args>
RatioProblem options_of(const Args& a) {
  RatioProblem p;
  p.tokens = a.logp.numel();
  p.clamp = static_cast<float>(a.clamp);
  p.rule = {static_cast<Kl>(static_cast<int>(a.estimator) + 1), limit_of(a.d_clamp), limit_of(a.kl_clamp)};
  p.mask = mask_of(a.mask);
  p.logp = floats(a.logp), p.old = floats(a.old_logp), p.ref = floats(a.ref_logp);
  return p;
}

inline RatioProblem problem_of(const RatioKl& a) {
  RatioProblem p = options_of(a);
  p.ratio = floats(a.ratio), p.kl = floats(a.kl);
  return p;
}
inline RatioProblem problem_of(const RatioKlBwd& a) {
  RatioProblem p = options_of(a);
  p.d_ratio = floats(a.d_ratio), p.d_kl = floats(a.d_kl);
  p.d_logp = floats(a.d_logp);
  return p;
}

}  // namespace rlk::loss32
