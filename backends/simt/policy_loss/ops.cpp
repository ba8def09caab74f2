// policy_loss, its gradient and loss_reduce on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/policy_loss/bind.hpp"
#include "simt/policy_loss/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::policy_loss {
namespace {

using loss32::floats;
using loss32::problem_of;

std::uint64_t workspace(const PolicyLoss& a, const rlk_request&) {
  return static_cast<std::uint64_t>(workspace_of(problem_of(a)));
}

rlk_code forward(const PolicyLoss& a, const Call& call) {
  return finished(call, "policy_loss",
                  run_forward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code backward(const PolicyLossBwd& a, const Call& call) {
  return finished(call, "policy_loss_bwd", run_backward(problem_of(a), call.stream(), call.device().id));
}
rlk_code reduce(const LossReduce& a, const Call& call) {
  return finished(call, "loss_reduce",
                  run_reduce(loss32::weighting_of(a), floats(a.totals), a.totals.dim(0), floats(a.loss),
                             floats(a.metrics), call.stream(), call.device().id));
}

constexpr Facts facts(const char* doc, std::uint32_t golden = 0) {
  Facts facts = portable_facts(doc, "loss32/f64", RLK_F32);
  facts.traits |= golden;
  return facts;
}

constexpr rlk_implementation kImplementations[] = {
    implement<PolicyLoss, forward, nullptr, workspace>(facts("a block a sequence")),
    implement<PolicyLossBwd, backward>(facts("a token a thread", RLK_GOLDEN)),
    implement<LossReduce, reduce>(facts("a sum a thread", RLK_GOLDEN))};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::policy_loss
