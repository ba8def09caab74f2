// The bits that an arithmetic id prescribes, whoever declares it and whatever its priority: from the rule
// that the op's folder writes out, else from the built-in implementation that carries the id.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "src/harness/execute.hpp"

namespace rlk::harness {

struct Ruled {
  std::string by;        // "the written rule", or the id of the built-in implementation that stands for it
  bool written = false;  // the former
  Outcome outcome;       // results as execute() gives them: dense, and of a sampled problem its sample
  const rlk_implementation* called = nullptr;  // what stands for the rule
};

// Nothing when the library knows no rule for this id, or not for these dtypes.
std::optional<Ruled> by_rule(const Problem& p, std::string_view arithmetic);

// The fp64 truth of a sampled problem from the op's written rule; nothing where it has none.
std::optional<Outcome> sampled_truth(const Problem& p);

}  // namespace rlk::harness
