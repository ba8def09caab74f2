// linear_logp and its gradients on any GPU by the portable kernels of lm_head, logp and linear: the bits of the native backend.
#include "simt/linear/launchers.hpp"
#include "simt/linear_logp/run.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::linear_logp {
namespace {

struct Started : LogpIn {
  const char* product(const Product& p) const {
    return p.rows == 0 || p.cols == 0 ? nullptr : linear::run(p, stream, device);
  }
  const char* logits(const LmHead& call) const { return product(lm_head::forward_product(call)); }
};
Started started(const Call& call) { return {{call.stream(), call.device().id}}; }

rlk_code run(const LinearLogp& a, const Call& call) {
  return finished(call, "linear_logp", forward(a, call.workspace().data(), started(call)));
}
rlk_code run_backward(const LinearLogpBwd& a, const Call& call) {
  return finished(call, "linear_logp_bwd", backward(a, call.workspace().data(), started(call)));
}
template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request&) {
  return room_of(a);
}

constexpr const char kPanels[] = "a panel of lm_head's logits at a time";
constexpr Facts kForward = portable_facts(kPanels, "fma32/kb1024/lse128/l8"),
                kBackward = portable_facts(kPanels, "fma32/kb1024/lse128/l8/tree8");

constexpr rlk_implementation kImplementations[] = {
    implement<LinearLogp, run, nullptr, workspace<LinearLogp>>(kForward),
    implement<LinearLogpBwd, run_backward, nullptr, workspace<LinearLogpBwd>>(kBackward)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::linear_logp
