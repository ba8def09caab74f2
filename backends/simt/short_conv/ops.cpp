// short_conv on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/short_conv/bind.hpp"
#include "simt/portable.hpp"
#include "simt/short_conv/launchers.hpp"

namespace rlk::simt::short_conv {
namespace {

using conv32::problem_of;

std::uint64_t backward_bytes(const ShortConvBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(backward_workspace(problem_of(a)));
}

rlk_code forward(const ShortConv& a, const Call& call) {
  return finished(call, "short_conv", run_forward(problem_of(a), call.stream(), call.device().id));
}
rlk_code backward(const ShortConvBwd& a, const Call& call) {
  return finished(call, "short_conv_bwd",
                  run_backward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}

constexpr Facts facts(const char* doc) { return portable_facts(doc, "conv32"); }

constexpr rlk_implementation kImplementations[] = {
    implement<ShortConv, forward>(facts("a thread has 8 channels of a run of rows")),
    implement<ShortConvBwd, backward, nullptr, backward_bytes>(
        facts("a thread has 8 channels of a run of rows, 128 of them where d_weight is wanted")),
};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::short_conv
