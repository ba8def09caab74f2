#include "src/harness/elsewhere.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>

#include "src/harness/isolation.hpp"
#include "src/harness/promises/promises.hpp"
#include "src/harness/trial.hpp"
#include "src/harness/wire.hpp"

namespace rlk::harness {
namespace {

// Of each target, in each other process: the first that it takes of the op's first. Some take few shapes.
constexpr std::size_t kCases = 4, kLooked = 64;
constexpr int kMostDeaths = 8;

std::string key_of(const Entry& e) { return fmt::format("{} {} {}", e.op, e.implementation, e.dtype); }

struct Seen {
  std::map<std::string, std::map<std::string, std::string>> hashes;  // by target, by case
  std::string target, case_name;                                     // at work
  bool finished = false;

  void line(const std::string& text) {
    std::string event, hash;
    LineReader reader(text);
    reader(event);
    if (event != "at" && event != "hash" && event != "finished") return;
    reader(target, case_name, hash);
    if (event == "hash") hashes[target][case_name] = hash;
    if (event == "finished") finished = true;
  }
};

// Runs the corpus of one backend; a target that ends the process is left out of the next.
Seen run_elsewhere(const Plan& plan, const Elsewhere& where, const std::string& backend,
                   const std::function<void(const Seen&, const std::string&)>& died) {
  std::vector<std::string> words = words_for(plan);
  words.insert(words.end(), {"mode=corpus", "op=" + plan.op, "implementation=" + plan.implementation,
                             "backend=" + backend});
  Seen seen;
  for (int deaths = 0; deaths < kMostDeaths && !seen.finished; ++deaths) {
    Child child(plan.child, words, where.variables);
    double silent = 0;
    for (std::string line; !seen.finished;) {
      const Child::Read got = child.started() ? child.read(line, 0.2) : Child::Read::end;
      if (got == Child::Read::end || (plan.stop && plan.stop->load())) break;
      silent = got == Child::Read::line ? 0 : silent + 0.2;
      if (got == Child::Read::line) seen.line(line);
      if (silent > 10 * plan.patience) break;
    }
    if (seen.finished || (plan.stop && plan.stop->load())) break;
    child.kill();
    died(seen, child.started() ? "the process " + child.ending() : "the child program did not start");
    if (seen.target.empty()) break;
    words.push_back("dead=" + seen.target);
  }
  return seen;
}

}  // namespace

std::vector<Elsewhere> all_elsewhere(const Plan& plan) {
  std::vector<Elsewhere> out = other_processes(), hostile = hostile_processes(plan);
  out.insert(out.end(), hostile.begin(), hostile.end());
  if (!plan.transform.empty())
    std::erase_if(out, [&](const Elsewhere& e) { return e.transform != plan.transform; });
  return out;
}

void compare_elsewhere(const Plan& plan, const Elsewhere& given, const std::vector<Target*>& targets,
                       std::mutex& mutex, std::vector<Failure>& failures,
                       std::vector<std::string>& not_covered) {
  const std::string& backend = targets.front()->entry.backend;
  const Elsewhere where = with_own_variables(given, *targets.front()->subject.backend);
  const Seen there = run_elsewhere(plan, where, backend, [&](const Seen& seen, const std::string& how) {
    const std::lock_guard lock(mutex);
    Step step;
    step.case_name = seen.case_name, step.transform = where.transform;
    for (Target* t : targets)
      if (key_of(t->entry) == seen.target) {
        ++t->entry.promises[Promise::returns].failed;
        failures.push_back(did_not_return(t->entry, plan, step, how));
      }
    if (seen.target.empty()) not_covered.push_back(fmt::format("{} {}: {}", backend, where.transform, how));
  });
  const std::lock_guard lock(mutex);
  const bool hostile = where.promise == Promise::strict;
  for (Target* t : targets) {
    const auto of_target = there.hashes.find(key_of(t->entry));
    // Absent there: refused, which a strict implementation may do under a variable it cannot undo.
    if (of_target == there.hashes.end()) continue;
    for (const auto& [name, hash] : of_target->second) {
      const auto here = t->entry.corpus.find(name);
      if (here == t->entry.corpus.end()) continue;
      ++t->entry.covered[hostile ? "hostile variables" : "other processes"];
      Tally& tally = t->entry.promises[where.promise];
      ++tally.tried;
      if (here->second == hash) continue;
      ++tally.failed;
      if (!tally.promised) continue;
      failures.push_back(failure_of(
          t->entry, plan, where.promise,
          fmt::format("another process has other bits: hash {} there, {} here", hash, here->second)));
      failures.back().case_name = name, failures.back().transform = where.transform;
    }
  }
}

int print_corpus(const Plan& plan, const std::string& backend, const std::vector<std::string>& dead,
                 std::FILE* lines) {
  const auto say = [&](const char* event, const std::string& target, const std::string& name,
                       const std::string& hash) {
    LineWriter line;
    line(event, target, name, hash);
    std::fprintf(lines, "%s\n", line.text().c_str());
    std::fflush(lines);
  };
  for (const Target& t : choose(plan).targets) {
    const std::string key = key_of(t.entry);
    if (t.entry.backend != backend || std::find(dead.begin(), dead.end(), key) != dead.end()) continue;
    std::size_t taken = 0;
    first_problems(t, plan, kLooked, [&](const Problem& p) {
      say("at", key, p.name, "");
      const Outcome out = execute(p, t.subject);
      if (out.code != RLK_OK) return true;
      say("hash", key, p.name, fmt::format("{:016x}", hash_of(out)));
      return ++taken < kCases;
    });
  }
  say("finished", "", "", "");
  return 0;
}

}  // namespace rlk::harness
