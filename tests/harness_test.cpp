// labels: conformance
// The harness on the native backend: everything it promises holds.
#include "rlk/harness.hpp"

#include <doctest/doctest.h>
#include <fnmatch.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>

#include "src/registry.hpp"

namespace {

using rlk::harness::Promise;

// Every op is of one family at most.
constexpr const char* kFamilies[] = {
    "lm_head",    "lm_head_bwd", "kda_fwd",      "kda_bwd", "kda_[dg]*", "rope*",         "linear",
    "linear_bwd", "logp*",       "linear_logp*", "sample*", "attention", "attention_bwd", "attention_[pm]*"};

void expect_good(const rlk::harness::Report& r) {
  for (std::size_t i = 0; i < r.failures.size() && i < 20; ++i) MESSAGE(r.failures[i].line());
  CHECK(r.failures.empty());
  CHECK_FALSE(r.entries.empty());
}

// Every transform once on every implementation of some ops, however long it takes.
void verify_native(const char* ops) {
  const rlk::harness::Report r = rlk::harness::verify({.op = ops, .implementation = "native", .passes = 1});
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
      if (i.backend->name != "native" || fnmatch(ops, i.implementation->op, 0) != 0) continue;
      const std::string name = std::string(i.implementation->op) + " " + i.implementation->id;
      const bool runs = i.implementation->min_arch <= rlk_cpu_level();
      CAPTURE(name);
      CHECK(entries.count(name) == (runs ? 1 : 0));
      CHECK(std::any_of(r.cannot_run.begin(), r.cannot_run.end(), [&](const std::string& line) {
              return line.rfind(name + ": needs ", 0) == 0;
            }) == !runs);
    }
}

}  // namespace

// What this CPU can execute keeps its promises, and nothing else is tried. A case for each family: they run side
// by side.
TEST_CASE("every native implementation of lm_head keeps its promises") { verify_native("lm_head"); }
TEST_CASE("every native implementation of lm_head_bwd keeps its promises") { verify_native("lm_head_bwd"); }
TEST_CASE("every native implementation of kda_fwd keeps its promises") { verify_native("kda_fwd"); }
TEST_CASE("every native implementation of kda_bwd keeps its promises") { verify_native("kda_bwd"); }
TEST_CASE("every native implementation of kda's other ops keeps its promises") { verify_native("kda_[dg]*"); }
TEST_CASE("every native implementation of rope keeps its promises") { verify_native("rope*"); }
TEST_CASE("every native implementation of linear keeps its promises") { verify_native("linear"); }
TEST_CASE("every native implementation of linear_bwd keeps its promises") { verify_native("linear_bwd"); }
TEST_CASE("every native implementation of log-probabilities keeps its promises") { verify_native("logp*"); }
TEST_CASE("every native implementation of linear_logp keeps its promises") { verify_native("linear_logp*"); }
TEST_CASE("every native implementation of sample keeps its promises") { verify_native("sample*"); }
TEST_CASE("every native implementation of attention keeps its promises") { verify_native("attention"); }
TEST_CASE("every native implementation of attention_bwd keeps its promises") {
  verify_native("attention_bwd");
}
TEST_CASE("every native implementation of attention's parts keeps its promises") {
  verify_native("attention_[pm]*");
}

TEST_CASE("no op is of two families") {
  for (const rlk::OpEntry& op : rlk::snapshot().ops)
    CHECK(std::count_if(std::begin(kFamilies), std::end(kFamilies),
                        [&](const char* family) { return fnmatch(family, op.schema->name, 0) == 0; }) <= 1);
}

TEST_CASE("every native implementation of every other op keeps its promises") {
  for (const rlk::OpEntry& op : rlk::snapshot().ops) {
    const char* name = op.schema->name;
    const auto native = [](const rlk::ImplementationEntry& i) { return i.backend->name == "native"; };
    if (std::none_of(op.implementations.begin(), op.implementations.end(), native)) continue;
    if (std::none_of(std::begin(kFamilies), std::end(kFamilies),
                     [&](const char* family) { return fnmatch(family, name, 0) == 0; }))
      verify_native(name);
  }
}
