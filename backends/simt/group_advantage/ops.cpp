// group_advantage on any GPU by the portable kernel: the bits of the native backend.
#include "arithmetic/group_advantage/bind.hpp"
#include "simt/group_advantage/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::group_advantage {
namespace {

rlk_code forward(const GroupAdvantage& a, const Call& call) {
  return finished(call, "group_advantage", run(loss32::problem_of(a), call.stream(), call.device().id));
}

constexpr rlk_implementation kImplementations[] = {
    implement<GroupAdvantage, forward>({.id = kId,
                                        .doc = "a group a thread",
                                        .priority = 100,
                                        .arithmetic = "loss32/f64",
                                        .dtypes = RLK_F32,
                                        .traits = kPinned | RLK_CAPTURE_SAFE | RLK_GOLDEN,
                                        .device_type = kDevice})};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::group_advantage
