// Equal bits in other processes, and in hostile ones: what libraries under a backend read from the
// environment, with values that change what they compute.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>

#include "src/harness/isolation.hpp"
#include "src/harness/trial.hpp"
#include "src/harness/variables.hpp"
#include "src/harness/wire.hpp"

namespace rlk::harness {
namespace {

constexpr std::pair<const char*, const char*> kHostile[] = {{"NVIDIA_TF32_OVERRIDE", "1"},
                                                            {"CUBLAS_EMULATE_SINGLE_PRECISION", "1"},
                                                            {"CUBLAS_EMULATION_STRATEGY", "eager"},
                                                            {"CUBLAS_WORKSPACE_CONFIG", ":16:8"},
                                                            {"ONEDNN_DEFAULT_FPMATH_MODE", "BF16"},
                                                            {"DNNL_DEFAULT_FPMATH_MODE", "BF16"},
                                                            {"ONEDNN_MAX_CPU_ISA", "AVX2"},
                                                            {"DNNL_MAX_CPU_ISA", "AVX2"},
                                                            {"OMP_NUM_THREADS", "3"}};
// Of each target, in each other process: the first that it takes of the op's first. Some take few shapes.
constexpr std::size_t kCases = 4, kLooked = 64;
constexpr int kMostDeaths = 8;
constexpr const char* kAllHostile = "all hostile variables";

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

Failure failure(const Plan& plan, const Entry& e, Promise promise, const std::string& case_name,
                const std::string& transform, std::string text) {
  Failure f;
  f.promise = promise;
  f.op = e.op;
  f.implementation = e.implementation;
  f.level = e.level;
  f.device = plan.device;
  f.dtype = e.dtype;
  f.case_name = case_name;
  f.transform = transform;
  f.seed = plan.seed;
  f.text = std::move(text);
  return f;
}

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

// All hostile variables also means those that this backend's file names.
Elsewhere with_own_variables(Elsewhere where, const Backend& backend) {
  if (where.transform != kAllHostile || !backend.origin.starts_with('/')) return where;
  for (const std::string& name : variables_in(backend.origin))
    if (std::none_of(where.variables.begin(), where.variables.end(),
                     [&](const auto& v) { return v.first == name; }))
      where.variables.emplace_back(name, "1");
  return where;
}

}  // namespace

std::vector<Elsewhere> each_hostile() {
  std::vector<Elsewhere> out;
  for (const auto& [name, value] : kHostile)
    out.push_back({fmt::format("{}={}", name, value), {{name, value}}});
  return out;
}

// All variables at once tell as much when nothing changes; one by one in thorough runs, to name the one.
std::vector<Elsewhere> surroundings(const Plan& plan) {
  const Variables all(std::begin(kHostile), std::end(kHostile));
  // Three times: what depends on a process may by luck agree in two.
  const Elsewhere another{"another process", {}};
  std::vector<Elsewhere> out{another, another, another, {kAllHostile, all}};
  if ((plan.passes == 0 && plan.budget == 0) || !plan.transform.empty())
    for (Elsewhere& e : each_hostile()) out.push_back(std::move(e));
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
    for (Target* t : targets)
      if (key_of(t->entry) == seen.target) {
        ++t->entry.promises[Promise::returns].failed;
        failures.push_back(failure(plan, t->entry, Promise::returns, seen.case_name, where.transform, how));
      }
    if (seen.target.empty()) not_covered.push_back(fmt::format("{} {}: {}", backend, where.transform, how));
  });
  const std::lock_guard lock(mutex);
  const bool hostile = !where.variables.empty();
  const Promise promise = hostile ? Promise::strict : Promise::repeats;
  for (Target* t : targets) {
    const auto of_target = there.hashes.find(key_of(t->entry));
    // Absent there: refused, which a strict implementation may do under a variable it cannot undo.
    if (of_target == there.hashes.end()) continue;
    for (const auto& [name, hash] : of_target->second) {
      const auto here = t->entry.corpus.find(name);
      if (here == t->entry.corpus.end()) continue;
      ++t->entry.covered[hostile ? "hostile variables" : "other processes"];
      Tally& tally = t->entry.promises[promise];
      ++tally.tried;
      if (here->second == hash) continue;
      ++tally.failed;
      if (tally.promised)
        failures.push_back(failure(
            plan, t->entry, promise, name, where.transform,
            fmt::format("another process has other bits: hash {} there, {} here", hash, here->second)));
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
