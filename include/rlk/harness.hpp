// Proof of what implementations promise: the harness that the project's tests, the command line and anybody
// with a plugin of their own run.
//
//   rlk_register_backend(&my_backend, "my_test");
//   rlk::harness::Report r = rlk::harness::verify({.implementation = "mine"});
//   for (const auto& f : r.failures) fmt::print("{}\n", f.line());  // one line each, enough to reproduce it
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

// What implementations promise, and what the harness therefore tries.
enum class Promise {
  accuracy,          // every result is as close to the truth as its op's bound says
  equal_bits,        // the bits that the declared arithmetic id means
  purity,            // only results are written, and nothing beside them
  batch_invariance,  // a row's bits depend on nothing around it
  repeats,           // equal bits from run to run and from process to process
  strict,            // immune to the environment and to the caller's floating-point mode
  predicate,         // what supports() accepts runs
  returns            // a call comes back: no crash, no hang, no exit
};
inline constexpr std::array kPromises{Promise::accuracy,         Promise::equal_bits, Promise::purity,
                                      Promise::batch_invariance, Promise::repeats,    Promise::strict,
                                      Promise::predicate,        Promise::returns};
RLK_API const char* name_of(Promise p);  // "batch invariance"

// What to verify, and how long to spend on it.
struct Plan {
  std::string op = "*";          // name or glob
  std::string implementation{};  // id or backend; empty: every one
  std::string device = "cpu";    // "cpu", "cuda", "hip"
  std::string case_name{};       // exactly this case; empty: the op's own choice
  std::string transform{};       // only this one
  uint64_t seed = 1;             // of all data; a failure's line names it
  // How often each transform comes, each time on another case. 0: what four passes try, large cases, and the long
  // lists of transforms on three further cases each; everything on a case or of a transform that is named. A case that
  // is named counts whatever its size. 0 is kNormal for code of a lesser instruction set beside its like of this
  // processor's own, unless something is named: where it is this processor's (or RLK_CPU's) own it gets all.
  int passes = 0;
  static constexpr int kNormal = 4;
  // Seconds; 0: no clock. It decides how much is covered: with a clock passes go on until it ends, and a
  // report whose first pass it cut short is not complete.
  double budget = 0;
  // Seconds one call may take beside a hundred times what the reference needed; then it counts as hanging.
  double patience = 60;
  // A command that ends in child_main(): there each implementation is tried in a process of its own, which
  // may crash, hang or exit, and again under hostile environments. Empty: everything runs in this process,
  // and other processes are reported as not covered. So does what only this process registered: a backend
  // that the command neither has nor can load from a file.
  std::vector<std::string> child{};
  std::function<void(double done, const std::string& what)> progress{};
  const std::atomic<bool>* stop = nullptr;  // set it to end early with a valid, partial report
};

// One broken promise.
struct Failure {
  Promise promise = Promise::accuracy;
  std::string op, implementation, level, device, dtype, case_name, shape, transform;
  uint64_t seed = 0;
  std::string result;              // argument that differs, when one does
  int64_t index = -1;              // its first mismatching element
  uint64_t expected = 0, got = 0;  // bit patterns
  int bits = 0;                    // their width; 0: no bit patterns to show
  std::string text;
  bool beside_others = false;           // shows only where the op's other implementations run too
  RLK_API std::string line() const;     // all of it
  RLK_API std::string command() const;  // what shows it again
};

struct Tally {
  int64_t tried = 0, failed = 0, refused = 0;
  bool promised = true;  // false: the implementation does not claim it; differences are counted, not failures
  std::string why{};     // it is not promised, or could not be tried
};
class Tallies {
 public:
  Tally& operator[](Promise p) { return all_[static_cast<std::size_t>(p)]; }
  const Tally& operator[](Promise p) const { return all_[static_cast<std::size_t>(p)]; }

 private:
  std::array<Tally, kPromises.size()> all_{};
};

// Distance from the reference of one result, over all cases.
struct Accuracy {
  std::string result, dtype, metric;
  double bound = 0, bound_ulps = 0, bound_absolute = 0;  // as the op's bound says
  double worst = 0;                                      // in the bound's metric
  double p999 = 0;         // of each case, 99.9% of the elements are within this
  double share_exact = 0;  // elements at 0 ulp
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

// One (op, implementation, dtype, instruction set): a line of the certificate.
struct Entry {
  std::string op, implementation, backend, arithmetic, dtype;
  std::string level;  // the instruction set that ran: "avx2"; empty on a GPU
  std::string backend_build, device_name, versions;
  Tallies promises;
  std::map<std::string, int64_t> covered;             // transforms by dimension
  std::map<std::string, std::vector<int64_t>> sizes;  // largest tried by dimension; see sizes.hpp
  std::vector<Accuracy> accuracy;
  std::vector<Order> orders;
  std::map<std::string, std::string> corpus;  // hashes of outputs on the fixed corpus, by case
  std::vector<std::string> default_for;       // cases for which dispatch would choose it here
  std::vector<std::string> over_refused;      // refused, yet right when forced
  bool complete = false;                      // every case, and every transform at least once
  // Promised, yet never tried.
  RLK_API std::vector<Promise> uncovered() const;
  // Complete, everything promised was tried, and nothing failed.
  RLK_API bool good() const;
};

struct Report {
  std::vector<Entry> entries;
  std::vector<Failure> failures;
  std::vector<std::string> not_covered;  // beside the entries' own, and why
  std::vector<std::string> cannot_run;   // on this machine, and what they need
  std::vector<std::string> missing;      // ops, or their backwards, that have no implementation at all
  std::string error;                     // the plan names a case or a transform that does not exist
  bool complete = true;                  // false: stopped or out of budget
  bool restricted = false;               // to one case or transform: a look, not a proof
  double seconds = 0;
  uint64_t seed = 1;
  int passes = 0;
  double budget = 0;
  // Something was verified, whole, and every entry is good.
  RLK_API bool good() const;
  explicit operator bool() const { return good(); }
};

RLK_API Report verify(const Plan& plan);

// The certificate of a report as JSON; `mutants` are the names of deliberate errors this build's tests
// caught.
RLK_API std::string certificate(const Report& report, const std::vector<std::string>& mutants = {});

// Whether a text is a certificate of this version, unchanged since it was written, of a whole run in which
// everything that was promised was tried, and kept: all of it judged by its contents, not by what it says of
// itself. The refusal says which of these fails.
RLK_API Status check_certificate(const std::string& text);

// What such a command does: call this first in main; a result >= 0 is the exit code.
RLK_API int child_main(int argc, char** argv);
inline constexpr const char* kChildFlag = "--harness-child";

}  // namespace rlk::harness
