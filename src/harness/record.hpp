// What an examination finds, event by event. In a child process each event is also written as a line, which
// the parent replays into a record of its own: what was found before a crash is not lost.
#pragma once

#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "rlk/harness.hpp"
#include "src/harness/problem.hpp"

namespace rlk::harness {

// One call of an implementation, or a few that belong together.
struct Step {
  enum Kind : int {
    judged,  // counts, and is not done again
    base,    // what later steps are compared with: done again after a crash behind it
    forced,  // past the implementation's own refusal: how it ends is nobody's fault
    ours     // the harness's own work
  };
  int64_t number = 0;
  Kind kind = ours;
  std::string case_name, shape, transform;
  double patience = 0;  // seconds it may take; 0: as long as it likes
};

// Where an examination goes on after its process died.
struct Resume {
  int64_t from = 0;        // steps before it are done
  std::set<int64_t> dead;  // steps that killed a process
};

// A failure of this target, with no case yet.
Failure failure_of(const Entry& target, const Plan& plan, Promise promise, std::string text);

class Record {
 public:
  // False: this step is not to be done (again).
  bool begin(const Problem& p, std::string transform, Step::Kind kind, double patience);
  // The harness works by itself until the next step: nobody's patience runs.
  void begin_ours(const Problem& p);

  void tried(Promise p, int64_t n = 1);
  void refused(Promise p);
  void unpromised(Promise p, const std::string& why);  // nothing can break it here
  void untried(Promise p, const std::string& why);     // if it never is
  void fail(const Failure& f);
  void covered(const std::string& dimension);
  void size(const std::string& dimension, const std::vector<int64_t>& extent);
  void accuracy(const Accuracy& of_one_case);
  void order(const Order& o);
  void corpus(const std::string& case_name, const std::string& hash);
  void default_for(const std::string& case_name);
  void over_refused(const std::string& text);
  void note(const std::string& text);  // something that was not covered
  void transform_known(const std::string& name);
  void complete();  // the first pass is done
  void finish();

  // What a line of a child means; false: it is none of ours.
  bool replay(std::string_view line);

  Entry entry;
  std::vector<Failure> failures;
  std::vector<std::string> notes;
  bool finished = false, knows_transform = false;
  Step now;
  Resume resume;
  std::FILE* mirror = nullptr;

 private:
  enum class Event : int;
  template <class... T>
  void tell(Event e, const T&... values);
  void announce();
};

}  // namespace rlk::harness
