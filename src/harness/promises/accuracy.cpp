#include <algorithm>
#include <cmath>

#include "src/harness/derived.hpp"
#include "src/harness/promises/promises.hpp"

namespace rlk::harness {
namespace {

// What a row's sums are made of may have cancelled, in one of a few or, where all have a factor in common, in all of them. Then
// it counts as no less than rows of so many such terms on average: the largest of sixteen sums of normal numbers is 3.3 times
// what the terms' sizes add up to, over the root of their number.
Peaks peaks_of_terms(Trial& t, const Problem& p, std::size_t result) {
  constexpr double kPeak = 2;
  const auto terms = static_cast<double>(std::max<int64_t>(1, p.reduction));
  return {.terms = &t.references().scale_of(p).results[result],
          .part = std::min(1.0, kPeak / std::sqrt(terms))};
}

// Adds a result's distance to the record, or says what is wrong.
std::string judge(Trial& t, const Problem& p, const Array& got, std::size_t result, Difference& where) {
  const char* name = p.schema().arguments[result].name;
  const registry::Bound bound = t.bound_of(p, name, got.dtype);
  const Array& truth = t.references().truth_of(p).results[result];
  const auto measure = [&](Distance& distance, const Peaks& peaks) {
    return distance.add(got, truth, bound, p.exact ? 0 : p.reduction, where, peaks);
  };
  Distance distance(name, got.dtype, bound);
  std::string problem =
      measure(distance, p.cancels ? Peaks{.instead = &t.references().scale_of(p).results[result]} : Peaks{});
  if (!problem.empty() && is_derived(p.name)) return t.near_truth(p, result, bound, got) ? "" : problem;
  if (!problem.empty() && !p.cancels && !p.exact) {
    if (t.is_nothing(p, result, bound, got)) return {};
    distance = Distance(name, got.dtype, bound);
    problem = measure(distance, peaks_of_terms(t, p, result));
  }
  Accuracy summary = distance.summary();
  summary.bound_ulps = bound.ulps;
  summary.bound_absolute = bound.absolute;
  t.record().accuracy(summary);
  return problem;
}

}  // namespace

void judge_accuracy(Trial& t, const Problem& p, const Outcome& out) {
  t.record().tried(Promise::accuracy);
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    if (out.results[i].dtype == DType::none) continue;
    Difference where{};
    const std::string problem = judge(t, p, out.results[i], i, where);
    if (!problem.empty()) t.fail(Promise::accuracy, p, "", p.schema().arguments[i].name, &where, problem);
  }
}

}  // namespace rlk::harness
