#include "src/harness/order.hpp"
#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

std::optional<Difference> first_change_of_a_row(const Variant& v, std::size_t result, const Outcome& base,
                                                const Outcome& out) {
  const int32_t axis = v.problem.batch_axis[result];
  if (axis == -1) return std::nullopt;  // a sum over rows: no row of its own
  std::vector<int64_t> mine, theirs;
  for (std::size_t r = 0; r < v.source.size(); ++r)
    if (v.source[r] >= 0) mine.push_back(v.source[r]), theirs.push_back(static_cast<int64_t>(r));
  return first_difference(take_rows(base.results[result], axis, mine),
                          take_rows(out.results[result], axis, theirs));
}

void judge_order(Trial& t, const Problem& p, const std::vector<std::string>& arguments) {
  const std::string transform = kOrderOfAddition;
  if (!t.wants(transform) || !t.record().begin(p, transform, Step::judged, t.patience(p, 100))) return;
  t.record().transform_known(transform);
  const auto order = probe_order(p, arguments, t.subject());
  if (!order) return;
  t.record().tried(Promise::batch_invariance);
  t.record().covered(transform);
  if (!order->equal)
    t.fail(Promise::batch_invariance, p, transform, order->result, nullptr,
           "the tree of additions changes with the number of rows");
  t.record().order(*order);
}

}  // namespace rlk::harness
