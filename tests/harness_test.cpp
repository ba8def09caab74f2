// labels: conformance
// The harness on the native backend: everything it promises holds.
#include "rlk/harness.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>

#include "src/registry.hpp"

namespace {

using rlk::harness::Promise;

void expect_good(const rlk::harness::Report& r) {
  for (std::size_t i = 0; i < r.failures.size() && i < 20; ++i) MESSAGE(r.failures[i].line());
  CHECK(r.failures.empty());
  CHECK_FALSE(r.entries.empty());
}

}  // namespace

TEST_CASE("every native implementation that this CPU can execute keeps its promises, and no other is tried") {
  // Every transform once on every implementation, however long it takes.
  const rlk::harness::Report r = rlk::harness::verify({.implementation = "native", .passes = 1});
  expect_good(r);
  std::set<std::string> entries;
  for (const auto& e : r.entries) {
    const std::string name = e.op + " " + e.implementation;
    entries.insert(name);
    CAPTURE(name);
    for (const Promise p : {Promise::accuracy, Promise::purity, Promise::batch_invariance})
      CHECK(e.promises[p].tried > 0);
  }
  for (const rlk::OpEntry& op : rlk::snapshot().ops)
    for (const rlk::ImplementationEntry& i : op.implementations) {
      if (i.backend->name != "native") continue;
      const std::string name = std::string(i.implementation->op) + " " + i.implementation->id;
      const bool runs = i.implementation->min_arch <= rlk_cpu_level();
      CAPTURE(name);
      CHECK(entries.count(name) == (runs ? 1 : 0));
      CHECK(std::any_of(r.cannot_run.begin(), r.cannot_run.end(), [&](const std::string& line) {
              return line.rfind(name + ": needs ", 0) == 0;
            }) == !runs);
    }
}
