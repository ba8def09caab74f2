// The harness must be able to fail: every deliberate error is caught, for the promise it breaks, on one small
// case.
#include "mutants.hpp"

#include <doctest/doctest.h>

#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "rlk/harness.hpp"

namespace {

using rlk::harness::Plan;
using rlk::harness::Promise;
using rlk::harness::Report;

// One small case through the whole table, without a clock: what is caught here is caught on a slow machine
// too.
constexpr const char* kCase = "m=33 k=96 v=48 fp32->fp32 normal";
constexpr const char* kOddCase = "m=2 k=1023 v=16 fp32->fp32 normal";
constexpr const char* kRotation = "plain q and k [3,4,9,64] fp32";
constexpr int kNormal = 4;  // passes of the normal budget, at which all are caught

Report examine_all(const std::string& op, const std::string& id, const char* transform) {
  Plan plan;
  plan.op = op;
  plan.implementation = id;
  plan.transform = transform;
  plan.passes = kNormal;
  return rlk::harness::verify(plan);
}

// `beside`: other processes too, a dozen for each.
Report examine(const std::string& op, const std::string& id, const char* name = kCase, bool beside = true,
               const char* transform = "") {
  Plan plan;
  plan.op = op;
  plan.implementation = id;
  plan.case_name = name;
  plan.transform = transform;
  plan.passes = kNormal;
  if (beside) plan.child = {"/proc/self/exe"};
  return rlk::harness::verify(plan);
}

// An error that the call itself shows needs no other way to make it.
constexpr const char* kOnce = "memory nothing behind the arrays";
bool shown_by_call(const std::string& promise) { return promise == "accuracy" || promise == "equal bits"; }

// What one process cannot show, or may end.
bool takes_others(const std::string& promise) {
  return promise == "repeats" || promise == "strict" || promise == "predicate" || promise == "returns";
}

}  // namespace

TEST_CASE("the honest control passes every promise") {
  const Report r = examine("lm_head", "mutant.honest");
  for (const auto& f : r.failures) MESSAGE(f.line());
  CHECK(r.failures.empty());
  REQUIRE(r.entries.size() == 3);
  for (const auto& e : r.entries) {
    if (e.dtype != "fp32") continue;
    CHECK(e.promises[Promise::batch_invariance].tried > 20);
    CHECK(e.promises[Promise::accuracy].tried > 0);
    CHECK(e.promises[Promise::repeats].tried >= 2);
  }
}

TEST_CASE("the library's own implementations pass where the breaks are made") {
  std::set<std::pair<std::string, std::string>> seen;
  int64_t judged = 0;
  for (const auto& mutant : rlk::mutants::all()) {
    if (mutant.transform) {
      const Report r = examine_all(mutant.op, "mutant.control", mutant.transform);
      for (const auto& f : r.failures) MESSAGE(f.line());
      CHECK(r.failures.empty());
    }
    if (!mutant.where || !seen.emplace(mutant.op, mutant.where).second) continue;
    const Report r = examine(mutant.op, "mutant.control", mutant.where, false);
    for (const auto& f : r.failures) MESSAGE(f.line());
    CHECK(r.failures.empty());
    // Rules that were written once more for errors to be put into them.
    const Report rules = examine(mutant.op, "mutant.control_*", mutant.where, false, kOnce);
    for (const auto& f : rules.failures) MESSAGE(f.line());
    CHECK(rules.failures.empty());
    for (const auto& e : rules.entries) judged += e.promises[Promise::equal_bits].tried;
  }
  CHECK(judged >= 15);
}

TEST_CASE("every mutant is caught for the promise it breaks") {
  std::set<std::string> promises;
  for (const auto& mutant : rlk::mutants::all()) {
    CAPTURE(std::string(mutant.id));
    const std::string op = mutant.op;
    // A false arithmetic shows only beside an implementation that tells the truth.
    const bool beside = std::string(mutant.id) == "mutant.false_arithmetic";
    const char* const name = mutant.where                                 ? mutant.where
                             : op == "rope_bwd"                           ? kRotation
                             : std::string(mutant.promise) == "predicate" ? kOddCase
                                                                          : kCase;
    const Report r = mutant.transform
                         ? examine_all(op, mutant.id, mutant.transform)
                         : examine(op, beside ? "@(native.golden|mutant.false_arithmetic)" : mutant.id, name,
                                   beside || takes_others(mutant.promise),
                                   !beside && shown_by_call(mutant.promise) ? kOnce : "");
    bool caught = false;
    for (const auto& f : r.failures) {
      if (f.implementation != mutant.id || name_of(f.promise) != std::string(mutant.promise)) continue;
      if (!caught) std::printf("%-28s %s\n", mutant.id, f.line().c_str());
      caught = true;
    }
    CHECK_MESSAGE(caught, std::string(mutant.id), " passed: ", std::string(mutant.error), " (",
                  r.failures.size(), " other failures)");
    promises.insert(mutant.promise);
  }
  CHECK(rlk::mutants::all().size() >= 12);
  CHECK(promises.size() == 7);  // every promise is broken by someone
}

TEST_CASE("a predicate that refuses too much is reported, not failed") {
  const Report r = examine("lm_head", "mutant.refuses_odd", kOddCase);
  CHECK(r.failures.empty());
  std::size_t over = 0;
  for (const auto& e : r.entries) over += e.over_refused.size();
  CHECK(over > 0);
}

TEST_CASE("one pass examines an implementation that gives 16-bit results only") {
  Plan plan;
  plan.op = "lm_head";
  plan.implementation = "mutant.only_narrow";
  plan.passes = 1;
  plan.child = {"/proc/self/exe"};
  const Report r = rlk::harness::verify(plan);
  for (const auto& f : r.failures) MESSAGE(f.line());
  CHECK(r.failures.empty());
  REQUIRE(r.entries.size() == 1);
  const auto& promises = r.entries[0].promises;
  CHECK(promises[Promise::batch_invariance].tried > 20);
}
