#include "src/harness/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "registry/reference.hpp"

namespace rlk::harness {

using registry::Bound;

namespace {

uint64_t bits_at(const Array& a, int64_t i) {
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  uint64_t out = 0;
  std::memcpy(&out, a.bytes.data() + static_cast<std::size_t>(i) * size, size);
  return out;
}

// Position of a value among all values of its dtype: neighbours differ by one.
int64_t place(DType t, double x) {
  unsigned char raw[8] = {};
  registry::store(t, raw, 0, x);
  const auto size = size_of(t);
  uint64_t bits = 0;
  std::memcpy(&bits, raw, static_cast<std::size_t>(size));
  const uint64_t sign = uint64_t{1} << (size * 8 - 1);
  return bits & sign ? -static_cast<int64_t>(bits & (sign - 1)) : static_cast<int64_t>(bits);
}

// Size of the last place of a value rounded to a dtype.
double ulp(DType t, double x) {
  const int64_t p = place(t, x);
  const int fraction = t == DType::bf16 ? 7 : t == DType::f16 ? 10 : t == DType::f32 ? 23 : 52;
  const int lowest = t == DType::f16 ? -24 : t == DType::bf16 ? -133 : t == DType::f32 ? -149 : -1074;
  if (p == 0) return std::ldexp(1, lowest);
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1, std::max(exponent - 1 - fraction, lowest));
}

bool floating(DType t) { return t == DType::f16 || t == DType::bf16 || t == DType::f32 || t == DType::f64; }

}  // namespace

std::optional<Difference> first_difference(const Array& expected, const Array& got) {
  const int bits = static_cast<int>(size_of(got.dtype) * 8);
  if (expected.bytes.size() != got.bytes.size())
    return Difference{-1, expected.bytes.size(), got.bytes.size(), 0};
  if (expected.bytes.empty() || std::memcmp(expected.bytes.data(), got.bytes.data(), got.bytes.size()) == 0)
    return {};
  for (int64_t i = 0, n = static_cast<int64_t>(got.bytes.size()) / size_of(got.dtype); i < n; ++i)
    if (bits_at(expected, i) != bits_at(got, i))
      return Difference{i, bits_at(expected, i), bits_at(got, i), bits};
  return {};
}

Distance::Distance(std::string result, DType dtype, const Bound& bound) {
  constexpr const char* kMetrics[] = {"peak", "elementwise", "rms", "bits", "none"};
  a_.result = std::move(result);
  a_.dtype = name_of(dtype);
  a_.metric = kMetrics[bound.metric];
  a_.bound = bound.value;
}

std::string Distance::add(const Array& got, const Array& truth, const Bound& bound, int64_t reduction,
                          Difference& where, const Array* scale) {
  const DType t = got.dtype;
  if (bound.metric == Bound::none) return {};
  if (!floating(t)) {
    for (int64_t i = 0; i < got.numel(); ++i)
      if (registry::load(t, got.bytes.data(), i) != registry::load(truth.dtype, truth.bytes.data(), i)) {
        where = {i, bits_at(truth, i), bits_at(got, i), static_cast<int>(size_of(t) * 8)};
        return "an integer result differs";
      }
    return {};
  }
  const int64_t n = got.numel(), width = got.shape.empty() ? 1 : std::max<int64_t>(1, got.shape.back());
  const auto value = [&](int64_t i) { return registry::load(t, got.bytes.data(), i); };
  const auto right = [&](int64_t i) { return registry::load(truth.dtype, truth.bytes.data(), i); };
  // A row may be this many times as wrong as a whole result, counted from half of the whole's RMS on.
  const double most_of_row = 8 * bound.value;
  double least_row = 0;
  for (int64_t i = 0; bound.metric == Bound::rms && i < n; ++i)
    if (const double y = right(i); std::isfinite(y))
      least_row += 0.25 * y * y / static_cast<double>(n) * static_cast<double>(width);
  std::string problem;
  double worst_here = 0, squares = 0, truth_squares = 0;
  int64_t rounded_wrong = 0, counted = 0;
  const auto report = [&](int64_t i, std::string text) {
    if (!problem.empty()) return;
    unsigned char raw[8] = {};
    registry::store(t, raw, 0, right(i));
    uint64_t expected = 0;
    std::memcpy(&expected, raw, static_cast<std::size_t>(size_of(t)));
    where = {i, expected, bits_at(got, i), static_cast<int>(size_of(t) * 8)};
    problem = std::move(text);
  };
  for (int64_t row = 0; row < n; row += width) {
    double peak = 0, row_squares = 0, row_truth = 0;
    for (int64_t i = row; i < row + width; ++i)
      if (const double y = scale ? registry::load(scale->dtype, scale->bytes.data(), i) : right(i);
          std::isfinite(y))
        peak = std::max(peak, std::fabs(y));
    for (int64_t i = row; i < row + width; ++i) {
      const double x = value(i), y = right(i);
      if (std::isnan(y) || std::isinf(y)) {
        if (!(std::isnan(y) ? std::isnan(x) : x == y))
          report(i, fmt::format("got {:g}, truth is {:g}", x, y));
        continue;
      }
      const double error = std::fabs(x - y);
      if (!(error <= 1e300)) {
        // A truth past the dtype's range rounds to infinity: that is right.
        if (!(std::isinf(x) && place(t, x) == place(t, y)))
          report(i, fmt::format("got {:g}, truth is {:g}", x, y));
        continue;
      }
      // A subnormal factor that counts as zero takes its product with it.
      if (bound.flushes && x == 0 && std::fabs(y) < 0x1p-110) continue;
      const int64_t ulps = std::abs(place(t, x) - place(t, y));
      ++a_.elements;
      exact_ += ulps == 0;
      a_.worst_ulps = std::max(a_.worst_ulps, static_cast<double>(ulps));
      ++a_.ulps[ulps == 0 ? 0
                          : static_cast<std::size_t>(
                                std::min<int64_t>(15, 1 + std::bit_width(static_cast<uint64_t>(ulps - 1))))];
      squares += error * error;
      truth_squares += y * y;
      const double relative = peak > 0 ? error / peak : error > 0 ? INFINITY : 0;
      // The last place of the dtype is not the arithmetic's fault: subnormal results keep half of one.
      const double grain = 0.5 * ulp(t, y);
      double metric = relative;
      bool good = true;
      switch (bound.metric) {
        case Bound::peak:
          good = error <= std::max(bound.value * peak, grain);
          if (bound.ulps > 0 && std::fabs(y) >= peak / 64) {
            ++counted;
            rounded_wrong += ulps > 0;
            if (static_cast<double>(ulps) > bound.ulps)
              report(i, fmt::format("{} ulp from the truth, at most {:g} are allowed from peak/64 on", ulps,
                                    bound.ulps));
          }
          break;
        case Bound::elementwise:
          good = error <= bound.ulps * ulp(t, y) + bound.value * peak;
          metric = error / (ulp(t, y) + bound.value * peak);
          break;
        case Bound::bits:
          good = ulps == 0;
          metric = static_cast<double>(ulps);
          break;
        case Bound::rms:
          row_squares += error * error;
          row_truth += y * y;
          break;
        case Bound::none:
          break;
      }
      if (!good)
        report(i, fmt::format("got {:g}, truth is {:g}: {:.3g} of the row's peak, the bound is {:.3g}", x, y,
                              relative, bound.value));
      if (bound.metric != Bound::rms) worst_here = std::max(worst_here, metric);
      if (samples_.size() < 200000 || (static_cast<uint64_t>(i) * 2654435761u & 15u) == 0)
        samples_.push_back(metric);
    }
    // Over a whole result a wrong row or element would drown.
    if (bound.metric == Bound::rms &&
        !(row_squares <= most_of_row * most_of_row * std::max(row_truth, least_row)))
      report(row,
             fmt::format("this row's RMS error is {:.3g} of the larger of its truth and half of the whole's, "
                         "the bound for a row is {:.3g}",
                         std::sqrt(row_squares / std::max(row_truth, least_row)), most_of_row));
  }
  if (bound.metric == Bound::rms) {
    const double ratio = truth_squares > 0 ? std::sqrt(squares / truth_squares) : squares > 0 ? INFINITY : 0;
    worst_here = ratio;
    if (!(ratio <= bound.value))
      report(0, fmt::format("RMS error is {:.3g} of the truth's, the bound is {:.3g}", ratio, bound.value));
  }
  if (counted >= 1000 && static_cast<double>(rounded_wrong) > 0.01 * static_cast<double>(counted))
    report(0, fmt::format(
                  "{} of {} elements from peak/64 on are not the correctly rounded truth, at most 1% may be",
                  rounded_wrong, counted));
  a_.worst = std::max(a_.worst, worst_here);
  if (reduction > 0) {
    auto at = std::find_if(a_.over_length.begin(), a_.over_length.end(),
                           [&](const auto& e) { return e.first == reduction; });
    if (at == a_.over_length.end())
      a_.over_length.emplace_back(reduction, worst_here);
    else
      at->second = std::max(at->second, worst_here);
  }
  return problem;
}

Accuracy Distance::summary() const {
  Accuracy out = a_;
  out.share_exact = out.elements ? static_cast<double>(exact_) / static_cast<double>(out.elements) : 1;
  std::vector<double> sorted = samples_;
  if (!sorted.empty()) {
    const auto at = static_cast<std::ptrdiff_t>(static_cast<double>(sorted.size() - 1) * 0.999);
    std::nth_element(sorted.begin(), sorted.begin() + at, sorted.end());
    out.p999 = sorted[static_cast<std::size_t>(at)];
  }
  std::sort(out.over_length.begin(), out.over_length.end());
  return out;
}

}  // namespace rlk::harness
