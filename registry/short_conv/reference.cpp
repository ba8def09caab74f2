// short_conv in fp64: ascending sums, one rounding of every result.
#include "registry/short_conv/plain.hpp"

namespace rlk::registry {
namespace {

struct Exact {
  using Number = double;
  static double sigmoid(double z) { return z < 0 ? std::exp(z) / (1 + std::exp(z)) : 1 / (1 + std::exp(-z)); }
  static double silu(double z) { return z == -INFINITY ? -0.0 : z * sigmoid(z); }
  static double times_slope(double d, double z) {
    const double s = sigmoid(z), rest = sigmoid(-z);
    if (s == 0) return 0;
    return rest == 0 ? d * s : d * s * (1 + z * rest);
  }
  struct Sum {
    double total = 0;
    void add(double x, double y, int64_t) { total = std::fma(x, y, total); }
    double value() const { return total; }
  };
  static void set(const Out& t, int64_t row, int64_t i, double x) {
    if (t) Rows(t).set(row, i, x);
  }
};

}  // namespace

int32_t short_conv_reference(const rlk_slot* slots, const rlk_host*) {
  short_conv::forward<Exact>(*reinterpret_cast<const ShortConv*>(slots));
  return RLK_OK;
}
int32_t short_conv_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  short_conv::backward<Exact>(*reinterpret_cast<const ShortConvBwd*>(slots));
  return RLK_OK;
}

}  // namespace rlk::registry
