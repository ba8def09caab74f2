// conv32 as the page has it.
#include "registry/exp32.hpp"
#include "registry/op.hpp"
#include "registry/short_conv/plain.hpp"
#include "rlk/float_guard.hpp"

namespace rlk::registry {
namespace {

struct Single {
  using Number = float;
  static float silu(float z) { return z == -INFINITY ? -0.0f : z / (exp32(-z) + 1.0f); }
  static float times_slope(float d, float z) {
    const float e = exp32(-z), s = 1.0f / (e + 1.0f), rest = e * s;
    if (s == 0) return 0;
    return d * s * (rest == 0 ? 1.0f : std::fma(z, rest, 1.0f));
  }
  // Over blocks of 128 rows, counted from the call's first.
  struct Sum {
    float block = 0;
    int64_t number = 0;
    double total = 0;
    void add(float x, float y, int64_t row) {
      if (row / 128 != number) {
        total += double{block};
        block = 0, number = row / 128;
      }
      block = std::fma(x, y, block);
    }
    double value() const { return total + double{block}; }
  };
  static void set(const Out& t, int64_t row, int64_t i, double x) {
    if (t) Rows(t).set(row, i, std::isnan(x) && t.dtype() == DType::f32 ? double{canonical(NAN)} : x);
  }
};

}  // namespace

bool short_conv_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "conv32") return false;
  short_conv::forward<Single>(*reinterpret_cast<const ShortConv*>(q.slots));
  return true;
}
bool short_conv_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != "conv32") return false;
  short_conv::backward<Single>(*reinterpret_cast<const ShortConvBwd*>(q.slots));
  return true;
}

}  // namespace rlk::registry
