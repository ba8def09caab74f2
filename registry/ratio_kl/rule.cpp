// loss32/f64 as the page has it, token by token. fma64 has no rule here: another exponential in fp64 may differ in its last
// bit.
#include "registry/loss_rule.hpp"
#include "registry/op.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using namespace rule32;

template <class Args>
Estimate estimate(const Args& a, int64_t i) {
  return kl_estimate(static_cast<int>(a.estimator), limit_of(a.d_clamp), limit_of(a.kl_clamp), at(a.logp, i),
                     at(a.ref_logp, i));
}

}  // namespace

bool ratio_kl_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "loss32/f64") return false;
  const auto& a = *reinterpret_cast<const RatioKl*>(q.slots);
  for (int64_t i = 0; i < a.logp.numel(); ++i) {
    const bool here = active(a.mask, i);
    const float x = here ? log_ratio(at(a.logp, i), at(a.old_logp, i)) : 0;
    set(a.ratio, i, here ? exp32(held(x, static_cast<float>(a.clamp))) : 1);
    if (a.kl) set(a.kl, i, here ? estimate(a, i).value : 0);
  }
  return true;
}

bool ratio_kl_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "loss32/f64") return false;
  const auto& a = *reinterpret_cast<const RatioKlBwd*>(q.slots);
  const auto clamp = static_cast<float>(a.clamp);
  for (int64_t i = 0; i < a.logp.numel(); ++i) {
    float through_ratio = 0, through_kl = 0;
    if (active(a.mask, i)) {
      const float x = log_ratio(at(a.logp, i), at(a.old_logp, i));
      if (a.d_ratio && !beyond(x, clamp)) through_ratio = exp32(held(x, clamp)) * at(a.d_ratio, i);
      if (a.d_kl)
        if (const float slope = estimate(a, i).slope; slope != 0) through_kl = slope * at(a.d_kl, i);
    }
    set(a.d_logp, i, through_ratio + through_kl);
  }
  return true;
}

}  // namespace rlk::registry
