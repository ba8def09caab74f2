#include <algorithm>
#include <thread>

#include "src/harness/promises/promises.hpp"
#include "src/harness/trial.hpp"

namespace rlk::harness {
namespace {

std::vector<Outcome> run_variant(const Subject& subject, const Variant& v) {
  std::vector<Outcome> outs(static_cast<std::size_t>(v.users));
  if (v.users == 1) {
    outs[0] = execute(v.problem, subject, v.manner);
    return outs;
  }
  // What one call leaves where another looks shows only while both run: preparing takes longer than many a call.
  std::barrier<> together(v.users);
  Manner manner = v.manner;
  manner.together = &together;
  std::vector<std::thread> users;
  users.reserve(outs.size());
  for (Outcome& out : outs) {
    const bool other = v.beside && users.size() % 2;
    users.emplace_back([&, other] { out = execute(other ? *v.beside : v.problem, subject, manner); });
  }
  for (std::thread& u : users) u.join();
  return outs;
}

void compare(Trial& t, const Problem& p, const Variant& v, const Outcome& base, const Outcome& out) {
  const std::string transform = v.name();
  if (!t.healthy(v.problem, transform, out)) return;
  t.record().tried(v.promise);
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    if (out.results[i].dtype == DType::none) continue;
    const auto d = v.source.empty() ? first_difference(base.results[i], out.results[i])
                                    : first_change_of_a_row(v, i, base, out);
    if (!d) continue;
    t.fail(v.promise, p, transform, p.schema().arguments[i].name, &*d, "bits changed");
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
  // Of two problems either may come off badly: the one whose call did not write last.
  const Outcome other = v.beside ? execute(*v.beside, t.subject()) : Outcome{};
  for (int32_t repeat = 0; repeat < v.repeats; ++repeat) {
    const std::vector<Outcome> outs = run_variant(t.subject(), v);
    for (std::size_t i = 0; i < outs.size(); ++i) {
      const bool of_other = v.beside && i % 2;
      if (!of_other || other.code == RLK_OK) compare(t, p, v, of_other ? other : base, outs[i]);
    }
  }
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

}  // namespace rlk::harness
