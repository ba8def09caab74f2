// ratio_kl as plainly as it can be said, in fp64.
#include "registry/loss_reference.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

template <class Args>
KlOptions kl_options(const Args& a) {
  return {static_cast<KlOptions::Kind>(a.estimator), limit_of(a.d_clamp), limit_of(a.kl_clamp)};
}

}  // namespace

int32_t ratio_kl_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const RatioKl*>(slots);
  const double clamp = static_cast<float>(a.clamp);
  for (int64_t i = 0; i < a.logp.numel(); ++i) {
    const bool here = active(a.mask, i);
    set(a.ratio, i, here ? std::exp(held(log_ratio(at(a.logp, i), at(a.old_logp, i)), clamp)) : 1);
    if (a.kl) set(a.kl, i, here ? kl_estimate(kl_options(a), at(a.logp, i), at(a.ref_logp, i)).value : 0);
  }
  return RLK_OK;
}

int32_t ratio_kl_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const RatioKlBwd*>(slots);
  const double clamp = static_cast<float>(a.clamp);
  for (int64_t i = 0; i < a.logp.numel(); ++i) {
    double d = 0;
    if (active(a.mask, i)) {
      const double x = log_ratio(at(a.logp, i), at(a.old_logp, i));
      if (a.d_ratio && !(std::fabs(x) > clamp)) d += std::exp(x) * at(a.d_ratio, i);
      if (a.d_kl)
        if (const double slope = kl_estimate(kl_options(a), at(a.logp, i), at(a.ref_logp, i)).slope;
            slope != 0)
          d += slope * at(a.d_kl, i);
    }
    set(a.d_logp, i, d);
  }
  return RLK_OK;
}

}  // namespace rlk::registry
