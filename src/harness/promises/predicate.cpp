#include <fmt/format.h>

#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

bool judge_predicate(Trial& t, const Problem& p, const std::string& transform, const Outcome& out) {
  if (out.code == RLK_NO_IMPLEMENTATION) {
    t.record().refused(Promise::predicate);
    return false;
  }
  t.record().tried(Promise::predicate);
  if (out.code != RLK_OK) t.fail(Promise::predicate, p, transform, {}, nullptr, out.text);
  return out.code == RLK_OK;
}

// A right answer there is a refusal too many. Only on the CPU, and only in a process of its own: what was
// refused may end it.
void try_refused(Trial& t, const Problem& p, const std::string& reason) {
  if (t.subject().services) return;
  const Outcome& truth = t.references().truth_of(p);
  if (truth.code != RLK_OK || !t.record().begin(p, "", Step::forced, t.patience(p))) return;
  const Outcome out = execute_forced(p, t.subject());
  bool right = out.code == RLK_OK && out.broken.empty();
  for (std::size_t i = 0; right && i < out.results.size(); ++i) {
    if (out.results[i].dtype == DType::none) continue;
    const registry::Bound bound = t.bound_of(p, p.schema().arguments[i].name, out.results[i].dtype);
    Difference where{};
    right = Distance("", out.results[i].dtype, bound)
                .add(out.results[i], truth.results[i], bound, 0, where)
                .empty();
  }
  if (right) t.record().over_refused(fmt::format("{}: {}", p.name, reason));
}

}  // namespace rlk::harness
