#include <algorithm>
#include <thread>

#include "src/harness/order.hpp"
#include "src/harness/promises/promises.hpp"

namespace rlk::harness {
namespace {

Promise promise_of(const Variant& v) {
  if (v.hostile) return Promise::strict;
  return v.dimension == "repeats" ? Promise::repeats : Promise::batch_invariance;
}

std::vector<Outcome> run_variant(const Subject& subject, const Variant& v) {
  std::vector<Outcome> outs(static_cast<std::size_t>(v.users));
  if (v.users == 1) {
    outs[0] = execute(v.problem, subject, v.manner);
    return outs;
  }
  std::vector<std::thread> users;
  users.reserve(outs.size());
  for (Outcome& out : outs) {
    const bool other = v.beside && users.size() % 2;
    users.emplace_back([&, other] { out = execute(other ? *v.beside : v.problem, subject, v.manner); });
  }
  for (std::thread& u : users) u.join();
  for (std::size_t i = outs.size(); v.beside && i-- > 0;)
    if (i % 2) outs.erase(outs.begin() + static_cast<std::ptrdiff_t>(i));
  return outs;
}

void compare_rows(Trial& t, const Problem& p, const Variant& v, const Outcome& base, const Outcome& out) {
  const std::string transform = v.name();
  if (!t.healthy(v.problem, transform, out)) return;
  const Promise promise = promise_of(v);
  t.record().tried(promise);
  std::vector<int64_t> mine, theirs;
  for (std::size_t r = 0; r < v.source.size(); ++r)
    if (v.source[r] >= 0) mine.push_back(v.source[r]), theirs.push_back(static_cast<int64_t>(r));
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    if (out.results[i].dtype == DType::none) continue;
    const int32_t axis = v.problem.batch_axis[i];
    if (!v.source.empty() && axis == -1) continue;  // a sum over rows: no row of its own
    const auto d = v.source.empty() ? first_difference(base.results[i], out.results[i])
                                    : first_difference(take_rows(base.results[i], axis, mine),
                                                       take_rows(out.results[i], axis, theirs));
    if (!d) continue;
    t.fail(promise, p, transform, p.schema().arguments[i].name, &*d, "bits changed");
    return;
  }
}

double work_of(const Problem& p, const Variant& v) {
  const auto rows = static_cast<double>(row_count(p).value_or(1));
  return static_cast<double>(v.users) * v.repeats *
         std::max(1.0, static_cast<double>(v.source.size()) / std::max(1.0, rows));
}

void try_variant(Trial& t, const Problem& p, const Variant& v, const Outcome& base) {
  if (!t.record().begin(p, v.name(), Step::judged, t.patience(p, work_of(p, v)))) return;
  for (int32_t repeat = 0; repeat < v.repeats; ++repeat)
    for (const Outcome& out : run_variant(t.subject(), v)) compare_rows(t, p, v, base, out);
  t.record().covered(v.dimension);
  t.count_sizes(v.problem);
}

}  // namespace

bool vary(Trial& t, const Problem& p, const Turn& turn) {
  if (!t.record().begin(p, "", Step::base, t.patience(p))) return true;
  const Outcome* const kept = t.outcome_of(p);
  const Outcome fresh = kept ? Outcome{} : execute(p, t.subject());
  const Outcome& base = kept ? *kept : fresh;
  if (base.code != RLK_OK) return false;
  std::size_t count = 0;
  const auto wants = [&](const std::string& transform) {
    if (count++ % turn.stride != turn.phase) return false;
    return t.wants(transform);
  };
  const auto take = [&](const Variant& v) {
    t.record().transform_known(v.name());
    try_variant(t, p, v, base);
    return t.going();
  };
  for_variants(p, t.subject(), turn.wide, {wants, take});
  return true;
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
