// linear as plainly as it can be said: one ascending fp64 FMA chain per result, then what is added to it, then swiglu.
#include "registry/reference.hpp"

#include "registry/linear/geometry.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {

RLK_FUSED int32_t linear_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const Linear*>(slots);
  const Dense x(a.x), weight(a.weight);
  const Rows y(a.y);
  // fp64 truth keeps everything; other results round the product first, then every sum.
  const auto rounded = [&](double v) { return a.y.dtype() == DType::f64 ? v : round_to(a.y.dtype(), v); };
  const auto element = [&](int64_t m, int64_t n) {
    double sum = 0;
    for (int64_t k = 0; k < x.width; ++k) sum = std::fma(x.get(m, k), weight.get(n, k), sum);
    if (a.bias) sum = rounded(sum) + Rows(a.bias).get(0, n);
    if (a.residual) sum = rounded(sum) + Rows(a.residual).get(m, n);
    return sum;
  };
  const bool gated = a.activation == Linear::Activation::swiglu;
  const gate_up::Layout rows(a.gate_up == Linear::GateUp::interleaved64, y.width());
  for (int64_t m = 0; m < x.count; ++m)
    for (int64_t i = 0; i < y.width(); ++i) {
      if (!gated) {
        y.set(m, i, element(m, i));
        continue;
      }
      const double gate = rounded(element(m, rows.gate(i))), up = rounded(element(m, rows.gate(i) + rows.up));
      const double value = gate == -INFINITY ? 0 : gate / (1 + std::exp(-gate));
      y.set(m, i, (a.roundings == Linear::Roundings::twice ? rounded(value) : value) * up);
    }
  return RLK_OK;
}

RLK_FUSED int32_t linear_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LinearBwd*>(slots);
  const Dense d_y(a.d_y), x(a.x), weight(a.weight);
  const int64_t rows = x.count, width = x.width, columns = weight.count;
  for (int64_t m = 0; a.d_x && m < rows; ++m)
    for (int64_t k = 0; k < width; ++k) {
      double sum = 0;
      for (int64_t n = 0; n < columns; ++n) sum = std::fma(d_y.get(m, n), weight.get(n, k), sum);
      Rows(a.d_x).set(m, k, sum);
    }
  for (int64_t n = 0; n < columns; ++n) {
    for (int64_t k = 0; a.d_weight && k < width; ++k) {
      double sum = 0;
      for (int64_t m = 0; m < rows; ++m) sum = std::fma(d_y.get(m, n), x.get(m, k), sum);
      if (a.d_weight_before) sum += Rows(a.d_weight_before).get(n, k);
      Rows(a.d_weight).set(n, k, sum);
    }
    double sum = 0;
    for (int64_t m = 0; m < rows; ++m) {
      sum += d_y.get(m, n);
      if (a.d_residual) Rows(a.d_residual).set(m, n, 0 + d_y.get(m, n));
    }
    if (a.d_bias_before) sum += Rows(a.d_bias_before).get(0, n);
    if (a.d_bias) Rows(a.d_bias).set(0, n, sum);
  }
  return RLK_OK;
}

}  // namespace rlk::registry
