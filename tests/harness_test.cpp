// labels: conformance
// The harness on the native backend: everything it promises holds, in the budget of a CI run.
#include "rlk/harness.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

void expect_good(const rlk::harness::Report& r) {
  for (std::size_t i = 0; i < r.failures.size() && i < 20; ++i) MESSAGE(r.failures[i].line());
  CHECK(r.failures.empty());
  CHECK_FALSE(r.entries.empty());
}

}  // namespace

TEST_CASE("every native implementation of every op keeps its promises") {
#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
  constexpr double kBudget = 300;  // instrumented code is slow, and so is code with assertions
#else
  constexpr double kBudget = 60;
#endif
  const rlk::harness::Report r = rlk::harness::verify({.budget = kBudget});
  expect_good(r);
  for (const auto& e : r.entries) {
    INFO(e.op << " " << e.implementation << " " << e.dtype);
    CHECK(e.promises[rlk::harness::Promise::accuracy].tried > 0);
    CHECK(e.promises[rlk::harness::Promise::purity].tried > 0);
    CHECK(e.promises[rlk::harness::Promise::batch_invariance].tried > 0);
  }
}
