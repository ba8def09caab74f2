// group_advantage as plainly as it can be said, in fp64; loss32/f64 is the same, so its written rule is this.
#include <vector>

#include "registry/loss_reference.hpp"
#include "registry/op.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using Group = std::vector<double>;

double deviation_of(const Group& rewards, double mean, bool sample) {
  double squares = 0;
  for (double r : rewards) squares = std::fma(r - mean, r - mean, squares);
  return std::sqrt(squares / static_cast<double>(rewards.size() - (sample ? 1 : 0)));
}

Group advantages_of(const GroupAdvantage& a, const Group& rewards) {
  using G = GroupAdvantage;
  if (rewards.size() == 1) return {a.singleton == G::Singleton::raw ? rewards[0] : 0};
  const auto n = static_cast<double>(rewards.size());
  double sum = 0, divisor = 1;
  for (double r : rewards) sum += r;
  if (a.scale != G::Scale::none) {
    divisor = deviation_of(rewards, sum / n, a.scale == G::Scale::sample_std);
    if (a.eps_use == G::EpsUse::add)
      divisor += a.eps;
    else if (divisor < a.eps)
      divisor = a.eps;
  }
  Group out;
  for (double r : rewards) {
    const double centre = a.center == G::Center::none   ? 0
                          : a.center == G::Center::mean ? sum / n
                                                        : (sum - r) / (n - 1);
    out.push_back(divisor == 0 ? 0 : (r - centre) / divisor);
  }
  return out;
}

}  // namespace

int32_t group_advantage_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const GroupAdvantage*>(slots);
  for (int64_t i = 0; i < a.advantages.numel(); ++i) set(a.advantages, i, 0);  // of no group
  for (int64_t g = 0; g + 1 < a.group_offsets.numel(); ++g) {
    const auto first = static_cast<int64_t>(at(a.group_offsets, g)),
               last = static_cast<int64_t>(at(a.group_offsets, g + 1));
    Group rewards;
    for (int64_t i = first; i < last; ++i) rewards.push_back(at(a.rewards, i));
    if (rewards.empty()) continue;
    const Group out = advantages_of(a, rewards);
    for (int64_t i = first; i < last; ++i) set(a.advantages, i, out[static_cast<std::size_t>(i - first)]);
  }
  return RLK_OK;
}

bool group_advantage_rule(const RuleQuery& q) {
  if (q.arithmetic != "loss32/f64" && q.arithmetic != "fma64") return false;
  const auto& a = *reinterpret_cast<const GroupAdvantage*>(q.slots);
  if (group_advantage_reference(q.slots, nullptr) != RLK_OK) return false;
  for (int64_t i = 0; a.advantages.dtype() == DType::f32 && i < a.advantages.numel(); ++i)
    a.advantages.data<float>()[i] = canonical(a.advantages.data<float>()[i]);
  return true;
}

}  // namespace rlk::registry
