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
  static void store(DType type, void* to, float x) {
    registry::store(type, to, 0, type == DType::f32 ? canonical(x) : x);
  }
};

// fp64's rule is the reference's, but for the one NaN that results have.
void canonical_results(const QkNormRope& a) {
  for (const Out& t : {a.q_out, a.k_out})
    for (int64_t i = 0, n = t && t.dtype() == DType::f32 ? t.numel() : 0; i < n; ++i)
      t.data<float>()[i] = canonical(t.data<float>()[i]);
}

}  // namespace

bool qk_norm_rope_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const QkNormRope*>(q.slots);
  if (q.arithmetic == "fma64") {
    if (qk_norm_rope_reference(q.slots, nullptr) != RLK_OK) return false;
    canonical_results(a);
    return true;
  }
  if (q.arithmetic != "rms32/rope32") return false;
  qk_norm_rope::PlainHeads<Single>(a).run();
  return true;
}

}  // namespace rlk::registry
