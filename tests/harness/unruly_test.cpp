// What is tested may crash, hang, exit or throw: it is blamed, by case and transform, and the trial goes on.
#include <doctest/doctest.h>

#include <string>

#include "rlk/harness.hpp"
#include "rlk/rlk.h"

namespace {

using rlk::harness::Promise;
using rlk::harness::Report;

constexpr const char* kCase = "m=33 k=96 v=48 fp32->fp32 normal";

Report examine(const char* id, double patience = 60, int passes = 0, const char* name = kCase) {
  static const bool loaded = rlk_load_plugin(RLK_UNRULY) == RLK_OK;
  REQUIRE_MESSAGE(loaded, std::string(rlk_last_error()));
  return rlk::harness::verify({.op = "lm_head",
                               .implementation = id,
                               .case_name = name,
                               .passes = passes,
                               .patience = patience,
                               .child = {"/proc/self/exe"}});
}

// Exactly one call ended its process, and what came after it was tried all the same.
void expect_one_death(const Report& r, const std::string& how) {
  REQUIRE(r.entries.size() == 1);
  REQUIRE(r.failures.size() == 1);
  const rlk::harness::Failure& f = r.failures[0];
  INFO(f.line());
  CHECK(f.promise == Promise::returns);
  CHECK(f.case_name == kCase);
  CHECK(f.transform == "batch size m=7");
  CHECK(f.text.find(how) != f.text.npos);
  CHECK(f.command().find("--transform 'batch size m=7'") != std::string::npos);
  CHECK(r.entries[0].covered.at("padding") > 0);  // comes after batch sizes
  CHECK(r.entries[0].complete);
  CHECK_FALSE(r.entries[0].good());
}

}  // namespace

TEST_CASE("the control comes back from every call") {
  const Report r = examine("unruly.honest");
  for (const auto& f : r.failures) MESSAGE(f.line());
  CHECK(r.failures.empty());
  REQUIRE(r.entries.size() == 1);
  CHECK(r.entries[0].good());
  CHECK_FALSE(r.good());  // one case is no proof
}

TEST_CASE("what refuses strict calls under one hostile variable is tried under the others") {
  const Report r = examine("unruly.wary", 60, 1);
  REQUIRE(r.entries.size() == 1);
  REQUIRE(r.entries[0].covered.contains("hostile variables"));
  CHECK(r.entries[0].covered.at("hostile variables") > 0);
}

TEST_CASE("a crash is a failure of the call it happened in") {
#ifdef __SANITIZE_ADDRESS__
  const char* end = "exit code 1";  // of the sanitizer's handler
#else
  const char* end = "died by SIGSEGV";
#endif
  expect_one_death(examine("unruly.crash"), end);
}

TEST_CASE("so is an exit, even with code 0") { expect_one_death(examine("unruly.exit"), "exit code 0"); }

TEST_CASE("so is an exception that nothing catches") {
  expect_one_death(examine("unruly.throws"), "died by SIGABRT");
}

TEST_CASE("a call that never ends is ended, whatever the budget") {
  expect_one_death(examine("unruly.hang", 20), "did not come back");
}

TEST_CASE("a step of many calls is waited for as long as a few, not as long as all of them") {
  const Report r = examine("unruly.hang", 3, 1, "order of addition fp32");
  REQUIRE(r.failures.size() == 1);
  INFO(r.failures[0].line());
  CHECK(r.failures[0].transform == "order of addition");
  CHECK(r.failures[0].text == "did not come back within 6 s");
}
