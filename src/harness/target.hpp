// What is verified: one implementation with one dtype, on one instruction set.
#pragma once

#include <string>
#include <vector>

#include "rlk/harness.hpp"
#include "src/harness/execute.hpp"

namespace rlk::harness {

struct Target {
  Subject subject;
  DType dtype = DType::none;
  Entry entry;          // as it starts: who it is and what it promises
  bool lesser = false;  // beside others that vouch for most of it
};

struct Chosen {
  std::vector<Target> targets;
  std::vector<std::string> not_covered, cannot_run, missing;  // as in Report
  std::string error;                                          // likewise
};

// All that a plan means on this machine.
Chosen choose(const Plan& plan);

// What a plan means for a target.
Plan plan_for(const Plan& plan, const Target& target);

// Exactly one: of this process' backends; nothing when it has no such implementation.
struct Identity {
  std::string op, implementation, dtype, device;
};
std::vector<Target> find(const Identity& wanted);

// Case names end in this where results are asked for in fp32 instead.
inline constexpr std::string_view kWide = " [fp32 results]";
// A case's name without it.
std::string plain_name(const std::string& case_name);

}  // namespace rlk::harness
