// The whole of a verification: every target's trial, each in a process of its own, then what only several
// processes or several implementations together can show.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "rlk/harness.hpp"
#include "rlk/machine.hpp"
#include "src/harness/isolation.hpp"
#include "src/harness/promises/promises.hpp"
#include "src/harness/trial.hpp"
#include "src/text.hpp"

namespace rlk::harness {
namespace {

using Clock = std::chrono::steady_clock;

class Verification {
 public:
  explicit Verification(const Plan& plan) : plan_(plan), start_(Clock::now()) {
    report_.seed = plan.seed;
    report_.passes = plan.passes;
    report_.budget = plan.budget;
    report_.restricted = !plan.case_name.empty() || !plan.transform.empty();
  }

  Report run() {
    Chosen chosen = choose(plan_);
    report_.not_covered = std::move(chosen.not_covered);
    report_.cannot_run = std::move(chosen.cannot_run);
    report_.missing = std::move(chosen.missing);
    report_.error = std::move(chosen.error);
    targets_ = std::move(chosen.targets);
    if (!report_.error.empty()) return std::move(report_);
    if (targets_.empty())
      report_.not_covered.push_back(fmt::format("nothing matches op '{}', implementation '{}' on {}",
                                                plan_.op, plan_.implementation, plan_.device));
    trials();
    compare_declared(targets_, report_.failures, plan_);
    elsewhere();
    check_transform();
    for (Target& t : targets_) {
      report_.complete = report_.complete && t.entry.complete;
      report_.entries.push_back(std::move(t.entry));
    }
    if (stopped()) report_.complete = false;
    report_.seconds = elapsed();
    return std::move(report_);
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  bool stopped() const { return plan_.stop && plan_.stop->load(); }
  bool going() const { return !stopped() && (plan_.budget <= 0 || elapsed() < plan_.budget); }

  // Side by side on the CPU; a GPU's one after the other, so that what is seen of its memory is the call's
  // own.
  void side_by_side(std::size_t count, const std::function<void(std::size_t, std::size_t)>& work) {
    constexpr std::size_t kMost = 8;
    const bool apart = !plan_.child.empty() && plan_.device == "cpu";
    const std::size_t jobs =
        apart ? std::min({kMost, static_cast<std::size_t>(processors()), std::max<std::size_t>(1, count)})
              : 1;
    std::atomic<std::size_t> next = 0;
    const auto worker = [&] {
      for (std::size_t i = next++; i < count; i = next++) work(i, std::min(jobs, count - i));
    };
    std::vector<std::thread> others;
    for (std::size_t j = 1; j < jobs; ++j) others.emplace_back(worker);
    worker();
    for (std::thread& t : others) t.join();
  }

  // What one process tries: the library's own of one op and dtype, which are judged by the same references. A plugin's
  // are each alone: what one leaves behind in a process is not for another one to answer for.
  std::vector<std::vector<Target*>> groups() {
    std::vector<std::vector<Target*>> out;
    std::map<std::pair<std::string, std::string>, std::size_t> own;  // places in it, from 1
    for (Target& t : targets_) {
      std::size_t none = 0;
      const bool ours = !plan_.child.empty() && t.entry.backend == "native";
      std::size_t& place = ours ? own[{t.entry.op, t.entry.dtype}] : none;
      if (place > 0) {
        out[place - 1].push_back(&t);
        continue;
      }
      out.push_back({&t});
      place = out.size();
    }
    return out;
  }

  void trials() {
    const std::vector<std::vector<Target*>> list = groups();
    std::atomic<std::size_t> left = targets_.size();
    side_by_side(list.size(), [&](std::size_t i, std::size_t jobs) {
      if (!going()) return;
      const std::vector<Target*>& group = list[i];
      progress(i, list.size(), *group[0]);
      // With a clock each target gets its share of what is left.
      const double share = plan_.budget > 0 ? (plan_.budget - elapsed()) * static_cast<double>(jobs) /
                                                  static_cast<double>(left)
                                            : 0;
      left -= group.size();
      std::vector<Record> records(group.size());
      for (std::size_t n = 0; n < group.size(); ++n) records[n].entry = group[n]->entry;
      std::size_t tried = plan_.child.empty() ? 0 : try_in_children(plan_, group, share, records);
      for (; tried < group.size(); ++tried) try_here(*group[tried], share, records[tried]);
      for (std::size_t n = 0; n < group.size(); ++n) keep(*group[n], records[n]);
    });
  }
  void try_here(Target& t, double share, Record& record) {
    if (!plan_.child.empty())
      record.note(fmt::format("{} {} {}: the child program does not have it: tried in this process",
                              t.entry.op, t.entry.implementation, t.entry.dtype));
    References own;  // beside others of this process
    const Plan plan = plan_for(plan_, t);
    Trial(t, plan, share, false, plan_.child.empty() ? references_ : own, record).run();
  }
  void keep(Target& t, Record& record) {
    const std::lock_guard lock(mutex_);
    t.entry = std::move(record.entry);
    report_.failures.insert(report_.failures.end(), record.failures.begin(), record.failures.end());
    report_.not_covered.insert(report_.not_covered.end(), record.notes.begin(), record.notes.end());
    knows_transform_ |= record.knows_transform;
  }

  void elsewhere() {
    if (targets_.empty() || stopped()) return;
    if (plan_.child.empty()) {
      report_.not_covered.emplace_back("other processes and hostile variables: no child program was given");
      return;
    }
    std::map<std::string, std::vector<Target*>> backends;
    for (Target& t : targets_) backends[t.entry.backend].push_back(&t);
    Tasks tasks;
    for (const Elsewhere& where : all_elsewhere(plan_))
      for (const auto& [name, of_backend] : backends) tasks.emplace_back(where, &of_backend);
    knows_transform_ |= !tasks.empty();
    run_elsewhere(tasks);
    if (!plan_.transform.empty()) return;
    // What refused strict calls under all variables at once is tried under those that it does not mind.
    tasks.clear();
    for (const auto& [name, of_backend] : backends)
      if (std::any_of(of_backend.begin(), of_backend.end(),
                      [](const Target* t) { return refused_all_hostile(*t); }))
        for (Elsewhere& where : each_hostile()) tasks.emplace_back(std::move(where), &of_backend);
    run_elsewhere(tasks);
  }
  using Tasks = std::vector<std::pair<Elsewhere, const std::vector<Target*>*>>;
  void run_elsewhere(const Tasks& tasks) {
    side_by_side(tasks.size(), [&](std::size_t i, std::size_t) {
      if (!stopped())
        compare_elsewhere(plan_, tasks[i].first, *tasks[i].second, mutex_, report_.failures,
                          report_.not_covered);
    });
  }

  // One that choose() took for possible, and that no problem had.
  void check_transform() {
    if (plan_.transform.empty() || knows_transform_ || !report_.complete || stopped()) return;
    report_.error = fmt::format("{} has no transform {}", plan_.op, rlk::quoted(plan_.transform));
  }

  void progress(std::size_t i, std::size_t count, const Target& t) {
    if (!plan_.progress) return;
    const std::lock_guard lock(mutex_);
    plan_.progress(static_cast<double>(i) / static_cast<double>(count),
                   fmt::format("{} {} {}", t.entry.op, t.entry.implementation, t.entry.dtype));
  }

  const Plan& plan_;
  const Clock::time_point start_;
  std::mutex mutex_;  // of the report and of every target's entry
  Report report_;
  std::vector<Target> targets_;
  References references_;  // of targets that are tried one after another
  bool knows_transform_ = false;
};

}  // namespace

const char* name_of(Promise p) {
  constexpr const char* kNames[] = {"accuracy", "equal bits", "purity",    "batch invariance",
                                    "repeats",  "strict",     "predicate", "returns"};
  static_assert(std::size(kNames) == kPromises.size());
  return kNames[static_cast<std::size_t>(p)];
}

std::string Failure::line() const {
  std::string out = fmt::format("{}: {} {} {}{} on {}: ", name_of(promise), op, implementation, dtype,
                                level.empty() ? "" : " (" + level + ")", device);
  if (case_name.empty())
    out += fmt::format("before its first case, seed {}", seed);
  else
    out += fmt::format("case '{}'{} seed {}", case_name, shape.empty() ? "" : " (" + shape + ")", seed);
  if (!transform.empty()) out += fmt::format(", transform '{}'", transform);
  if (index >= 0) out += fmt::format(", {}[{}]", result, index);
  if (bits) out += fmt::format(": expected 0x{:0{}x}, got 0x{:0{}x}", expected, bits / 4, got, bits / 4);
  return out + (text.empty() ? "" : ": " + text) + "; again: " + command();
}

std::string Failure::command() const {
  std::string out = fmt::format("rlk-dispatch --verify {} --device {} --seed {}", op, device, seed);
  // Another order is one of all cases.
  if (!case_name.empty() && transform != kAnotherOrder) out += fmt::format(" --case '{}'", case_name);
  if (!beside_others) out += " --impl " + implementation;
  return transform.empty() ? out : out + fmt::format(" --transform '{}'", transform);
}

std::vector<Promise> Entry::uncovered() const {
  std::vector<Promise> out;
  for (const Promise p : kPromises)
    if (promises[p].promised && promises[p].tried == 0) out.push_back(p);
  return out;
}

bool Entry::good() const {
  return complete && uncovered().empty() && std::all_of(kPromises.begin(), kPromises.end(), [&](Promise p) {
           return !promises[p].promised || promises[p].failed == 0;
         });
}

bool Report::good() const {
  return error.empty() && complete && !restricted && failures.empty() && missing.empty() &&
         !entries.empty() &&
         std::all_of(entries.begin(), entries.end(), [](const Entry& e) { return e.good(); });
}

Report verify(const Plan& plan) { return Verification(plan).run(); }

}  // namespace rlk::harness
