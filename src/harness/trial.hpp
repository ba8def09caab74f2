// One target on trial in this process: what the files of the promises share.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "src/harness/compare.hpp"
#include "src/harness/execute.hpp"
#include "src/harness/record.hpp"
#include "src/harness/references.hpp"
#include "src/harness/target.hpp"
#include "src/harness/transforms.hpp"

namespace rlk::harness {

// Which transforms of a problem have their turn: every stride-th from the phase-th on, of the long lists if `wide`.
struct Turn {
  std::size_t stride = 1, phase = 0;
  bool wide = false;
};

class Trial {
 public:
  Trial(const Target& target, const Plan& plan, double seconds, bool isolated, References& references,
        Record& record);

  // All of it: accuracy, equal bits and order of every case, then the transforms, then what it refused.
  void run();

  const Plan& plan() const { return plan_; }
  const Subject& subject() const { return target_.subject; }
  const Entry& identity() const { return target_.entry; }
  DType dtype() const { return target_.dtype; }
  Record& record() { return record_; }
  bool going() const;
  // Only what belongs to one transform is wanted.
  bool wants(const std::string& transform) const {
    return plan_.transform.empty() || plan_.transform == transform;
  }
  bool thorough() const { return (plan_.passes == 0 && plan_.budget == 0) || !plan_.transform.empty(); }
  // Nothing of what was named is left out.
  bool wants_all() const { return thorough() && (!plan_.case_name.empty() || !plan_.transform.empty()); }

  // Seconds a call may take that does `times` the work of this problem.
  double patience(const Problem& p, double times = 1) const;
  References& references() { return references_; }
  registry::Bound bound_of(const Problem& p, const char* result, DType dtype) const;
  // Bounds are for the ops' own data. What is derived from them may lose more: there a result may be a few times as far
  // from what the truth is when its inputs' last places change.
  bool near_truth(const Problem& p, std::size_t result, const registry::Bound& bound, const Array& got);
  // Whether the truth of a result is nothing beside the call's other results, and the result is too.
  bool is_nothing(const Problem& p, std::size_t result, const registry::Bound& bound, const Array& got);

  void fail(Promise promise, const Problem& p, const std::string& transform, const std::string& result,
            const Difference* where, std::string text);
  // What the plain call of this problem gave; null where it is not kept.
  const Outcome* outcome_of(const Problem& p) const;
  // A call came back: memory kept its promises and it ended as expected. False: nothing to compare.
  bool healthy(const Problem& p, const std::string& transform, const Outcome& out);
  void count_sizes(const Problem& p);

 private:
  struct Item {
    registry::Case given;
    std::shared_ptr<const Problem> problem{};
    bool invalid = false;  // the reference refuses it
    bool alone = false;    // the call itself is all
  };
  const Problem* problem_of(Item& item);
  void collect();
  void derive();
  void look_at(Item& item);
  void leave_out(Item& item);
  void forget(Item& item);
  double peak_of(const Problem& p, std::size_t result, const Array& right);
  double nothing_of(const Problem& p, const registry::Bound& bound);
  bool overflows(const Problem& p);
  void call_and_judge(const Problem& p);
  void again();
  void transforms();
  void vary_item(Item& item, std::size_t place, const Turn& turn);

  const Target& target_;
  const Plan& plan_;
  References& references_;
  Record& record_;
  const bool isolated_;
  const std::chrono::steady_clock::time_point start_;
  const double seconds_;
  std::vector<Item> items_;
  std::vector<std::pair<Problem, std::string>> refusals_;
  std::map<std::string, Outcome> outcomes_;  // by case and shapes
};

// vary.cpp: the transforms of a problem that have their turn, each judged by the promise it tries. False when the target
// does not take the problem.
bool vary(Trial& t, const Problem& p, const Turn& turn);

// Small problems of the target, the same in every process, one after another: at most `count`, and until told to stop.
void first_problems(const Target& target, const Plan& plan, std::size_t count,
                    const std::function<bool(const Problem&)>& goes_on);

uint64_t hash_of(const Outcome& out);

}  // namespace rlk::harness
