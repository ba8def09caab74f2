// The seam between group_advantage's implementations on a GPU and their kernel, which different compilers build. A launch
// returns the error's text, or null.
#pragma once

#include "arithmetic/group_advantage/advantage.hpp"

namespace rlk::simt::group_advantage {

using loss32::GroupProblem;

const char* run(const GroupProblem& p, void* stream, int device);

}  // namespace rlk::simt::group_advantage
