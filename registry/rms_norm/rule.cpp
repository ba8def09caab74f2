// rms32 as the page has it, in plain loops, independent of every kernel.
#include <array>
#include <cmath>
#include <vector>

#include "registry/exp32.hpp"
#include "registry/op.hpp"
#include "registry/reference.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {

int32_t rms_norm_reference(const rlk_slot* slots, const rlk_host*);
int32_t rms_norm_bwd_reference(const rlk_slot* slots, const rlk_host*);

namespace {

using Row = std::vector<float>;

float in_1024_lanes(const Row& x, const Row& y) {
  std::array<float, 1024> lane{};
  for (std::size_t i = 0; i < x.size(); ++i) lane[i % 1024] = std::fma(x[i], y[i], lane[i % 1024]);
  for (std::size_t half = 512; half > 0; half /= 2)
    for (std::size_t j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
  return lane[0];
}

float rstd_of(const Row& a, double eps) {
  const float mean = in_1024_lanes(a, a) / static_cast<float>(a.size());
  return 1.0f / std::sqrt(mean + static_cast<float>(eps));
}

float logistic(float g) { return 1.0f / (1.0f + exp32(-g)); }
float value(bool silu, float g) {
  if (!silu) return logistic(g);
  return g == -INFINITY ? -0.0f : g / (1.0f + exp32(-g));
}
float slope(bool silu, float g) {
  const float s = logistic(g), rest = exp32(-g) * s;
  if (s == 0) return 0;
  if (!silu) return s * rest;
  return rest == 0 ? s : s * std::fma(g, rest, 1.0f);
}

float get(const Rows& t, int64_t row, std::size_t i) {
  return static_cast<float>(t.get(row, static_cast<int64_t>(i)));
}
void set(const Rows& t, const Out& view, int64_t row, std::size_t i, float x) {
  t.set(row, static_cast<int64_t>(i), view.dtype() == DType::f32 ? canonical(x) : x);
}

// fp64's rule is the reference's, but for the one NaN that results have.
bool by_reference(const rlk_slot* slots, int32_t (*reference)(const rlk_slot*, const rlk_host*),
                  std::initializer_list<Out> results) {
  if (reference(slots, nullptr) != RLK_OK) return false;
  for (const Out& t : results)
    for (int64_t i = 0, n = t && t.dtype() == DType::f32 ? t.numel() : 0; i < n; ++i)
      t.data<float>()[i] = canonical(t.data<float>()[i]);
  return true;
}

template <class Args>
Row weights(const Args& a, std::size_t width) {
  Row w(width, 1.0f);
  for (std::size_t i = 0; a.weight && i < width; ++i) {
    w[i] = get(Rows(a.weight), 0, i);
    if (a.weight_offset) w[i] = 1.0f + w[i];
  }
  return w;
}

}  // namespace

bool rms_norm_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const RmsNorm*>(q.slots);
  // Another exponential in fp64 may differ in its last bit.
  if (q.arithmetic == "fma64" && !a.gate)
    return by_reference(q.slots, rms_norm_reference, {a.y, a.sum, a.rstd});
  if (q.arithmetic != "rms32") return false;
  const Rows x(a.x);
  const auto width = static_cast<std::size_t>(x.width());
  const bool silu = a.gate_act == RmsNorm::GateAct::silu;
  const Row w = weights(a, width);
  Row row(width);
  for (int64_t m = 0; m < x.count(); ++m) {
    for (std::size_t i = 0; i < width; ++i) {
      row[i] = get(x, m, i);
      if (!a.residual) continue;
      row[i] = static_cast<float>(round_to(a.residual.dtype(), row[i] + get(Rows(a.residual), m, i)));
      if (a.sum) set(Rows(a.sum), a.sum, m, i, row[i]);
    }
    const float r = rstd_of(row, a.eps);
    if (a.rstd) set(Rows(a.rstd), a.rstd, m, 0, r);
    for (std::size_t i = 0; i < width; ++i) {
      float y = row[i] * r;
      if (a.cast == RmsNorm::Cast::early) y = static_cast<float>(round_to(a.x.dtype(), y));
      y = y * w[i];
      if (a.gate) y = y * value(silu, get(Rows(a.gate), m, i));
      set(Rows(a.y), a.y, m, i, y);
    }
  }
  return true;
}

bool rms_norm_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const RmsNormBwd*>(q.slots);
  if (q.arithmetic == "fma64" && !a.gate)
    return by_reference(q.slots, rms_norm_bwd_reference, {a.d_x, a.d_residual, a.d_weight, a.d_gate});
  if (q.arithmetic != "rms32") return false;
  const Rows x(a.sum ? a.sum : a.x);
  const auto width = static_cast<std::size_t>(x.width());
  const bool silu = a.gate_act == RmsNormBwd::GateAct::silu;
  const Row w = weights(a, width);
  std::vector<double> d_weight(width);
  Row normal(width), d(width), block(width);
  for (int64_t m = 0; m < x.count(); ++m) {
    if (m % 128 == 0) block.assign(width, 0.0f);
    for (std::size_t i = 0; i < width; ++i) {
      normal[i] = get(x, m, i);
      if (a.residual && !a.sum)
        normal[i] = static_cast<float>(round_to(a.residual.dtype(), normal[i] + get(Rows(a.residual), m, i)));
    }
    const float r = a.rstd ? get(Rows(a.rstd), m, 0) : rstd_of(normal, a.eps);
    for (std::size_t i = 0; i < width; ++i) {
      normal[i] = normal[i] * r;
      d[i] = get(Rows(a.d_y), m, i);
      if (a.gate) {
        const float z = get(Rows(a.gate), m, i);
        if (a.d_gate) set(Rows(a.d_gate), a.d_gate, m, i, d[i] * (normal[i] * w[i]) * slope(silu, z));
        d[i] = d[i] * value(silu, z);
      }
      block[i] = std::fma(d[i], normal[i], block[i]);
      d[i] = d[i] * w[i];
    }
    if (m % 128 == 127 || m + 1 == x.count())
      for (std::size_t i = 0; i < width; ++i) d_weight[i] += double{block[i]};
    const float mean = in_1024_lanes(d, normal) / static_cast<float>(width);
    for (std::size_t i = 0; i < width; ++i) {
      float g = r * std::fma(-normal[i], mean, d[i]);
      if (a.d_sum) g = g + get(Rows(a.d_sum), m, i);
      if (a.d_x) set(Rows(a.d_x), a.d_x, m, i, g);
      if (a.d_residual) set(Rows(a.d_residual), a.d_residual, m, i, g);
    }
  }
  for (std::size_t i = 0; a.d_weight && i < width; ++i) {
    const double g =
        std::isnan(d_weight[i]) && a.d_weight.dtype() == DType::f32 ? double{canonical(NAN)} : d_weight[i];
    Rows(a.d_weight).set(0, static_cast<int64_t>(i), g);
  }
  return true;
}

}  // namespace rlk::registry
