// rms32/rope32 and fma64 of qk_norm_rope as the page has them, independent of every kernel.
#include <array>
#include <cmath>

#include "registry/op.hpp"
#include "registry/qk_norm_rope/plain.hpp"
#include "rlk/float_guard.hpp"

namespace rlk::registry {

int32_t qk_norm_rope_reference(const rlk_slot* slots, const rlk_host*);

namespace {

struct Single {
  using Number = float;
  static float reciprocal(const std::vector<float>& x, double eps) {
    std::array<float, 1024> lane{};
    for (std::size_t i = 0; i < x.size(); ++i) lane[i % 1024] = std::fma(x[i], x[i], lane[i % 1024]);
    for (std::size_t half = 512; half > 0; half /= 2)
      for (std::size_t j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
    const float mean = lane[0] / static_cast<float>(x.size());
    return 1.0f / std::sqrt(mean + static_cast<float>(eps));
  }
};

}  // namespace

bool qk_norm_rope_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const QkNormRope*>(q.slots);
  if (q.arithmetic == "fma64") return qk_norm_rope_reference(q.slots, nullptr) == RLK_OK;
  if (q.arithmetic != "rms32/rope32") return false;
  qk_norm_rope::PlainHeads<Single>(a).run();
  return true;
}

}  // namespace rlk::registry
