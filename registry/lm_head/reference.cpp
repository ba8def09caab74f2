// lm_head as plainly as it can be said: one ascending fp64 FMA chain per result, one rounding.
#include "registry/reference.hpp"

#include "rlk/ops.hpp"

namespace rlk::registry {

RLK_FUSED int32_t lm_head_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LmHead*>(slots);
  const Dense hidden(a.hidden), weight(a.weight);
  const Rows out(a.out);
  for (int64_t m = 0; m < hidden.count; ++m)
    for (int64_t v = 0; v < weight.count; ++v) {
      double sum = 0;
      for (int64_t k = 0; k < hidden.width; ++k) sum = std::fma(hidden.get(m, k), weight.get(v, k), sum);
      if (a.bias) {
        // fp64 truth keeps everything; other results round the product first, then the sum.
        const double rounded = a.out.dtype() == DType::f64 ? sum : round_to(a.out.dtype(), sum);
        sum = rounded + Rows(a.bias).get(0, v);
      }
      out.set(m, v, sum);
    }
  return RLK_OK;
}

RLK_FUSED int32_t lm_head_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LmHeadBwd*>(slots);
  const Dense d_out(a.d_out), hidden(a.hidden), weight(a.weight);
  const int64_t rows = hidden.count, width = hidden.width, columns = weight.count;
  if (a.d_hidden)
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t k = 0; k < width; ++k) {
        double sum = 0;
        for (int64_t v = 0; v < columns; ++v) sum = std::fma(d_out.get(m, v), weight.get(v, k), sum);
        Rows(a.d_hidden).set(m, k, sum);
      }
  for (int64_t v = 0; v < columns; ++v) {
    if (a.d_weight)
      for (int64_t k = 0; k < width; ++k) {
        double sum = 0;
        for (int64_t m = 0; m < rows; ++m) sum = std::fma(d_out.get(m, v), hidden.get(m, k), sum);
        Rows(a.d_weight).set(v, k, sum);
      }
    if (a.d_bias) {
      double sum = 0;
      for (int64_t m = 0; m < rows; ++m) sum += d_out.get(m, v);
      Rows(a.d_bias).set(0, v, sum);
    }
  }
  return RLK_OK;
}

}  // namespace rlk::registry
