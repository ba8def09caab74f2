// qk_norm_rope on any GPU by the portable kernel: the bits of the native backend.
#include "arithmetic/qk_norm_rope/bind.hpp"
#include "simt/portable.hpp"
#include "simt/qk_norm_rope/launchers.hpp"

namespace rlk::simt::qk_norm_rope {
namespace {

using rms32_rope32::problem_of;

rlk_code forward(const QkNormRope& a, const Call& call) {
  return finished(call, "qk_norm_rope", run_forward(problem_of(a), call.stream(), call.device().id));
}

constexpr rlk_implementation kImplementations[] = {
    implement<QkNormRope, forward>(portable_facts("8 to 32 lanes a head, one launch", "rms32/rope32")),
};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::qk_norm_rope
