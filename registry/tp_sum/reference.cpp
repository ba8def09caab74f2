// tp_sum in fp64: every addition rounded where golden rounds, once to y's dtype.
#include "registry/reference.hpp"

#include "rlk/ops.hpp"

namespace rlk::registry {

int32_t tp_sum_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const TpSum*>(slots);
  const Rows partials(a.partials), y(a.y);
  const int64_t count = a.partials.dim(0), rows = a.partials.dim(1);
  const auto rounded = [&](double v) { return a.y.dtype() == DType::f64 ? v : round_to(a.y.dtype(), v); };
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < y.width(); ++n) {
      double sum = 0;
      for (int64_t t = 0; t < count; ++t) sum += partials.get(t * rows + m, n);
      if (a.bias) sum = rounded(sum) + Rows(a.bias).get(0, n);
      if (a.residual) sum = rounded(sum) + Rows(a.residual).get(m, n);
      y.set(m, n, sum);
    }
  return RLK_OK;
}

}  // namespace rlk::registry
