// Proof of what implementations promise: the harness that the project's tests, the command line and anybody
// with a plugin of their own run.
//
//   rlk_register_backend(&my_backend, "my_test");
//   rlk::harness::Report r = rlk::harness::verify({.implementation = "mine"});
//   for (const auto& f : r.failures) fmt::print("{}\n", f.line());      // one line each, enough to reproduce
//   it
//
// It knows an op by its schema, reference, cases and bound only, and runs implementations as users do.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "rlk/status.hpp"

namespace rlk::harness {

// What to verify, and how long to spend on it.
struct Plan {
  std::string op = "*";          // name or glob
  std::string implementation{};  // id or backend; empty: every one
  std::string device = "cpu";    // "cpu", "cuda", "hip"
  std::string case_name{};       // exactly this case; empty: the op's own choice
  std::string transform{};       // only this one
  uint64_t seed = 1;             // of all data; a failure's line names it
  double budget = 0;     // seconds; 0: everything. Less picks a covering subset and reports what it was
  bool children = true;  // try in a child process what implementations refuse
  // A command that ends in child_main(): the fixed corpus is run again in other processes, also under hostile
  // environments. Empty: reported as not covered.
  std::vector<std::string> child{};
  std::function<void(double done, const std::string& what)> progress{};
  const std::atomic<bool>* stop = nullptr;  // set it to end early with a valid, partial report
};

// One broken promise.
struct Failure {
  std::string promise;  // "batch invariance", "accuracy", "equal bits", "purity", "strict", "predicate"
  std::string op, implementation, device, dtype, case_name, shape, transform;
  uint64_t seed = 0;
  std::string result;              // argument that differs, when one does
  int64_t index = -1;              // its first mismatching element
  uint64_t expected = 0, got = 0;  // bit patterns
  int bits = 0;                    // their width; 0: no bit patterns to show
  std::string text;
  RLK_API std::string line() const;     // all of it
  RLK_API std::string command() const;  // what shows it again
};

struct Tally {
  int64_t tried = 0, failed = 0, refused = 0;
  bool promised = true;  // false: the implementation does not claim it; differences are counted, not failures
};

// Distance from the reference of one result, over all cases.
struct Accuracy {
  std::string result, dtype, metric;
  double bound = 0, worst = 0, p999 = 0;  // in the bound's metric
  double share_exact = 0;                 // elements at 0 ulp
  double worst_ulps = 0;
  int64_t elements = 0;
  std::array<int64_t, 16> ulps{};                       // 0, 1, 2, 3-4, 5-8, ... per power of two
  std::vector<std::pair<int64_t, double>> over_length;  // worst error by reduction length
};

// How an implementation adds, recovered from its outputs.
struct Order {
  std::string argument, result, shape;                // what was summed; "ascending chain", "tree"
  std::vector<std::pair<int64_t, uint64_t>> by_rows;  // hash of the summation tree for each M
  bool equal = true;
};

// One (op, implementation, dtype): a line of the certificate.
struct Entry {
  std::string op, implementation, backend, arithmetic, dtype;
  std::string backend_build, device_name, versions;
  std::map<std::string, Tally> promises;
  std::map<std::string, int64_t> covered;  // transforms by dimension
  std::vector<Accuracy> accuracy;
  std::vector<Order> orders;
  std::map<std::string, std::string> corpus;  // hashes of outputs on the fixed corpus, by case
  std::vector<std::string> over_refused;      // refused, yet right when forced
  RLK_API bool good() const;
};

struct Report {
  std::vector<Entry> entries;
  std::vector<Failure> failures;
  std::vector<std::string> not_covered;  // and why
  bool complete = true;                  // false: stopped or out of budget
  double seconds = 0;
  uint64_t seed = 1;
  double budget = 0;
  explicit operator bool() const { return failures.empty(); }
};

RLK_API Report verify(const Plan& plan);

// The certificate of a report as JSON; `mutants` are the names of deliberate errors this build's tests
// caught.
RLK_API std::string certificate(const Report& report, const std::vector<std::string>& mutants = {});

// What such a command does: call this first in main; a result >= 0 is the exit code.
RLK_API int child_main(int argc, char** argv);
inline constexpr const char* kChildFlag = "--harness-child";

}  // namespace rlk::harness
