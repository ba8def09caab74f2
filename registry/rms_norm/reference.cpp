// rms_norm as plainly as it can be said: ascending fp64 sums, one rounding of every result.
#include "registry/reference.hpp"

#include <vector>

#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }

// What multiplies a result, and its derivative.
struct Act {
  bool silu;
  double value(double g) const {
    if (!silu) return sigmoid(g);
    return g == -INFINITY ? 0 : g * sigmoid(g);
  }
  double slope(double g) const {
    const double s = sigmoid(g), t = sigmoid(-g);
    if (!silu) return s * t;
    return s == 0 ? 0 : t == 0 ? s : s * (1 + g * t);
  }
};

template <class Args>
double weight_at(const Args& a, int64_t i) {
  if (!a.weight) return 1;
  const double w = Rows(a.weight).get(0, i);
  return a.weight_offset ? 1 + w : w;
}

using Row = std::vector<double>;

double rstd_of(const Row& a, double eps) {
  double squares = 0;
  for (double x : a) squares = std::fma(x, x, squares);
  return 1 /
         std::sqrt(squares / static_cast<double>(a.size()) + static_cast<double>(static_cast<float>(eps)));
}

}  // namespace

int32_t rms_norm_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const RmsNorm*>(slots);
  const Rows x(a.x), y(a.y);
  const Act act{a.gate_act == RmsNorm::GateAct::silu};
  Row row(static_cast<std::size_t>(x.width()));
  for (int64_t m = 0; m < x.count(); ++m) {
    for (int64_t i = 0; i < x.width(); ++i) {
      double v = x.get(m, i);
      if (a.residual) v = round_to(a.residual.dtype(), v + Rows(a.residual).get(m, i));
      row[static_cast<std::size_t>(i)] = v;
      if (a.sum) Rows(a.sum).set(m, i, v);
    }
    const double r = rstd_of(row, a.eps);
    if (a.rstd) Rows(a.rstd).set(m, 0, r);
    for (int64_t i = 0; i < x.width(); ++i) {
      double v = row[static_cast<std::size_t>(i)] * r;
      if (a.cast == RmsNorm::Cast::early) v = round_to(a.x.dtype(), v);
      v *= weight_at(a, i);
      if (a.gate) v *= act.value(Rows(a.gate).get(m, i));
      y.set(m, i, v);
    }
  }
  return RLK_OK;
}

int32_t rms_norm_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const RmsNormBwd*>(slots);
  const Rows d_y(a.d_y), x(a.sum ? a.sum : a.x);
  const Act act{a.gate_act == RmsNormBwd::GateAct::silu};
  const int64_t width = x.width();
  Row row(static_cast<std::size_t>(width)), g = row, d_weight = row;
  for (int64_t m = 0; m < x.count(); ++m) {
    for (int64_t i = 0; i < width; ++i) {
      const double v = x.get(m, i);
      row[static_cast<std::size_t>(i)] =
          a.residual && !a.sum ? round_to(a.residual.dtype(), v + Rows(a.residual).get(m, i)) : v;
    }
    const double r = a.rstd ? Rows(a.rstd).get(m, 0) : rstd_of(row, a.eps);
    double dot = 0;
    for (int64_t i = 0; i < width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double normal = row[at] * r;
      double d = d_y.get(m, i);
      if (a.gate) {
        const double z = Rows(a.gate).get(m, i);
        if (a.d_gate) Rows(a.d_gate).set(m, i, d * normal * weight_at(a, i) * act.slope(z));
        d *= act.value(z);
      }
      d_weight[at] = std::fma(d, normal, d_weight[at]);
      g[at] = d * weight_at(a, i);
      dot = std::fma(g[at], normal, dot);
    }
    for (int64_t i = 0; i < width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      double d = r * std::fma(-row[at] * r, dot / static_cast<double>(width), g[at]);
      if (a.d_sum) d += Rows(a.d_sum).get(m, i);
      if (a.d_x) Rows(a.d_x).set(m, i, d);
      if (a.d_residual) Rows(a.d_residual).set(m, i, d);
    }
  }
  for (int64_t i = 0; a.d_weight && i < width; ++i)
    Rows(a.d_weight).set(0, i, d_weight[static_cast<std::size_t>(i)]);
  return RLK_OK;
}

}  // namespace rlk::registry
