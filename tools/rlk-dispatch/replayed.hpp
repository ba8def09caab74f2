// A whole call of any op, computed again from a dump of it.
#pragma once

#include <string>

#include "dump.hpp"

namespace rlk::cli {

// Prints what was found; returns the exit code.
int against_call(const std::string& op, const Dump& dump, bool json);

}  // namespace rlk::cli
