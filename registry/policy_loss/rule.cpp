// loss32/f64 as the page has it. The gradient and loss_reduce round nothing but their results, so their rule is the
// reference. fma64 has no rule for policy_loss: another exponential in fp64 may differ in its last bit.
#include "registry/loss_rule.hpp"
#include "registry/op.hpp"
#include "registry/policy_loss/plain.hpp"
#include "rlk/float_guard.hpp"

namespace rlk::registry {

int32_t policy_loss_bwd_reference(const rlk_slot* slots, const rlk_host*);
int32_t loss_reduce_reference(const rlk_slot* slots, const rlk_host*);

namespace {

struct Fp32 {
  static float exp(float x) { return exp32(x); }
  static rule32::Estimate estimate(const PolicyLoss& a, float logp, float ref) {
    return rule32::kl_estimate(static_cast<int>(a.kl) - 1, rule32::limit_of(a.d_clamp),
                               rule32::limit_of(a.kl_clamp), logp, ref);
  }
};

bool by_reference(const rlk_slot* slots, int32_t (*reference)(const rlk_slot*, const rlk_host*),
                  std::initializer_list<Out> results) {
  if (reference(slots, nullptr) != RLK_OK) return false;
  for (const Out& t : results)
    for (int64_t i = 0; t && t.dtype() == DType::f32 && i < t.numel(); ++i)
      t.data<float>()[i] = canonical(t.data<float>()[i]);
  return true;
}

}  // namespace

bool policy_loss_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "loss32/f64") return false;
  plain::policy_loss<float, Fp32>(
      *reinterpret_cast<const PolicyLoss*>(q.slots),
      [](const Out& t, int64_t i, auto x) { rule32::set(t, i, static_cast<float>(x)); });
  return true;
}

bool policy_loss_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "loss32/f64" && q.arithmetic != "fma64") return false;
  const auto& a = *reinterpret_cast<const PolicyLossBwd*>(q.slots);
  return by_reference(q.slots, policy_loss_bwd_reference, {a.d_logp, a.d_entropy});
}

bool loss_reduce_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "loss32/f64" && q.arithmetic != "fma64") return false;
  const auto& a = *reinterpret_cast<const LossReduce*>(q.slots);
  return by_reference(q.slots, loss_reduce_reference, {a.loss, a.metrics});
}

}  // namespace rlk::registry
