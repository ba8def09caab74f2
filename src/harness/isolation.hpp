// Trials in processes of their own: what is tested there may crash, hang or exit, and is blamed for it; what
// was found before is kept, and the next process goes on behind it.
#pragma once

#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "src/harness/child.hpp"
#include "src/harness/record.hpp"
#include "src/harness/target.hpp"

namespace rlk::harness {

// The trials of targets of one op and dtype, `seconds` each, one after another in one process, which computes what they
// are judged by once. How many were tried: the command has no implementation of the next one, or does not end in
// child_main().
std::size_t try_in_children(const Plan& plan, std::span<Target* const> targets, double seconds,
                            std::span<Record> records);

// promises/repeats.cpp: the first cases of each target of one backend again in another process, under the
// variables. `found` gets a failure or a count of each comparison, one at a time.
struct Elsewhere {
  std::string transform;  // "another process", "OMP_NUM_THREADS=3"
  Variables variables;
};
std::vector<Elsewhere> surroundings(const Plan& plan);
// The hostile variables one by one: for what refuses strict calls under some of them, which is its right.
std::vector<Elsewhere> each_hostile();
void compare_elsewhere(const Plan& plan, const Elsewhere& where, const std::vector<Target*>& of_one_backend,
                       std::mutex& mutex, std::vector<Failure>& failures,
                       std::vector<std::string>& not_covered);
// The child's side of it.
int print_corpus(const Plan& plan, const std::string& backend, const std::vector<std::string>& dead,
                 std::FILE* lines);

// Words that tell a child the plan: "seed=1" and so on, and the plugins that this process has loaded.
std::vector<std::string> words_for(const Plan& plan);

}  // namespace rlk::harness
