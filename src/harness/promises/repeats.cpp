#include <fmt/format.h>

#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

void judge_again(Trial& t, const Problem& p, const std::string& transform) {
  const auto& corpus = t.record().entry.corpus;
  const auto first = corpus.find(p.name);
  if (first == corpus.end()) return;  // refused, or of a process that has died
  const Outcome out = execute(p, t.subject());
  if (!t.healthy(p, transform, out)) return;
  t.record().tried(Promise::repeats);
  t.record().covered("repeats");
  if (fmt::format("{:016x}", hash_of(out)) != first->second)
    t.fail(Promise::repeats, p, transform, {}, nullptr, "other bits after other calls");
}

// Three: what depends on a process may by luck agree in two.
std::vector<Elsewhere> other_processes() { return {3, {"another process", {}, Promise::repeats}}; }

}  // namespace rlk::harness
