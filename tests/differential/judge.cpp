#include "judge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "registry/reference.hpp"

namespace differential {
namespace {

using rlk::registry::Bound;

// Spacing of the dtype at x.
double ulp(DType t, double x) {
  const int digits = t == DType::bf16 ? 8 : t == DType::f16 ? 11 : t == DType::f8_e4m3 ? 4 : 24;
  const int lowest = t == DType::f16 ? -14 : t == DType::f8_e4m3 ? -6 : -126;
  const int exponent = x == 0 ? lowest : std::max(lowest, std::ilogb(x));
  return std::ldexp(1.0, exponent - digits + 1);
}

double largest(DType t) { return t == DType::f16 ? 65504.0 : t == DType::bf16 ? 0x1.fep127 : 0x1.fffffep127; }

// What an fp32 sum may be off before it is rounded to a result's dtype, of the sum of magnitudes.
constexpr double kSum = 4e-6;

// What one element may be off.
double allowance(const Bound& bound, DType t, double truth, double peak) {
  switch (bound.metric) {
    case Bound::bits:
      return 0.5 * ulp(t, truth);
    case Bound::elementwise:
      return bound.ulps * ulp(t, truth) + bound.value * peak + bound.absolute;
    default:
      return std::max(bound.value * peak, 0.5 * ulp(t, truth) + kSum * peak);
  }
}

// An infinity where the truth, give or take, is beyond the dtype.
bool overflows(DType t, double x, double truth, double allowed) {
  return std::isinf(x) && x * truth > 0 && std::fabs(truth) + allowed >= largest(t);
}

std::string judge_rms(const Array& got, const Array& truth, const std::vector<double>& scale,
                      const Bound& bound) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < got.count(); ++i) {
    if (overflows(got.dtype, got[i], truth[i], bound.value * std::fabs(truth[i]))) continue;
    const double d = got[i] - truth[i], s = scale[static_cast<std::size_t>(i)];
    error += d * d, size += s * s;
  }
  // What is nearly zero beside its terms is measured by the last place of its type.
  const double root = std::sqrt(static_cast<double>(got.count())), grain = 0.5 * ulp(got.dtype, 0) * root;
  if (std::sqrt(error) <= std::max(bound.value * std::sqrt(size) + bound.absolute * root, grain)) return {};
  return fmt::format("RMS error {:.3g} of {:.3g}, the bound is {:.3g} of it and {:.3g}", std::sqrt(error),
                     std::sqrt(size), bound.value, bound.absolute * root);
}

}  // namespace

std::string judge(const Array& got, const Array& truth, const std::vector<double>& scale,
                  const Bound& bound) {
  if (bound.metric == Bound::rms) return judge_rms(got, truth, scale, bound);
  const int64_t n = got.count(), width = got.shape.empty() ? 1 : got.shape.back();
  for (int64_t row = 0; row < n; row += width) {
    const auto from = scale.begin() + row;
    double peak = 0;
    for (auto s = from; s != from + width; ++s)
      if (std::isfinite(*s)) peak = std::max(peak, *s);
    for (int64_t i = row; i < row + width; ++i) {
      const double x = got[i], y = truth[i];
      if (std::isnan(y)   ? std::isnan(x)
          : std::isinf(y) ? x == y
                          : std::fabs(x - y) <= allowance(bound, got.dtype, y, peak))
        continue;
      if (overflows(got.dtype, x, y, allowance(bound, got.dtype, y, peak))) continue;
      return fmt::format("element {} is {:.9g}, truth is {:.9g}, {:.3g} off, {:.3g} allowed", i, x, y,
                         std::fabs(x - y), allowance(bound, got.dtype, y, peak));
    }
  }
  return {};
}

}  // namespace differential
