#include "src/harness/isolation.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#if defined(__GLIBC__)
#  include <malloc.h>
#endif
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#if defined(__linux__)
#  include <sys/prctl.h>
#endif

#include "src/harness/elsewhere.hpp"
#include "src/harness/promises/promises.hpp"
#include "src/harness/trial.hpp"
#include "src/registry.hpp"

namespace rlk::harness {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// After so many a target's trial ends: every further one would say the same.
constexpr int kMostDeaths = 8, kMostHangs = 2;
constexpr double kLook = 0.2;  // seconds between looks at the clock and at Ctrl-C
constexpr const char *kReady = "ready", *kAbsent = "absent";

enum class End { finished, absent, unusable, stopped, died, hung };

// Replays what one child says of its targets until it ends, hangs or is no longer wanted. `done` of them are finished.
End follow(Child& child, const Plan& plan, std::span<Record> records, std::size_t& done) {
  bool ready = false;
  auto last = Clock::now();
  const auto begin = [&] {
    records[done].now.kind = Step::judged;
    records[done].now.patience = plan.patience;  // to load plugins and find its target
  };
  begin();
  for (std::string line;;) {
    Record& record = records[done];
    switch (child.read(line, kLook)) {
      case Child::Read::line:
        if (line == kReady)
          ready = true;
        else if (line == kAbsent)
          return End::absent;
        else
          record.replay(line);
        last = Clock::now();
        if (!record.finished) break;
        if (++done == records.size()) return End::finished;
        begin();
        break;
      case Child::Read::nothing:
        if (record.now.patience > 0 && since(last) > record.now.patience)
          return ready ? End::hung : End::unusable;
        break;
      case Child::Read::end:
        return ready ? End::died : End::unusable;
    }
    if (plan.stop && plan.stop->load()) return End::stopped;
  }
}

std::vector<std::string> words_for(const Plan& plan, std::span<Target* const> targets, double seconds,
                                   const Resume& resume) {
  std::vector<std::string> words = words_for(plan);
  words.push_back("mode=trial");
  words.push_back("op=" + targets[0]->entry.op);
  words.push_back("dtype=" + targets[0]->entry.dtype);
  for (const Target* t : targets) {
    words.push_back("implementation=" + t->entry.implementation);
    if (t->lesser) words.push_back("lesser=" + t->entry.implementation);
  }
  words.push_back(fmt::format("seconds={:a}", seconds));
  words.push_back(fmt::format("from={}", resume.from));
  for (const int64_t step : resume.dead) words.push_back(fmt::format("dead={}", step));
  return words;
}

}  // namespace

std::vector<std::string> words_for(const Plan& plan) {
  std::vector<std::string> words{kChildFlag,
                                 "device=" + plan.device,
                                 "case=" + plan.case_name,
                                 "transform=" + plan.transform,
                                 fmt::format("seed={}", plan.seed),
                                 fmt::format("passes={}", plan.passes),
                                 fmt::format("budget={:a}", plan.budget),
                                 fmt::format("patience={:a}", plan.patience)};
  for (const auto& b : snapshot().backends)  // a plugin that was loaded by hand is not found by itself
    if (b->table && b->origin.front() == '/') words.push_back("plugin=" + b->origin);
  return words;
}

std::size_t try_in_children(const Plan& plan, std::span<Target* const> targets, double seconds,
                            std::span<Record> records) {
  std::size_t done = 0, at_work = targets.size();
  int deaths = 0, hangs = 0;
  for (auto start = Clock::now(); done < targets.size();) {
    if (at_work != done) at_work = done, deaths = hangs = 0, start = Clock::now();
    const double left = seconds > 0 ? std::max(0.001, seconds - since(start)) : 0;
    Child child(plan.child, words_for(plan, targets.subspan(done), left, records[done].resume), {});
    if (!child.started()) return done;
    const End end = follow(child, plan, records, done);
    if (end == End::finished || end == End::stopped) return targets.size();
    if (at_work != done) at_work = done, deaths = hangs = 0, start = Clock::now();
    if (end == End::absent || end == End::unusable) {
      if (deaths == 0) return done;
      ++done;
      continue;
    }
    child.kill();
    Record& record = records[done];
    const Entry& e = targets[done]->entry;
    const Step at = record.now;
    record.resume.dead.insert(at.number);
    record.resume.from = std::max(record.resume.from, at.number + 1);
    ++(end == End::hung ? hangs : deaths);
    if (at.kind != Step::forced)
      record.fail(did_not_return(e, plan, at,
                                 end == End::hung
                                     ? fmt::format("did not come back within {:.0f} s", at.patience)
                                     : "the process " + child.ending()));
    if (hangs < kMostHangs && deaths < kMostDeaths) continue;
    record.note(fmt::format("{} {} {}: given up after {} crashes and {} hangs", e.op, e.implementation,
                            e.dtype, deaths, hangs));
    ++done;
  }
  return done;
}

namespace {

// The words a child was started with, "name=value".
class Words {
 public:
  Words(int argc, char** argv) {
    for (int i = 2; i < argc; ++i)
      if (const char* equals = std::strchr(argv[i], '='))
        words_.emplace(std::string(argv[i], static_cast<std::size_t>(equals - argv[i])), equals + 1);
  }
  std::string text(const char* name) const {
    const auto at = words_.find(name);
    return at == words_.end() ? "" : at->second;
  }
  double number(const char* name) const { return std::strtod(text(name).c_str(), nullptr); }
  uint64_t integer(const char* name) const { return std::strtoull(text(name).c_str(), nullptr, 10); }
  std::vector<std::string> all(const char* name) const {
    std::vector<std::string> out;
    for (auto [at, end] = words_.equal_range(name); at != end; ++at) out.push_back(at->second);
    return out;
  }

 private:
  std::multimap<std::string, std::string> words_;
};

int run_trial(const Words& words, const Plan& plan, std::FILE* lines) {
  References references;  // are those of all of them
  Resume resume{static_cast<int64_t>(words.integer("from")), {}};
  for (const std::string& step : words.all("dead")) resume.dead.insert(std::atoll(step.c_str()));
  const std::vector<std::string> lesser = words.all("lesser");
  for (const std::string& implementation : words.all("implementation")) {
    std::vector<Target> targets = find({words.text("op"), implementation, words.text("dtype"), plan.device});
    if (targets.size() != 1) {
      std::fprintf(lines, "%s\n", kAbsent);
      return 0;
    }
    targets[0].lesser = std::find(lesser.begin(), lesser.end(), implementation) != lesser.end();
    Record record;
    record.mirror = lines;
    record.resume = std::exchange(resume, {});
    record.entry.promises = targets[0].entry.promises;
    Trial(targets[0], plan_for(plan, targets[0]), words.number("seconds"), true, references, record).run();
  }
  return 0;
}

}  // namespace

int child_main(int argc, char** argv) {
  if (argc < 2 || std::strcmp(argv[1], kChildFlag) != 0) return -1;
  std::FILE* lines = fdopen(Child::kLines, "w");
  if (!lines) return 1;
  fcntl(Child::kLines, F_SETFD, FD_CLOEXEC);
#if defined(__linux__)
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody would read what it finds
#endif
#if defined(__GLIBC__)
  // Arrays come and go with every call: their pages stay, since the kernel would clear each of them anew.
  mallopt(M_MMAP_THRESHOLD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
  std::fprintf(lines, "%s\n", kReady);
  std::fflush(lines);
  const Words words(argc, argv);
  Plan plan;
  plan.device = words.text("device");
  plan.case_name = words.text("case");
  plan.transform = words.text("transform");
  plan.seed = words.integer("seed");
  plan.passes = static_cast<int>(words.integer("passes"));
  plan.budget = words.number("budget");
  plan.patience = words.number("patience");
  for (const std::string& plugin : words.all("plugin"))
    rlk_load_plugin(plugin.c_str());  // most are there already
  int exit = 0;
  if (words.text("mode") == "trial") {
    exit = run_trial(words, plan, lines);
  } else {
    plan.op = words.text("op");
    plan.implementation = words.text("implementation");
    exit = print_corpus(plan, words.text("backend"), words.all("dead"), lines);
  }
  std::fflush(lines);
  _exit(exit);  // destructors of what was tested are not on trial
}

}  // namespace rlk::harness
