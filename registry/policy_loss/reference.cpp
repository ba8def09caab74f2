// policy_loss, its gradient and loss_reduce in fp64, as plainly as it can be said.
#include <cmath>

#include "registry/loss_reference.hpp"
#include "registry/policy_loss/plain.hpp"

namespace rlk::registry {
namespace {

struct Fp64 {
  static double exp(double x) { return std::exp(x); }
  static KlEstimate estimate(const PolicyLoss& a, double logp, double ref) {
    return kl_estimate(
        {static_cast<KlOptions::Kind>(static_cast<int>(a.kl) - 1), limit_of(a.d_clamp), limit_of(a.kl_clamp)},
        logp, ref);
  }
};

}  // namespace

int32_t policy_loss_reference(const rlk_slot* slots, const rlk_host*) {
  plain::policy_loss<double, Fp64>(*reinterpret_cast<const PolicyLoss*>(slots),
                                   [](const Out& t, int64_t i, double x) { set(t, i, x); });
  return RLK_OK;
}

int32_t policy_loss_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const PolicyLossBwd*>(slots);
  const double d = at(a.d_loss, 0);
  for (int64_t t = 0; t < a.factor.numel(); ++t) {
    if (a.d_logp) set(a.d_logp, t, at(a.factor, t) == 0 ? 0 : at(a.factor, t) * d);
    if (a.d_entropy) set(a.d_entropy, t, at(a.entropy_factor, t) == 0 ? 0 : at(a.entropy_factor, t) * d);
  }
  return RLK_OK;
}

int32_t loss_reduce_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LossReduce*>(slots);
  const Dense totals(a.totals);
  const plain::Reduced r = plain::reduce(a, totals.values.data(), a.totals.dim(0));
  set(a.loss, 0, r.loss);
  for (int64_t q = 0; a.metrics && q < 6; ++q) set(a.metrics, q, r.metrics[q]);
  return RLK_OK;
}

}  // namespace rlk::registry
