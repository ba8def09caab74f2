// Deliberate errors, some for every class of them. The harness must catch each, and the honest controls must
// pass.
#pragma once

#include <span>
#include <vector>

#include "rlk/plugin.h"

namespace rlk::mutants {

struct Mutant {
  const char* id;
  const char* promise;  // that it breaks, as Failure::promise says
  const char* error;    // what is wrong with it
  const char* op = "lm_head";
  const char* where = nullptr;      // a case that shows it; null: whichever the test takes
  const char* transform = nullptr;  // shows on all of the op's cases with this transform alone
};
std::span<const Mutant> all();
// Of breaks.cpp and the files that it collects: part of all().
std::vector<const rlk_implementation*> broken_implementations();
std::vector<Mutant> broken();
extern const rlk_backend backend;

}  // namespace rlk::mutants
