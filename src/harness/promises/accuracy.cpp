#include <cmath>

#include "src/harness/derived.hpp"
#include "src/harness/promises/promises.hpp"

namespace rlk::harness {
namespace {

// Of a few sums the largest may be nothing beside what errors come from. What the peak of a whole row of sums of so many such
// terms is: for normal data the largest of sixteen is 3.3 times what their terms' sizes add up to, over the root of their number.
Peaks peaks_of(Trial& t, const Problem& p, const Outcome& truth, std::size_t result) {
  constexpr int64_t kFew = 16;
  constexpr double kPeak = 2;
  const Array& right = truth.results[result];
  if (p.cancels) return {.instead = &t.references().scale_of(p).results[result]};
  if (p.exact || p.reduction < 2 || right.numel() == 0 || right.shape.back() >= kFew) return {};
  return {.terms = &t.references().scale_of(p).results[result],
          .part = kPeak / std::sqrt(static_cast<double>(p.reduction))};
}

}  // namespace

void judge_accuracy(Trial& t, const Problem& p, const Outcome& out) {
  const Outcome& truth = t.references().truth_of(p);
  t.record().tried(Promise::accuracy);
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    const Array& got = out.results[i];
    if (got.dtype == DType::none) continue;
    const char* name = p.schema().arguments[i].name;
    const registry::Bound bound = t.bound_of(p, name, got.dtype);
    Difference where{};
    Distance distance(name, got.dtype, bound);
    std::string problem = distance.add(got, truth.results[i], bound, p.exact ? 0 : p.reduction, where,
                                       peaks_of(t, p, truth, i));
    if (!problem.empty() && is_derived(p.name)) {
      if (t.near_truth(p, i, bound, got)) problem.clear();
    } else {
      Accuracy summary = distance.summary();
      summary.bound_ulps = bound.ulps;
      summary.bound_absolute = bound.absolute;
      t.record().accuracy(summary);
    }
    if (!problem.empty()) t.fail(Promise::accuracy, p, "", name, &where, problem);
  }
}

}  // namespace rlk::harness
