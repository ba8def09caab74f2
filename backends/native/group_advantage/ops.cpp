// group_advantage on the CPU: loss32/f64, which is fp64 throughout and golden too. A task is some groups; rewards are read
// twice or three times, from cache, and advantages written once.
#include <algorithm>

#include "arithmetic/group_advantage/bind.hpp"
#include "rlk/backend.hpp"

namespace rlk::native {
namespace {

rlk_code run(const GroupAdvantage& a, const Call& call) {
  constexpr std::int64_t kTask = 256;
  const loss32::GroupProblem p = loss32::problem_of(a);
  if (const std::string wrong = loss32::wrong_bounds(GroupAdvantage::kName, "group_offsets", p.groups);
      !wrong.empty())
    return call.fail(RLK_INVALID_ARGUMENT, wrong);
  call.parallel_for((p.groups.parts + kTask - 1) / kTask, [&](std::int64_t task) {
    for (std::int64_t g = task * kTask; g < std::min(p.groups.parts, (task + 1) * kTask); ++g)
      loss32::advantages_of(p, g);
  });
  std::fill(p.advantages + p.groups.at(p.groups.parts), p.advantages + p.groups.limit, 0.0f);
  return RLK_OK;
}

}  // namespace

extern const rlk_implementation group_advantage_groups;
constinit const rlk_implementation group_advantage_groups =
    implement<GroupAdvantage, run>({.id = "native.groups",
                                    .doc = "group by group in fp64, one rounding",
                                    .priority = 100,
                                    .arithmetic = "loss32/f64",
                                    .dtypes = RLK_F32,
                                    .traits = kPinned | RLK_GOLDEN});

}  // namespace rlk::native
