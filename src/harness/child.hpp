// Other processes: the same corpus there, under hostile environments, and implementations forced to run what
// their predicates refuse, which may kill them.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace rlk::harness {

struct ChildResult {
  bool started = false;
  int signal = 0, exit = 0;
  std::vector<std::string> lines;
};

// Runs `command` with the extra arguments and variables; gives up after `seconds`.
ChildResult run_child(const std::vector<std::string>& command, const std::vector<std::string>& arguments,
                      const std::vector<std::pair<std::string, std::string>>& environment, double seconds);

}  // namespace rlk::harness
