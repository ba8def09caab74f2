// Evidence: certificates that `rlk-dispatch --verify --certificate FILE` wrote, as a condition of dispatch.
//
//   rlk::check(rlk::load_evidence("/etc/rlk/this_machine.json"));
//   rlk::lm_head(args, {.evidence = true});      // only what a certificate for this build and device covers
#pragma once

#include <string>

#include "rlk/status.hpp"

namespace rlk {

// Reads a certificate. Its entries count for implementations of the very same build of library and backend,
// on a device of the same name with the same driver and library versions; others are kept and never match.
RLK_API Status load_evidence(const std::string& path);
// Forgets all that was loaded.
RLK_API void clear_evidence();

}  // namespace rlk
