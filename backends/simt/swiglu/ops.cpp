// swiglu on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/swiglu/bind.hpp"
#include "simt/portable.hpp"
#include "simt/swiglu/launchers.hpp"

namespace rlk::simt::swiglu {
namespace {

using act32::problem_of;

rlk_code forward(const Swiglu& a, const Call& call) {
  return finished(call, "swiglu", run_forward(problem_of(a), call.stream(), call.device().id));
}
rlk_code backward(const SwigluBwd& a, const Call& call) {
  return finished(call, "swiglu_bwd", run_backward(problem_of(a), call.stream(), call.device().id));
}

constexpr Facts kFacts = portable_facts("elementwise in fp32", "act32");

constexpr rlk_implementation kImplementations[] = {implement<Swiglu, forward>(kFacts),
                                                   implement<SwigluBwd, backward>(kFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::swiglu
