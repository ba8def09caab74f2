// Evidence: certificates that `rlk-dispatch --verify --certificate FILE` wrote, as a condition of dispatch.
//
//   rlk::check(rlk::load_evidence("/etc/rlk/this_machine.json"));
//   rlk::lm_head(args, {.evidence = true});      // only what a certificate for this build and device covers
#pragma once

#include <string>

#include "rlk/status.hpp"

namespace rlk {

// Reads a certificate: whole, unchanged, and good by its own contents, or it is refused with the reason. Its
// entries count for the very same build of library and backend, on a device or processor of the same model
// with the same instruction set and the same driver and library versions, up to the sizes that were tried; a
// resolution says which of these is missing.
RLK_API Status load_evidence(const std::string& path);
// Forgets all that was loaded.
RLK_API void clear_evidence();

}  // namespace rlk
