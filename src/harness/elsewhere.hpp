// The first calls of each target again in other processes, of which some are hostile: each is an Elsewhere of the
// promise that it tries.
#pragma once

#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "src/harness/child.hpp"
#include "src/harness/target.hpp"

namespace rlk::harness {

struct Elsewhere {
  std::string transform;  // "another process", "OMP_NUM_THREADS=3"
  Variables variables;
  Promise promise;
};
// Every process that a plan wants.
std::vector<Elsewhere> all_elsewhere(const Plan& plan);

// Compares the targets of one backend with themselves there. `failures` and `not_covered` are the mutex's.
void compare_elsewhere(const Plan& plan, const Elsewhere& where, const std::vector<Target*>& of_one_backend,
                       std::mutex& mutex, std::vector<Failure>& failures,
                       std::vector<std::string>& not_covered);
// The child's side of it.
int print_corpus(const Plan& plan, const std::string& backend, const std::vector<std::string>& dead,
                 std::FILE* lines);

}  // namespace rlk::harness
