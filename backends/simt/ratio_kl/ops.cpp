// ratio_kl on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/ratio_kl/bind.hpp"
#include "simt/portable.hpp"
#include "simt/ratio_kl/launchers.hpp"

namespace rlk::simt::ratio_kl {
namespace {

using loss32::problem_of;

rlk_code forward(const RatioKl& a, const Call& call) {
  return finished(call, "ratio_kl", run_forward(problem_of(a), call.stream(), call.device().id));
}
rlk_code backward(const RatioKlBwd& a, const Call& call) {
  return finished(call, "ratio_kl_bwd", run_backward(problem_of(a), call.stream(), call.device().id));
}

constexpr Facts kFacts = portable_facts("a token a thread", "loss32/f64", RLK_F32);

constexpr rlk_implementation kImplementations[] = {implement<RatioKl, forward>(kFacts),
                                                   implement<RatioKlBwd, backward>(kFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::ratio_kl
