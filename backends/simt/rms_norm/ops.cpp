// rms_norm on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/rms_norm/bind.hpp"
#include "simt/portable.hpp"
#include "simt/rms_norm/launchers.hpp"

namespace rlk::simt::rms_norm {
namespace {

using rms32::problem_of;

std::uint64_t backward_bytes(const RmsNormBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(backward_workspace(problem_of(a)));
}

rlk_code forward(const RmsNorm& a, const Call& call) {
  return finished(call, "rms_norm", run_forward(problem_of(a), call.stream(), call.device().id));
}
rlk_code backward(const RmsNormBwd& a, const Call& call) {
  return finished(call, "rms_norm_bwd",
                  run_backward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}

constexpr Facts facts(const char* doc) { return portable_facts(doc, "rms32"); }

constexpr rlk_implementation kImplementations[] = {
    implement<RmsNorm, forward>(facts("32 lanes a row")),
    implement<RmsNormBwd, backward, nullptr, backward_bytes>(
        facts("32 lanes a row, d_weight by blocks of 128 rows")),
};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::rms_norm
