// group_advantage (arithmetic id loss32/f64): the call as plain data, and a group. fp64 in ascending order, one rounding.
#pragma once

#include "arithmetic/loss.hpp"

namespace rlk::loss32 {

enum class Center : std::int32_t { mean, leave_one_out, none };
enum class Scale : std::int32_t { population_std, sample_std, none };

struct GroupProblem {
  Bounds groups;
  Center center = Center::mean;
  Scale scale = Scale::population_std;
  double eps = 0;
  bool clamp_min = false, raw_singleton = false;
  const float* rewards = nullptr;
  float* advantages = nullptr;
};

// What the rewards of a group are divided by.
RLK_HD double divisor(const GroupProblem& p, std::int64_t first, std::int64_t last, double mean) {
  if (p.scale == Scale::none) return 1;
  double squares = 0;
  for (std::int64_t i = first; i < last; ++i) {
    const double off = static_cast<double>(p.rewards[i]) - mean;
    squares = simt::fused(off, off, squares);
  }
  const auto n = static_cast<double>(last - first);
  const double deviation = simt::root(squares / (p.scale == Scale::sample_std ? n - 1 : n));
  if (p.clamp_min) return deviation < p.eps ? p.eps : deviation;
  return deviation + p.eps;
}

RLK_HD void advantages_of(const GroupProblem& p, std::int64_t group) {
  const std::int64_t first = p.groups.at(group), last = p.groups.end(group);
  const auto n = static_cast<double>(last - first);
  const bool alone = last - first == 1;
  double sum = 0;
  for (std::int64_t i = first; i < last; ++i) sum += static_cast<double>(p.rewards[i]);
  const double mean = sum / n, by = alone ? 1 : divisor(p, first, last, mean);
  for (std::int64_t i = first; i < last; ++i) {
    const auto reward = static_cast<double>(p.rewards[i]);
    double centre = 0;
    if (p.center == Center::mean) centre = mean;
    if (p.center == Center::leave_one_out) centre = (sum - reward) / (n - 1);
    double advantage = by == 0 ? 0 : (reward - centre) / by;
    if (alone) advantage = p.raw_singleton ? reward : 0;
    p.advantages[i] = simt::from_float<float>(static_cast<float>(advantage));
  }
}

}  // namespace rlk::loss32
