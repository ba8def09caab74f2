// Deliberate errors, one per promise. The harness must catch each, and the honest control must pass.
#pragma once

#include <span>

#include "rlk/plugin.h"

namespace rlk::mutants {

struct Mutant {
  const char* id;
  const char* promise;  // that it breaks, as Failure::promise says
  const char* error;    // what is wrong with it
  const char* op = "lm_head";
};
std::span<const Mutant> all();
extern const rlk_backend backend;

}  // namespace rlk::mutants
