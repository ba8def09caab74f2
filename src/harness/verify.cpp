// The whole of a verification: which implementations, which cases, which promises, and what came out.
#include <fmt/format.h>
#include <fnmatch.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <thread>

#include "registry/op.hpp"
#include "rlk/harness.hpp"
#include "rlk/machine.hpp"
#include "src/check.hpp"
#include "src/harness/child.hpp"
#include "src/harness/compare.hpp"
#include "src/harness/execute.hpp"
#include "src/harness/order.hpp"
#include "src/harness/transforms.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace rlk::harness {
namespace {

using Clock = std::chrono::steady_clock;

// What libraries under a backend read, with values that change what they compute.
constexpr std::pair<const char*, const char*> kHostileVariables[] = {{"NVIDIA_TF32_OVERRIDE", "1"},
                                                                     {"CUBLAS_EMULATE_SINGLE_PRECISION", "1"},
                                                                     {"CUBLAS_EMULATION_STRATEGY", "eager"},
                                                                     {"CUBLAS_WORKSPACE_CONFIG", ":16:8"},
                                                                     {"ONEDNN_DEFAULT_FPMATH_MODE", "BF16"},
                                                                     {"DNNL_DEFAULT_FPMATH_MODE", "BF16"},
                                                                     {"ONEDNN_MAX_CPU_ISA", "AVX2"},
                                                                     {"DNNL_MAX_CPU_ISA", "AVX2"},
                                                                     {"OMP_NUM_THREADS", "3"}};
constexpr std::size_t kProcessCases = 4;  // per target, in each other process

struct Item {
  registry::Case given;
  Problem problem;
};

// One implementation with one dtype: what becomes an Entry.
struct Target {
  Subject subject;
  DType dtype;
  Entry entry;
  double seconds = 0;               // that accuracy and purity took
  std::vector<Distance> distances;  // by result and its dtype, in order of first use
  std::vector<std::string> distance_names;
};

class Verification {
 public:
  explicit Verification(const Plan& plan) : plan_(plan), start_(Clock::now()) {
    report_.seed = plan.seed;
    report_.budget = plan.budget;
  }

  Report run() {
    collect();
    // Accuracy and purity of everything come first: a budget that ends early has then still seen every
    // target.
    const std::size_t steps = targets_.size();
    for (std::size_t i = 0; i < steps && going(); ++i)
      basics(targets_[i], 0.35 * static_cast<double>(i) / static_cast<double>(steps));
    equal_arithmetic();
    invariances();
    other_processes();
    for (Target& t : targets_) {
      for (const Distance& d : t.distances) t.entry.accuracy.push_back(d.summary());
      report_.entries.push_back(std::move(t.entry));
    }
    if (targets_.empty())
      report_.not_covered.push_back(fmt::format("nothing matches op '{}', implementation '{}' on {}",
                                                plan_.op, plan_.implementation, plan_.device));
    report_.seconds = elapsed();
    return std::move(report_);
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  bool going() {
    const std::lock_guard lock(mutex_);
    if ((plan_.stop && plan_.stop->load()) || (plan_.budget > 0 && elapsed() > plan_.budget))
      report_.complete = false;
    return !(plan_.stop && plan_.stop->load()) && (plan_.budget <= 0 || elapsed() < plan_.budget);
  }
  void progress(double done, const Target& t, const char* what) {
    if (!plan_.progress) return;
    const std::lock_guard lock(mutex_);
    plan_.progress(shown_ = std::max(shown_, done),
                   fmt::format("{} {} {}: {}", t.entry.op, t.entry.implementation, t.entry.dtype, what));
  }

  bool chosen(const rlk_implementation& i, const Backend& b) const {
    if (fnmatch(plan_.op.c_str(), i.op, 0) != 0 || plan_.device != device_name(i.device_type)) return false;
    return plan_.implementation.empty() || plan_.implementation == b.name ||
           fnmatch(plan_.implementation.c_str(), i.id, FNM_EXTMATCH) == 0;
  }

  void collect() {
    for (const OpEntry& op : snapshot().ops) {
      const registry::Op* known = registry::find(op.schema->name);
      bool any = false;
      for (const ImplementationEntry& e : op.implementations) {
        if (!chosen(*e.implementation, *e.backend)) continue;
        if (!known) {
          if (!any)
            report_.not_covered.push_back(
                fmt::format("{}: an op from a plugin has no reference or cases here", op.schema->name));
          any = true;
          continue;
        }
        add_targets(e, *op.schema);
      }
      if (!known) continue;
      std::vector<Item>& list = items_[op.schema->name];
      if (std::none_of(targets_.begin(), targets_.end(),
                       [&](const Target& t) { return t.subject.op == op.schema; }))
        continue;
      known->cases([&](registry::Case c) {
        if (!plan_.case_name.empty() && c.name != plan_.case_name) return;
        if (plan_.budget > 0 && c.large) return;
        auto p = materialise(*known, c, plan_.seed);
        if (p)
          list.push_back({std::move(c), std::move(*p)});
        else
          report_.not_covered.push_back(std::string(p.status().message()));
      });
    }
  }

  void add_targets(const ImplementationEntry& e, const rlk_op_schema& schema) {
    const rlk_implementation& i = *e.implementation;
    if (e.backend->devices().empty()) {
      report_.not_covered.push_back(fmt::format("{} {}: {}", i.op, i.id, e.backend->reason()));
      return;
    }
    for (uint32_t bit = 1; bit <= RLK_BOOL; bit <<= 1) {
      if (!(i.dtypes & bit)) continue;
      Target t{{&schema, &i, e.backend, e.backend->devices().front(), nullptr},
               static_cast<DType>(bit),
               {},
               0,
               {},
               {}};
      if (i.device_type != kDLCPU) {
        const rlk_backend& b = *e.backend->table;
        t.subject.services = b.struct_size >= sizeof(rlk_backend) ? b.services : nullptr;
        if (!t.subject.services || !t.subject.services->allocate || !t.subject.services->copy_in ||
            !t.subject.services->copy_out || !t.subject.services->synchronize ||
            !t.subject.services->release) {
          report_.not_covered.push_back(
              fmt::format("{} {}: its backend offers no memory services", i.op, i.id));
          return;
        }
      }
      t.entry.op = i.op;
      t.entry.implementation = i.id;
      t.entry.backend = e.backend->name;
      t.entry.arithmetic = i.arithmetic;
      t.entry.dtype = name_of(t.dtype);
      t.entry.backend_build = fmt::format("{:016x}", e.backend->build_id);
      t.entry.device_name = t.subject.device.name;
      if (t.subject.services && t.subject.services->describe) {
        char text[512] = "";
        if (t.subject.services->describe(&t.subject.device, text, sizeof text) == RLK_OK)
          t.entry.versions = text;
      }
      for (const char* promise :
           {"accuracy", "equal bits", "purity", "batch invariance", "repeats", "strict", "predicate"})
        t.entry.promises[promise];
      t.entry.promises["repeats"].promised = i.traits & RLK_DETERMINISTIC;
      t.entry.promises["batch invariance"].promised = i.traits & RLK_BATCH_INVARIANT;
      t.entry.promises["strict"].promised = i.traits & (RLK_STRICT | RLK_GOLDEN);
      targets_.push_back(std::move(t));
    }
  }

  void fail(Target& t, const char* promise, const Problem& p, std::string transform,
            const std::string& result, const Difference* d, std::string text) {
    Tally& tally = t.entry.promises[promise];
    ++tally.failed;
    if (!tally.promised) return;
    const std::lock_guard lock(mutex_);  // a target is one thread's at a time, the report is everybody's
    Failure f;
    f.promise = promise;
    f.op = t.entry.op;
    f.implementation = t.entry.implementation;
    f.device = plan_.device;
    f.dtype = t.entry.dtype;
    f.case_name = p.name;
    f.shape = p.shape_text();
    f.transform = std::move(transform);
    f.seed = plan_.seed;
    f.result = result;
    if (d) f.index = d->index, f.expected = d->expected, f.got = d->got, f.bits = d->bits;
    f.text = std::move(text);
    report_.failures.push_back(std::move(f));
  }

  // Memory kept its promises and the call ended as expected; false: nothing to compare.
  bool healthy(Target& t, const Problem& p, const std::string& transform, const Outcome& out) {
    ++t.entry.promises["purity"].tried;
    if (!out.broken.empty()) fail(t, "purity", p, transform, {}, nullptr, out.broken);
    if (out.code == RLK_OK) return true;
    if (out.code == RLK_NO_IMPLEMENTATION) {
      ++t.entry.promises["predicate"].refused;
      return false;
    }
    ++t.entry.promises["predicate"].tried;
    fail(t, "predicate", p, transform, {}, nullptr, out.text);
    return false;
  }

  Distance& distance(Target& t, const std::string& result, DType dtype, const registry::Bound& bound) {
    const std::string key = fmt::format("{} {} {}", result, name_of(dtype), static_cast<int>(bound.metric));
    for (std::size_t i = 0; i < t.distance_names.size(); ++i)
      if (t.distance_names[i] == key) return t.distances[i];
    t.distance_names.push_back(key);
    return t.distances.emplace_back(result, dtype, bound);
  }

  // Accuracy, purity, predicate, order of addition; keeps the outputs for the comparison between
  // implementations.
  void basics(Target& t, double done) {
    progress(done, t, "accuracy and purity");
    const double start = elapsed();
    for (const Item& item : items_[t.entry.op]) {
      if (item.problem.input_dtype() != t.dtype || !going()) continue;
      if (!item.given.order_probe.empty()) {
        if (auto order = probe_order(item.problem, item.given.order_probe, t.subject)) {
          ++t.entry.promises["batch invariance"].tried;
          ++t.entry.covered["order of addition"];
          if (!order->equal)
            fail(t, "batch invariance", item.problem, "order of addition", order->result, nullptr,
                 "the tree of additions changes with the number of rows");
          t.entry.orders.push_back(std::move(*order));
        }
        continue;
      }
      accuracy(t, item.problem, true);
      if (auto wide = with_fp32_results(item.problem)) accuracy(t, *wide, false);
    }
    t.seconds = elapsed() - start;
  }

  void accuracy(Target& t, const Problem& p, bool keep) {
    const Outcome out = execute(p, t.subject);
    if (!healthy(t, p, "", out)) {
      if (out.code == RLK_NO_IMPLEMENTATION) try_refused(t, p, out.text);
      return;
    }
    ++t.entry.promises["predicate"].tried;
    const Outcome& truth = truth_of(p);
    if (truth.code != RLK_OK) {
      report_.not_covered.push_back(
          fmt::format("{} '{}': the reference failed: {}", t.entry.op, p.name, truth.text));
      return;
    }
    ++t.entry.promises["accuracy"].tried;
    for (std::size_t i = 0; i < out.results.size(); ++i) {
      const Array& got = out.results[i];
      if (got.dtype == DType::none) continue;
      const char* name = t.subject.op->arguments[i].name;
      const registry::Bound bound = bound_of(t, p, name, got.dtype);
      const Array* scale = p.cancels ? &scale_of(p).results[i] : nullptr;
      Difference where{};
      const std::string problem =
          distance(t, name, got.dtype, bound)
              .add(got, truth.results[i], bound, p.exact ? 0 : p.reduction, where, scale);
      if (!problem.empty()) fail(t, "accuracy", p, "", name, &where, problem);
    }
    t.entry.corpus[p.name] = fmt::format("{:016x}", hash_of(out));
    if (keep)
      by_arithmetic_[{t.entry.op, t.entry.arithmetic, t.entry.dtype}][p.name].push_back({&t, out.results});
  }

  const Outcome& truth_of(const Problem& p) {
    const auto key = std::string(p.op->schema->name) + "\n" + p.name;
    const auto [it, fresh] = truths_.try_emplace(key);
    if (fresh) it->second = execute_reference(p, !p.exact);
    return it->second;
  }
  const Outcome& scale_of(const Problem& p) {
    const auto [it, fresh] = scales_.try_emplace(std::string(p.op->schema->name) + "\n" + p.name);
    if (fresh) it->second = execute_reference(magnitudes(p), true);
    return it->second;
  }
  static registry::Bound bound_of(const Target& t, const Problem& p, const char* result, DType dtype) {
    if (p.exact) return {registry::Bound::bits, 0, 0};
    return p.op->bound({result, t.dtype, dtype, t.entry.arithmetic, p.reduction});
  }

  // What supports() refused is tried in a child: a right answer there is a refusal too many.
  void try_refused(Target& t, const Problem& p, const std::string& reason) {
    if (!plan_.children || t.subject.services || tried_refused_[&t]++ >= 4) return;
    const Outcome& truth = truth_of(p);
    if (truth.code != RLK_OK) return;
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      const Outcome out = execute_forced(p, t.subject);
      bool right = out.code == RLK_OK && out.broken.empty();
      for (std::size_t i = 0; right && i < out.results.size(); ++i) {
        if (out.results[i].dtype == DType::none) continue;
        const registry::Bound bound = p.op->bound({t.subject.op->arguments[i].name, t.dtype,
                                                   out.results[i].dtype, t.entry.arithmetic, p.reduction});
        Difference where{};
        right = Distance("", out.results[i].dtype, bound)
                    .add(out.results[i], truth.results[i], bound, 0, where)
                    .empty();
      }
      _exit(right ? 42 : 0);
    }
    int status = 0;
    if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 42)
      t.entry.over_refused.push_back(fmt::format("{}: {}", p.name, reason));
  }

  // Two implementations that declare one arithmetic must give one answer.
  void equal_arithmetic() {
    for (auto& [key, cases] : by_arithmetic_)
      for (auto& [name, runs] : cases)
        for (std::size_t r = 1; r < runs.size(); ++r) {
          Target& t = *runs[r].target;
          ++t.entry.promises["equal bits"].tried;
          ++runs[0].target->entry.promises["equal bits"].tried;
          for (std::size_t i = 0; i < runs[r].results.size(); ++i) {
            if (runs[r].results[i].dtype == DType::none) continue;
            if (const auto d = first_difference(runs[0].results[i], runs[r].results[i])) {
              const Problem* p = nullptr;
              for (const Item& item : items_[t.entry.op])
                if (item.problem.name == name) p = &item.problem;
              fail(t, "equal bits", *p, "", t.subject.op->arguments[i].name, &*d,
                   fmt::format("{} declares {} too and gives other bits",
                               runs[0].target->entry.implementation, t.entry.arithmetic));
              break;
            }
          }
        }
  }

  // On the CPU the targets are tried side by side, those that took longest so far first; a GPU's are tried
  // one after the other, so that what is seen of its memory is the call's own.
  void invariances() {
    std::vector<Target*> order;
    order.reserve(targets_.size());
    for (Target& t : targets_) order.push_back(&t);
    std::stable_sort(order.begin(), order.end(),
                     [](const Target* a, const Target* b) { return a->seconds > b->seconds; });
    const std::size_t jobs = plan_.device == "cpu" ? static_cast<std::size_t>(processors()) : 1;
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      for (std::size_t i = next++; i < order.size() && going(); i = next++)
        invariance(*order[i], i, std::min(jobs, order.size() - i));
    };
    std::vector<std::thread> workers;
    for (std::size_t j = 1; j < std::min(jobs, order.size()); ++j) workers.emplace_back(work);
    work();
    for (std::thread& w : workers) w.join();
  }

  void invariance(Target& t, std::size_t index, std::size_t jobs) {
    std::vector<const Item*> list;
    for (const Item& item : items_[t.entry.op])
      if (item.problem.input_dtype() == t.dtype && item.given.order_probe.empty()) list.push_back(&item);
    // With a budget each target gets its share, and the cases with the most rows first.
    std::stable_sort(list.begin(), list.end(), [](const Item* a, const Item* b) {
      return row_count(a->problem).value_or(0) > row_count(b->problem).value_or(0);
    });
    const double deadline = plan_.budget > 0
                                ? elapsed() + (plan_.budget - elapsed()) * static_cast<double>(jobs) /
                                                  static_cast<double>(targets_.size() - index)
                                : 1e300;
    // A short budget spreads the variants over the cases, each variant once, before any comes a second time.
    const std::size_t stride =
        plan_.budget > 0 && plan_.transform.empty() ? std::max<std::size_t>(1, list.size()) : 1;
    for (std::size_t pass = 0; pass < stride; ++pass)
      for (std::size_t c = 0; c < list.size(); ++c) {
        const Item* item = list[c];
        if (!going() || elapsed() > deadline) {
          if (pass == 0) {
            const std::lock_guard lock(mutex_);
            report_.complete = false;
          }
          return;
        }
        const double part =
            static_cast<double>(pass * list.size() + c) / static_cast<double>(stride * list.size());
        progress(0.35 + 0.65 * (static_cast<double>(index) + part) / static_cast<double>(targets_.size()), t,
                 item->problem.name.c_str());
        const std::size_t phase = (c + pass) % stride;
        const auto wide = with_fp32_results(item->problem);
        // fp32 results show what rounding to 16 bits hides: where they exist they get every variant, and the
        // rounded ones, which differ in their last step, every fourth, or none when the budget is short.
        const bool shown = wide && vary(t, *wide, deadline, stride, phase);
        if (!shown)
          vary(t, item->problem, deadline, stride, phase);
        else if (plan_.budget <= 0 && plan_.transform.empty())
          vary(t, item->problem, deadline, 4, c % 4);
        else if (stride == 1)
          vary(t, item->problem, deadline, 1, 0);
      }
  }

  // False when the target does not take the problem.
  bool vary(Target& t, const Problem& p, double deadline, std::size_t stride, std::size_t phase) {
    const Outcome base = execute(p, t.subject);
    if (base.code != RLK_OK) return false;
    std::size_t count = 0;
    for_variants(p, t.subject, plan_.budget <= 0, [&](const Variant& v) {
      if (count++ % stride != phase) return true;
      if (!plan_.transform.empty() && plan_.transform != v.dimension + " " + v.text) return true;
      // Who finds the thread pool busy runs alone: a variant about threads has it to itself.
      std::shared_lock beside(pool_, std::defer_lock);
      std::unique_lock alone(pool_, std::defer_lock);
      if (v.manner.threads != 0 || v.users > 1)
        alone.lock();
      else
        beside.lock();
      for (int32_t repeat = 0; repeat < v.repeats; ++repeat)
        for (const Outcome& out : run_variant(t, v)) compare_rows(t, p, v, base, out);
      ++t.entry.covered[v.dimension];
      return going() && elapsed() < deadline;
    });
    return true;
  }

  std::vector<Outcome> run_variant(const Target& t, const Variant& v) {
    std::vector<Outcome> outs(static_cast<std::size_t>(v.users));
    if (v.users == 1) {
#if defined(__x86_64__)
      const unsigned before = _mm_getcsr();
      if (v.hostile) _mm_setcsr(0x1f80u | 0x8040u | 0x6000u);  // flush, denormals are zero, toward zero
#endif
      outs[0] = execute(v.problem, t.subject, v.manner);
#if defined(__x86_64__)
      _mm_setcsr(before);
#endif
      return outs;
    }
    std::vector<std::thread> users;
    users.reserve(outs.size());
    for (Outcome& out : outs) users.emplace_back([&] { out = execute(v.problem, t.subject, v.manner); });
    for (std::thread& u : users) u.join();
    return outs;
  }

  void compare_rows(Target& t, const Problem& p, const Variant& v, const Outcome& base, const Outcome& out) {
    const std::string transform = v.dimension + " " + v.text;
    if (!healthy(t, v.problem, transform, out)) return;
    const char* promise = v.hostile ? "strict" : "batch invariance";
    ++t.entry.promises[promise].tried;
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
      fail(t, promise, p, transform, t.subject.op->arguments[i].name, &*d, "bits changed");
      return;
    }
  }

  // ---- the same corpus in other processes

  static uint64_t hash_of(const Outcome& out) {
    uint64_t hash = 14695981039346656037ull;
    for (const Array& a : out.results)
      if (a.dtype != DType::none) hash = hash_bytes(a.bytes.data(), a.bytes.size(), hash);
    return hash;
  }

  void other_processes() {
    if (!plan_.children || targets_.empty()) return;
    if (plan_.child.empty()) {
      report_.not_covered.emplace_back("other processes and hostile variables: no child program was given");
      return;
    }
    using Variables = std::vector<std::pair<std::string, std::string>>;
    const double patience = plan_.budget > 0 ? std::max(20.0, plan_.budget) : 300;
    const auto compare = [&](const std::string& transform, const Variables& variables) {
      if ((plan_.stop && plan_.stop->load()) || (!plan_.transform.empty() && plan_.transform != transform))
        return;
      std::vector<std::string> words{
          kChildFlag,     plan_.op, plan_.implementation, plan_.device, std::to_string(plan_.seed),
          plan_.case_name};
      for (const auto& b : snapshot().backends)  // a plugin that was loaded by hand is not found by itself
        if (b->table && b->origin.front() == '/') words.push_back(b->origin);
      compare_process(run_child(plan_.child, words, variables, patience), transform, !variables.empty());
    };
    for (int i = 0; i < 2; ++i) compare("another process", {});
    // All variables at once tells as much when nothing changes; one by one in thorough runs, to name the one.
    const Variables all(std::begin(kHostileVariables), std::end(kHostileVariables));
    if (plan_.transform.empty() && plan_.budget > 0 && plan_.budget < 300)
      return compare("all hostile variables", all);
    for (const auto& variable : all) compare(variable.first + "=" + variable.second, {variable});
    if (!plan_.transform.empty()) compare("all hostile variables", all);
  }

  void compare_process(const ChildResult& child, const std::string& transform, bool hostile) {
    if (!child.started || child.signal != 0 || child.exit != 0) {
      report_.not_covered.push_back(
          !child.started ? transform + ": the child program did not start"
          : child.signal != 0
              ? fmt::format("{}: the child program ended by signal {}", transform, child.signal)
              : fmt::format("{}: the child program ended with {}", transform, child.exit));
      return;
    }
    std::size_t compared = 0;
    std::map<std::string, std::string> there;  // op, implementation, dtype, case -> hash
    for (const std::string& line : child.lines)
      if (const auto tab = line.rfind('\t'); tab != std::string::npos)
        there[line.substr(0, tab)] = line.substr(tab + 1);
    for (Target& t : targets_)
      for (const Item& item : items_[t.entry.op]) {
        const std::string& name = item.problem.name;
        const auto here = t.entry.corpus.find(name);
        const auto at = there.find(
            fmt::format("{}\t{}\t{}\t{}", t.entry.op, t.entry.implementation, t.entry.dtype, name));
        // Absent there: refused, which a strict implementation may do under a variable it cannot undo.
        if (here == t.entry.corpus.end() || at == there.end()) continue;
        ++compared;
        const char* promise = hostile ? "strict" : "repeats";
        ++t.entry.covered[hostile ? "hostile variables" : "other processes"];
        ++t.entry.promises[promise].tried;
        if (at->second == here->second) continue;
        fail(t, promise, item.problem, transform, {}, nullptr,
             fmt::format("another process has other bits: hash {} there, {} here", at->second, here->second));
      }
    if (compared == 0) report_.not_covered.push_back(transform + ": every call was refused there");
  }

 public:
  // The child's side: hashes of the small cases of every target, one a line.
  void print_corpus() {
    collect();
    for (const Target& t : targets_) {
      std::size_t n = 0;
      for (const Item& item : items_[t.entry.op]) {
        if (item.problem.input_dtype() != t.dtype || !item.given.order_probe.empty() || item.problem.large ||
            n >= kProcessCases)
          continue;
        const Outcome out = execute(item.problem, t.subject);
        if (out.code != RLK_OK) continue;
        ++n;
        std::printf("%s\t%s\t%s\t%s\t%016lx\n", t.entry.op.c_str(), t.entry.implementation.c_str(),
                    t.entry.dtype.c_str(), item.problem.name.c_str(),
                    static_cast<unsigned long>(hash_of(out)));
      }
    }
  }

 private:
  struct Kept {
    Target* target;
    std::vector<Array> results;
  };
  const Plan& plan_;
  const Clock::time_point start_;
  std::mutex mutex_;  // of report_ and shown_ while targets are tried side by side
  double shown_ = 0;
  std::shared_mutex pool_;  // the library's threads
  Report report_;
  std::vector<Target> targets_;
  std::map<std::string, std::vector<Item>> items_;
  std::map<std::string, Outcome> truths_, scales_;
  std::map<std::tuple<std::string, std::string, std::string>, std::map<std::string, std::vector<Kept>>>
      by_arithmetic_;
  std::map<const Target*, int> tried_refused_;
};

}  // namespace

std::string Failure::line() const {
  std::string out = fmt::format("{}: {} {} {} on {}: case '{}' ({}) seed {}", promise, op, implementation,
                                dtype, device, case_name, shape, seed);
  if (!transform.empty()) out += fmt::format(", transform '{}'", transform);
  if (index >= 0) out += fmt::format(", {}[{}]", result, index);
  if (bits) out += fmt::format(": expected 0x{:0{}x}, got 0x{:0{}x}", expected, bits / 4, got, bits / 4);
  return out + (text.empty() ? "" : ": " + text) + "; again: " + command();
}

std::string Failure::command() const {
  std::string out =
      fmt::format("rlk-dispatch --verify {} --device {} --seed {} --case '{}'", op, device, seed, case_name);
  // Equal bits takes two.
  if (promise != "equal bits") out += " --impl " + implementation;
  return transform.empty() ? out : out + fmt::format(" --transform '{}'", transform);
}

bool Entry::good() const {
  return std::all_of(promises.begin(), promises.end(),
                     [](const auto& p) { return !p.second.promised || p.second.failed == 0; });
}

Report verify(const Plan& plan) { return Verification(plan).run(); }

int child_main(int argc, char** argv) {
  if (argc < 7 || std::strcmp(argv[1], kChildFlag) != 0) return -1;
  Plan plan;
  plan.op = argv[2];
  plan.implementation = argv[3];
  plan.device = argv[4];
  plan.seed = std::strtoull(argv[5], nullptr, 10);
  plan.case_name = argv[6];
  for (int i = 7; i < argc; ++i) rlk_load_plugin(argv[i]);  // most are there already
  Verification(plan).print_corpus();
  return 0;
}

}  // namespace rlk::harness
