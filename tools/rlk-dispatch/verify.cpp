// --verify: runs the harness, prints one line per implementation and dtype, writes certificate and report.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "commands.hpp"
#include "library.hpp"
#include "mutants.hpp"
#include "rlk/harness.hpp"
#include "table.hpp"

namespace rlk::cli {

std::atomic<bool> stop{false};

// One line on the terminal that is written over; nothing in logs and pipes.
void show_progress(double done, const std::string& what) {
  if (!isatty(STDERR_FILENO)) return;
  std::fprintf(stderr, "\r\x1b[K%3.0f%%  %.90s", 100 * done, what.c_str());
  std::fflush(stderr);
}

namespace {

// "short" is what CI runs, "normal" what a machine is certified with, "full" leaves nothing out.
double seconds_of(const std::string& budget) {
  if (budget == "short") return 90;
  if (budget == "normal") return 600;
  if (budget == "full") return 0;
  char* end = nullptr;
  const double seconds = std::strtod(budget.c_str(), &end);
  if (end == budget.c_str() || *end || seconds < 0)
    throw Failure(kUsage, "--budget takes short, normal, full or seconds, not '" + budget + "'");
  return seconds;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw Failure(kUsage, "cannot write " + path);
}

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2g", x);
  return text;
}

std::string invariance_text(const harness::Entry& e) {
  const auto at = e.promises.find("batch invariance");
  if (at == e.promises.end()) return "-";
  const harness::Tally& t = at->second;
  const std::string count = std::to_string(t.tried) + " transforms, ";
  if (!t.failed) return count + "0 bits changed";
  return count + std::to_string(t.failed) + (t.promised ? " BROKEN" : " changed, not promised");
}

std::string accuracy_text(const harness::Entry& e) {
  const harness::Accuracy* worst = nullptr;
  for (const harness::Accuracy& a : e.accuracy)
    if (!worst ||
        (a.bound > 0 && a.worst / a.bound > worst->worst / (worst->bound > 0 ? worst->bound : 1e300)))
      worst = &a;
  if (!worst) return "-";
  // A result that was rounded once may be half of its last place off, whatever the bound.
  const bool rounding = worst->worst > worst->bound && !e.promises.at("accuracy").failed;
  return short_number(worst->worst) + " (bound " + short_number(worst->bound) +
         (rounding ? " or one rounding)" : ")");
}

std::string state_text(const harness::Entry& e) {
  std::string broken;
  for (const auto& [promise, t] : e.promises)
    if (t.promised && t.failed) broken += (broken.empty() ? "no: " : ", ") + promise;
  return broken.empty() ? "yes" : broken;
}

std::string order_text(const harness::Entry& e) {
  if (e.orders.empty() || e.orders[0].by_rows.empty()) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(e.orders[0].by_rows[0].second));
  return std::string(text).substr(0, 8) + (e.orders[0].equal ? " for all M" : " CHANGES WITH M");
}

void print_text(const harness::Report& r, const Mutants& mutants) {
  Table table({"op", "implementation", "dtype", "arithmetic", "Axis-A", "Axis-B", "order hash", "kept"});
  for (const harness::Entry& e : r.entries)
    table.row({e.op, e.implementation, e.dtype, e.arithmetic, invariance_text(e), accuracy_text(e),
               order_text(e), state_text(e)});
  table.print();
  for (const harness::Failure& f : r.failures) std::printf("%s\n", painted(f.line(), Paint::bad).c_str());
  for (const harness::Entry& e : r.entries)
    for (const std::string& c : e.over_refused)
      std::printf("note: %s %s %s refuses a call whose result would be within its bound: %s\n", e.op.c_str(),
                  e.implementation.c_str(), e.dtype.c_str(), c.c_str());
  for (const std::string& text : r.not_covered) std::printf("not covered: %s\n", text.c_str());
  if (!mutants.caught.empty()) std::printf("%zu deliberate errors caught\n", mutants.caught.size());
  for (const std::string& id : mutants.missed) std::printf("deliberate error not caught: %s\n", id.c_str());
  for (const std::string& id : mutants.blamed) std::printf("control blamed: %s\n", id.c_str());
  std::printf("%s in %.1f s%s\n",
              r.entries.empty()    ? "nothing was verified"
              : r.failures.empty() ? "all promises kept"
                                   : "promises broken",
              r.seconds, r.complete ? "" : "; partial: the budget or an interrupt ended it");
}

}  // namespace

int verify(const Options& o) {
  check_configuration();
  harness::Plan plan;
  plan.op = o.op.empty() ? "*" : o.op;
  plan.implementation = o.implementation;
  plan.device = o.device.substr(0, o.device.find(':'));
  plan.seed = o.seed;
  plan.case_name = o.case_name;
  plan.transform = o.transform;
  plan.budget = seconds_of(o.budget);
  plan.child = {"/proc/self/exe"};
  plan.progress = show_progress;
  plan.stop = &stop;
  struct sigaction action{}, before{};
  action.sa_handler = [](int) { stop = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second Ctrl-C ends at once
  sigaction(SIGINT, &action, &before);
  const harness::Report r = harness::verify(plan);
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
  if (r.entries.empty()) return kNoImplementation;
  return r.failures.empty() ? kGood : kVerificationFailed;
}

}  // namespace rlk::cli
