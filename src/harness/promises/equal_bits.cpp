#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

// Held against the rule of the declared id, whoever else declares it. What stands for an id that no written
// rule covers is not its own judge.
bool judge_equal_bits(Trial& t, const Problem& p, const Outcome& out) {
  const auto& rule = t.references().rule_of(p, t.identity().arithmetic);
  if (!rule || (!rule->written && rule->by == t.identity().implementation)) return false;
  t.record().tried(Promise::equal_bits);
  for (std::size_t i = 0; i < out.results.size(); ++i) {
    if (out.results[i].dtype == DType::none) continue;
    if (const auto d = first_difference(rule->outcome.results[i], out.results[i])) {
      t.fail(Promise::equal_bits, p, "", p.schema().arguments[i].name, &*d,
             fmt::format("{} means other bits, says {}", t.identity().arithmetic, rule->by));
      return false;
    }
  }
  return rule->written;
}

namespace {

Failure other_bits(const Target& t, const Target& other, const std::string& case_name, const Plan& plan) {
  Failure f = failure_of(
      t.entry, plan, Promise::equal_bits,
      fmt::format("{} declares {} too and gives other bits", other.entry.implementation, t.entry.arithmetic));
  f.case_name = case_name;
  f.beside_others = true;
  return f;
}

}  // namespace

void compare_declared(std::vector<Target>& targets, std::vector<Failure>& failures, const Plan& plan) {
  std::map<std::tuple<std::string, std::string, std::string>, std::vector<Target*>> declared;
  for (Target& t : targets) declared[{t.entry.op, t.entry.arithmetic, t.entry.dtype}].push_back(&t);
  for (auto& [key, group] : declared) {
    // Where a rule has judged, it was not for who comes first to say what is right.
    const bool judged = std::any_of(group.begin(), group.end(), [](const Target* t) {
      return t->entry.promises[Promise::equal_bits].tried > 0;
    });
    for (std::size_t i = 1; i < group.size() && !judged; ++i) {
      Entry &first = group[0]->entry, &entry = group[i]->entry;
      for (const auto& [name, hash] : entry.corpus) {
        const auto at = first.corpus.find(name);
        if (at == first.corpus.end()) continue;
        Tally& tally = entry.promises[Promise::equal_bits];
        ++tally.tried;
        ++first.promises[Promise::equal_bits].tried;
        if (at->second == hash) continue;
        ++tally.failed;
        failures.push_back(other_bits(*group[i], *group[0], name, plan));
      }
    }
    for (Target* t : group)
      if (Tally& tally = t->entry.promises[Promise::equal_bits]; tally.tried == 0) {
        tally.promised = false;
        tally.why = fmt::format("nothing else here declares {}, and the library has no rule for it",
                                t->entry.arithmetic);
      }
  }
}

}  // namespace rlk::harness
