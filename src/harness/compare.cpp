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
  const auto from_zero = [](auto bits, auto magnitude) {
    return bits == magnitude ? static_cast<int64_t>(magnitude) : -static_cast<int64_t>(magnitude);
  };
  if (t == DType::f32) {  // nearly all that are asked for
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
    return from_zero(bits, bits & 0x7fffffffu);
  }
  unsigned char raw[8] = {};
  registry::store(t, raw, 0, x);
  const auto size = size_of(t);
  uint64_t bits = 0;
  std::memcpy(&bits, raw, static_cast<std::size_t>(size));
  const uint64_t sign = uint64_t{1} << (size * 8 - 1);
  return from_zero(bits, bits & (sign - 1));
}

// Bits of a dtype's fraction, and the power of two that its smallest number is.
struct Places {
  int fraction, lowest;
};
Places places_of(DType t) {
  switch (t) {
    case DType::f8_e4m3:
      return {3, -9};
    case DType::f16:
      return {10, -24};
    case DType::bf16:
      return {7, -133};
    case DType::f32:
      return {23, -149};
    default:
      return {52, -1074};
  }
}

// Size of the last place of a value rounded to a dtype.
double ulp(DType t, double x) {
  const auto [fraction, lowest] = places_of(t);
  // By its bits: frexp and ldexp would take longer than all else that is done with an element. Subnormal doubles are
  // below every lowest place.
  const int exponent = static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023;
  const int last = std::max(exponent - fraction, lowest);
  return last < -1022 ? std::ldexp(1, last) : std::bit_cast<double>(static_cast<uint64_t>(last + 1023) << 52);
}

bool floating(DType t) {
  return t == DType::f16 || t == DType::bf16 || t == DType::f8_e4m3 || t == DType::f32 || t == DType::f64;
}

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

double largest(const Array& a, int64_t first, int64_t end) {
  double found = 0;
  for (int64_t i = first; i < end; ++i)
    if (const double y = registry::load(a.dtype, a.bytes.data(), i); std::isfinite(y))
      found = std::max(found, std::fabs(y));
  return found;
}

Distance::Distance(std::string result, DType dtype, const Bound& bound) {
  constexpr const char* kMetrics[] = {"peak", "elementwise", "rms", "bits", "none"};
  a_.result = std::move(result);
  a_.dtype = name_of(dtype);
  a_.metric = kMetrics[bound.metric];
  a_.bound = bound.value;
}

// One result beside its truth.
class Distance::Comparison {
 public:
  Comparison(Distance& to, const Array& got, const Array& truth, const Bound& bound, Difference& where,
             const Peaks& peaks)
      : to_(to), got_(got), truth_(truth), bound_(bound), where_(where), peaks_(peaks), type_(got.dtype) {}

  void integers() {
    for (int64_t i = 0; i < got_.numel(); ++i)
      if (value(i) != right(i)) {
        where_ = {i, bits_at(truth_, i), bits_at(got_, i), bits()};
        problem_ = "an integer result differs";
        return;
      }
  }
  // Returns the worst of the metric.
  double numbers() {
    const int64_t n = got_.numel(), width = got_.shape.empty() ? 1 : std::max<int64_t>(1, got_.shape.back());
    for (int64_t i = 0; bound_.metric == Bound::rms && i < n; ++i)
      if (const double y = right(i); std::isfinite(y))
        least_row_ += 0.25 * y * y / static_cast<double>(n) * static_cast<double>(width);
    for (int64_t first = 0; first < n; first += width) row(first, first + width);
    whole();
    return worst_;
  }
  std::string problem() { return std::move(problem_); }

 private:
  double value(int64_t i) const { return registry::load(type_, got_.bytes.data(), i); }
  double right(int64_t i) const { return registry::load(truth_.dtype, truth_.bytes.data(), i); }
  int bits() const { return static_cast<int>(size_of(type_) * 8); }

  void report(int64_t i, std::string text) {
    if (!problem_.empty()) return;
    unsigned char raw[8] = {};
    registry::store(type_, raw, 0, right(i));
    uint64_t expected = 0;
    std::memcpy(&expected, raw, static_cast<std::size_t>(size_of(type_)));
    where_ = {i, expected, bits_at(got_, i), bits()};
    problem_ = std::move(text);
  }

  void row(int64_t first, int64_t end) {
    peak_ = largest(peaks_.instead ? *peaks_.instead : truth_, first, end);
    if (peaks_.terms) peak_ = std::max(peak_, peaks_.part * largest(*peaks_.terms, first, end));
    row_squares_ = row_truth_ = 0;
    for (int64_t i = first; i < end; ++i)
      if (const double x = value(i), y = right(i); comparable(i, x, y)) element(i, x, y);
    // Over a whole result a wrong row or element would drown. A row may be this many times as wrong as a whole
    // result, counted from half of the whole's RMS on.
    const double most = 8 * bound_.value, least = std::max(row_truth_, least_row_);
    if (bound_.metric == Bound::rms && !(row_squares_ <= most * most * least))
      report(first, fmt::format("this row's RMS error is {:.3g} of the larger of its truth and half of the "
                                "whole's, the bound for a row is {:.3g}",
                                std::sqrt(row_squares_ / least), most));
  }

  // False where there is no distance to measure: what must be NaN or infinite is reported when it is not.
  bool comparable(int64_t i, double x, double y) {
    if (std::isfinite(y) && std::fabs(x - y) <= 1e300)
      // A subnormal factor that counts as zero takes its product with it.
      return !(bound_.flushes && x == 0 && std::fabs(y) < 0x1p-110);
    const bool same = std::isnan(y)   ? std::isnan(x)
                      : std::isinf(y) ? x == y
                                      // A truth past the dtype's range rounds to infinity: that is right.
                                      : std::isinf(x) && place(type_, x) == place(type_, y);
    if (!same) report(i, fmt::format("got {:g}, truth is {:g}", x, y));
    return false;
  }

  void element(int64_t i, double x, double y) {
    const double error = std::fabs(x - y), relative = peak_ > 0 ? error / peak_ : error > 0 ? INFINITY : 0;
    const int64_t ulps = std::abs(place(type_, x) - place(type_, y));
    count(ulps);
    squares_ += error * error;
    truth_squares_ += y * y;
    double metric = relative;
    bool good = true;
    switch (bound_.metric) {
      case Bound::peak:
        // The last place of the dtype is not the arithmetic's fault.
        good = error <= std::max(bound_.value * peak_, 0.5 * ulp(type_, y) + bound_.unrounded * peak_);
        if (bound_.ulps > 0 && std::fabs(y) >= peak_ / 64) rounded(i, ulps);
        break;
      case Bound::elementwise:
        good = error <= bound_.ulps * ulp(type_, y) + bound_.value * peak_ + bound_.absolute;
        metric = error / (ulp(type_, y) + bound_.value * peak_ + bound_.absolute);
        break;
      case Bound::bits:
        good = ulps == 0;
        metric = static_cast<double>(ulps);
        break;
      case Bound::rms:
        row_squares_ += error * error;
        row_truth_ += y * y;
        break;
      case Bound::none:
        break;
    }
    if (!good)
      report(i, fmt::format("got {:g}, truth is {:g}: {:.3g} of the row's peak, the bound is {:.3g}", x, y,
                            relative, bound_.value));
    if (bound_.metric != Bound::rms) worst_ = std::max(worst_, metric);
    if (to_.samples_.size() < 200000 || (static_cast<uint64_t>(i) * 2654435761u & 15u) == 0)
      to_.samples_.push_back(metric);
  }

  void count(int64_t ulps) {
    ++to_.a_.elements;
    to_.exact_ += ulps == 0;
    to_.a_.worst_ulps = std::max(to_.a_.worst_ulps, static_cast<double>(ulps));
    ++to_.a_.ulps[ulps == 0 ? 0
                            : static_cast<std::size_t>(std::min<int64_t>(
                                  15, 1 + std::bit_width(static_cast<uint64_t>(ulps - 1))))];
  }

  void rounded(int64_t i, int64_t ulps) {
    ++counted_;
    rounded_wrong_ += ulps > 0;
    if (static_cast<double>(ulps) > bound_.ulps)
      report(i, fmt::format("{} ulp from the truth, at most {:g} are allowed from peak/64 on", ulps,
                            bound_.ulps));
  }

  void whole() {
    if (bound_.metric == Bound::rms) {
      worst_ = truth_squares_ > 0 ? std::sqrt(squares_ / truth_squares_) : squares_ > 0 ? INFINITY : 0;
      if (!(worst_ <= bound_.value))
        report(0,
               fmt::format("RMS error is {:.3g} of the truth's, the bound is {:.3g}", worst_, bound_.value));
    }
    if (counted_ >= 1000 && static_cast<double>(rounded_wrong_) > 0.01 * static_cast<double>(counted_))
      report(0, fmt::format("{} of {} elements from peak/64 on are not the correctly rounded truth, at most "
                            "1% may be",
                            rounded_wrong_, counted_));
  }

  Distance& to_;
  const Array &got_, &truth_;
  const Bound& bound_;
  Difference& where_;
  const Peaks& peaks_;
  const DType type_;
  std::string problem_;  // the first
  double worst_ = 0, squares_ = 0, truth_squares_ = 0, least_row_ = 0;
  double peak_ = 0, row_squares_ = 0, row_truth_ = 0;  // of the row
  int64_t rounded_wrong_ = 0, counted_ = 0;
};

std::string Distance::add(const Array& got, const Array& truth, const Bound& bound, int64_t reduction,
                          Difference& where, const Peaks& peaks) {
  if (bound.metric == Bound::none) return {};
  Comparison comparison(*this, got, truth, bound, where, peaks);
  if (!floating(got.dtype)) {
    comparison.integers();
    return comparison.problem();
  }
  const double worst = comparison.numbers();
  a_.worst = std::max(a_.worst, worst);
  if (reduction > 0) {
    auto at = std::find_if(a_.over_length.begin(), a_.over_length.end(),
                           [&](const auto& e) { return e.first == reduction; });
    if (at == a_.over_length.end())
      a_.over_length.emplace_back(reduction, worst);
    else
      at->second = std::max(at->second, worst);
  }
  return comparison.problem();
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
