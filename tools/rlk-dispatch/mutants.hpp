// --mutants: the harness must be able to fail.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "options.hpp"

namespace rlk::cli {

// What the harness of this very program made of a plugin of deliberate errors.
struct Mutants {
  std::vector<std::string> caught, missed, blamed;  // blamed: controls, in which nothing is wrong
  bool good() const { return missed.empty() && blamed.empty(); }
};
// Nothing when no plugin is named.
Mutants try_mutants(const Options& options);

extern std::atomic<bool> stop;  // Ctrl-C
void show_progress(double done, const std::string& what);

}  // namespace rlk::cli
