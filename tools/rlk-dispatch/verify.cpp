// --verify: runs the harness, prints one line per implementation and dtype, writes certificate and report.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "commands.hpp"
#include "library.hpp"
#include "mutants.hpp"
#include "rlk/harness.hpp"
#include "rlk/introspect.h"
#include "table.hpp"
#include "words.hpp"

namespace rlk::cli {

using harness::Promise;

std::atomic<bool> stop{false};

// One line on the terminal that is written over; nothing in logs and pipes.
void show_progress(double done, const std::string& what) {
  if (!isatty(STDERR_FILENO)) return;
  std::fprintf(stderr, "\r\x1b[K%3.0f%%  %.90s", 100 * done, what.c_str());
  std::fflush(stderr);
}

namespace {

// "short": every case, and every transform once; "normal": each transform on four cases; "full": also large
// cases, and the long lists of transforms, each on three cases. Seconds: as often as there is time for. None of the words depends on a clock.
void set_budget(const std::string& budget, harness::Plan& plan) {
  if (budget == "short" || budget == "normal") {
    plan.passes = budget == "short" ? 1 : harness::Plan::kNormal;
    return;
  }
  if (budget == "full") return;
  char* end = nullptr;
  plan.budget = std::strtod(budget.c_str(), &end);
  if (end == budget.c_str() || *end || !std::isfinite(plan.budget) || plan.budget <= 0)
    throw Failure(kUsage, "--budget takes short, normal, full or a number of seconds above 0, not '" +
                              budget + "'" + meant(budget, {"short", "normal", "full"}));
}

// Said before the work begins, not after it.
void check_writable(const std::string& path) {
  if (path.empty()) return;
  const auto slash = path.rfind('/');
  const std::string folder = slash == path.npos ? "." : path.substr(0, slash + 1);
  if (access(folder.c_str(), W_OK) != 0) throw Failure(kUsage, "cannot write " + path);
}

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2g", x);
  return text;
}

std::string invariance_text(const harness::Entry& e) {
  const harness::Tally& t = e.promises[Promise::batch_invariance];
  if (!t.tried) return "-";
  const std::string count = std::to_string(t.tried) + " transforms, ";
  if (!t.failed) return count + "0 bits changed";
  return count + std::to_string(t.failed) + (t.promised ? " BROKEN" : " changed, not promised");
}

// The worst distance in the bound's own unit.
std::string distance_text(const harness::Accuracy& a, bool failed) {
  if (a.metric == "none") return "bits alone";  // no distance is a measure of them
  if (a.metric == "bits") return short_number(a.worst) + " ulp of exact";
  if (a.metric == "elementwise") {
    std::string unit = "ulp";
    if (a.bound > 0) unit += " + " + short_number(a.bound) + " of the peak";
    if (a.bound_absolute > 0) unit += " + " + short_number(a.bound_absolute);
    if (unit != "ulp") unit = "x (" + unit + ")";
    return short_number(a.worst) + " " + unit + " (bound " + short_number(a.bound_ulps) + ")";
  }
  // A result that was rounded once may be half of its last place off, whatever the bound.
  const bool rounding = a.worst > a.bound && !failed;
  return short_number(a.worst) + (a.metric == "rms" ? " of the RMS" : " of the peak") + " (bound " +
         short_number(a.bound) + (rounding ? " or one rounding)" : ")");
}

std::string accuracy_text(const harness::Entry& e) {
  const auto part = [](const harness::Accuracy& a) {
    const double allowed = a.metric == "elementwise" ? a.bound_ulps : a.bound;
    return allowed > 0 ? a.worst / allowed : a.worst;
  };
  const harness::Accuracy* worst = nullptr;
  for (const harness::Accuracy& a : e.accuracy)
    if (!worst || part(a) > part(*worst)) worst = &a;
  return worst ? distance_text(*worst, e.promises[Promise::accuracy].failed > 0) : "-";
}

// "accuracy, purity (no case has this dtype)"
std::string uncovered_text(const harness::Entry& e) {
  std::string out, why;
  for (const Promise p : e.uncovered()) {
    out += (out.empty() ? "" : ", ") + std::string(name_of(p));
    if (why.empty()) why = e.promises[p].why;
  }
  return why.empty() ? out : out + " (" + why + ")";
}

std::string state_text(const harness::Entry& e) {
  std::string broken;
  const bool uncovered = !e.uncovered().empty();
  for (const Promise p : harness::kPromises)
    if (e.promises[p].promised && e.promises[p].failed)
      broken += (broken.empty() ? "no: " : ", ") + std::string(name_of(p));
  if (!broken.empty() || uncovered)
    return broken + (uncovered ? broken.empty() ? "not covered" : "; not covered" : "");
  return e.complete ? "yes" : "not covered whole";
}

std::string order_text(const harness::Entry& e) {
  if (e.orders.empty() || e.orders[0].by_rows.empty()) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(e.orders[0].by_rows[0].second));
  return std::string(text).substr(0, 8) + (e.orders[0].equal ? " for all M" : " CHANGES WITH M");
}

void print_failures(const harness::Report& r) {
  constexpr int kMost = 3;  // of one promise of one implementation and dtype
  std::map<std::string, int> count;
  for (const harness::Failure& f : r.failures) {
    const std::string who = f.op + " " + f.implementation + " " + f.dtype + ": " + name_of(f.promise);
    if (count[who]++ < kMost) std::printf("%s\n", painted(f.line(), Paint::bad).c_str());
  }
  for (const auto& [who, n] : count)
    if (n > kMost) std::printf("%s: %d more, all of them in --json\n", who.c_str(), n - kMost);
}

void print_gaps(const harness::Report& r) {
  for (const harness::Entry& e : r.entries)
    for (const std::string& c : e.over_refused)
      std::printf("note: %s %s %s refuses a call whose result would be within its bound: %s\n", e.op.c_str(),
                  e.implementation.c_str(), e.dtype.c_str(), c.c_str());
  for (const harness::Entry& e : r.entries)
    if (const std::string text = uncovered_text(e); !text.empty())
      std::printf("not covered: %s %s %s: %s\n", e.op.c_str(), e.implementation.c_str(), e.dtype.c_str(),
                  text.c_str());
  for (const std::string& text : r.not_covered) std::printf("not covered: %s\n", text.c_str());
  for (const std::string& text : r.missing) std::printf("missing: %s\n", text.c_str());
  for (const std::string& text : r.cannot_run) std::printf("cannot run here: %s\n", text.c_str());
}

const char* verdict_text(const harness::Report& r) {
  if (r.entries.empty()) return "nothing was verified";
  if (!r.failures.empty()) return "promises broken";
  if (!r.missing.empty()) return "not good: implementations are missing";
  if (!r.complete) return "not good: partial, the budget or an interrupt ended it";
  if (r.restricted) return "no promise broken in what was asked, which is no proof of the rest";
  if (!r.good()) return "not good: promises that were not covered";
  return "all promises kept";
}

void print_text(const harness::Report& r, const Mutants& mutants) {
  Table table({"op", "implementation", "dtype", "arithmetic", "Axis-A", "Axis-B", "order hash", "kept"});
  for (const harness::Entry& e : r.entries)
    table.row({e.op, e.implementation, e.dtype, e.arithmetic, invariance_text(e), accuracy_text(e),
               order_text(e), state_text(e)});
  table.print();
  print_failures(r);
  print_gaps(r);
  if (!mutants.caught.empty()) std::printf("%zu deliberate errors caught\n", mutants.caught.size());
  for (const std::string& id : mutants.missed) std::printf("deliberate error not caught: %s\n", id.c_str());
  for (const std::string& id : mutants.blamed) std::printf("control blamed: %s\n", id.c_str());
  std::printf("%s in %.1f s\n", verdict_text(r), r.seconds);
}

// A run that was asked for one case or transform is good when something was tried there and nothing broke.
bool passed(const harness::Report& r) {
  if (!r.restricted) return r.good();
  const auto tried = [](const harness::Entry& e) { return e.promises[Promise::returns].tried > 0; };
  return r.complete && r.failures.empty() && std::any_of(r.entries.begin(), r.entries.end(), tried);
}

// Of an op, or of all, where the word is near one of theirs.
std::string implementation_meant(const std::string& word) {
  std::vector<std::string> known;
  const Json all = listed("impls");
  for (const Json& i : all["impls"])
    for (const char* name : {"id", "backend"}) known.push_back(i[name]);
  return meant(word, known);
}

// The op's own name where an alias was given; an unknown one is an error with a suggestion. Patterns stay.
std::string named_op(const std::string& op) {
  if (op.empty()) return "*";
  if (op.find_first_of("*?[") != op.npos) return op;
  return parse(rlk_examples_json(op.c_str()))["op"];
}

}  // namespace

int verify(const Options& o) {
  check_configuration();
  check_writable(o.certificate);
  check_writable(o.report);
  harness::Plan plan;
  plan.op = named_op(o.op);
  plan.implementation = o.implementation;
  plan.device = o.device.substr(0, o.device.find(':'));
  plan.seed = o.seed;
  plan.case_name = o.case_name;
  plan.transform = o.transform;
  set_budget(o.budget, plan);
  plan.child = {"/proc/self/exe"};
  plan.progress = show_progress;
  plan.stop = &stop;
  struct sigaction action{}, before{};
  action.sa_handler = [](int) { stop = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second Ctrl-C ends at once
  sigaction(SIGINT, &action, &before);
  const harness::Report r = harness::verify(plan);
  if (!r.error.empty()) throw Failure(kUsage, r.error);
  const Mutants mutants = try_mutants(o);  // after the others: it loads their plugin
  sigaction(SIGINT, &before, nullptr);
  if (isatty(STDERR_FILENO)) std::fputs("\r\x1b[K", stderr);
  const std::string certificate = harness::certificate(r, mutants.caught);
  if (!o.certificate.empty()) write_file(o.certificate, certificate);
  if (!o.report.empty()) write_file(o.report, report_page(certificate));
  if (o.json)
    std::fputs(certificate.c_str(), stdout);
  else
    print_text(r, mutants);
  if (!mutants.good()) return kVerificationFailed;
  if (r.entries.empty() && !o.implementation.empty())
    if (const std::string near = implementation_meant(o.implementation); !near.empty())
      throw Failure(kNoImplementation, "no implementation '" + o.implementation + "'" + near);
  if (r.entries.empty()) return kNoImplementation;
  return passed(r) ? kGood : kVerificationFailed;
}

}  // namespace rlk::cli
