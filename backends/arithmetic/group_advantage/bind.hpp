// From the typed arguments of group_advantage to a GroupProblem.
#pragma once

#include "arithmetic/group_advantage/advantage.hpp"
#include "arithmetic/loss_bind.hpp"
#include "rlk/ops.hpp"

namespace rlk::loss32 {

inline GroupProblem problem_of(const GroupAdvantage& a) {
  GroupProblem p;
  p.groups = bounds_of(a.group_offsets, a.rewards.numel());
  p.center = static_cast<Center>(a.center);
  p.scale = static_cast<Scale>(a.scale);
  p.eps = a.eps;
  p.clamp_min = a.eps_use == GroupAdvantage::EpsUse::clamp_min;
  p.raw_singleton = a.singleton == GroupAdvantage::Singleton::raw;
  p.rewards = floats(a.rewards);
  p.advantages = floats(a.advantages);
  return p;
}

}  // namespace rlk::loss32
