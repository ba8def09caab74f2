// tp_sum in fp64: every addition rounded where golden rounds, once to y's dtype; and its gradients.
#include "registry/reference.hpp"

#include "rlk/ops.hpp"

namespace rlk::registry {

int32_t tp_sum_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const TpSum*>(slots);
  const Rows partials(a.partials), y(a.y);
  const In others[] = {a.p1, a.p2, a.p3, a.p4, a.p5, a.p6, a.p7};
  const bool stacked = a.partials.rank() == 3;
  const int64_t count = stacked ? a.partials.dim(0) : 1, rows = a.partials.dim(-2);
  const auto rounded = [&](double v) { return a.y.dtype() == DType::f64 ? v : round_to(a.y.dtype(), v); };
  for (int64_t m = 0; m < a.y.dim(0); ++m)
    for (int64_t n = 0; n < y.width(); ++n) {
      double sum = 0;
      for (int64_t t = 0; t < count; ++t) sum += partials.get(t * rows + a.row_first + m, n);
      for (const In& p : others)
        if (p) sum += Rows(p).get(a.row_first + m, n);
      if (a.bias) sum = rounded(sum) + Rows(a.bias).get(0, n);
      if (a.residual) sum = rounded(sum) + Rows(a.residual).get(m, n);
      y.set(m, n, sum);
    }
  return RLK_OK;
}

int32_t tp_sum_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const TpSumBwd*>(slots);
  const Rows d_y(a.d_y);
  const int64_t count = a.partials.rank() == 3 ? a.partials.dim(0) : 1, rows = a.partials.dim(-2),
                width = a.partials.dim(-1), summed = a.d_y.dim(0);
  const Out others[] = {a.d_p1, a.d_p2, a.d_p3, a.d_p4, a.d_p5, a.d_p6, a.d_p7};
  for (int64_t n = 0; n < width; ++n) {
    double sum = 0;
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t row = m - a.row_first;
      const double d = row >= 0 && row < summed ? d_y.get(row, n) : 0;
      for (int64_t t = 0; a.d_partials && t < count; ++t) Rows(a.d_partials).set(t * rows + m, n, d);
      for (const Out& p : others)
        if (p) Rows(p).set(m, n, d);
      if (row < 0 || row >= summed) continue;
      sum += d;
      if (a.d_residual) Rows(a.d_residual).set(row, n, d);
    }
    if (a.d_bias) Rows(a.d_bias).set(0, n, sum);
  }
  return RLK_OK;
}

}  // namespace rlk::registry
