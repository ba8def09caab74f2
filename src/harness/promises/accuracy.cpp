#include "src/harness/derived.hpp"
#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

void judge_accuracy(Trial& t, const Problem& p, const Outcome& out) {
  const Outcome& truth = t.references().truth_of(p);
  t.record().tried(Promise::accuracy);
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    const Array& got = out.results[i];
    if (got.dtype == DType::none) continue;
    const char* name = p.schema().arguments[i].name;
    const registry::Bound bound = t.bound_of(p, name, got.dtype);
    const Array* scale = p.cancels ? &t.references().scale_of(p).results[i] : nullptr;
    Difference where{};
    Distance distance(name, got.dtype, bound);
    std::string problem = distance.add(got, truth.results[i], bound, p.exact ? 0 : p.reduction, where, scale);
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
