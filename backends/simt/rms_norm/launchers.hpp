// The seam between rms_norm's implementations on a GPU and their kernels, which different compilers build. A launch returns
// the error's text, or null.
#pragma once

#include "arithmetic/rms_norm/norm.hpp"

namespace rlk::simt::rms_norm {

using rms32::Problem;

std::int64_t backward_workspace(const Problem& p);
const char* run_forward(const Problem& p, void* stream, int device);
const char* run_backward(const Problem& p, void* workspace, void* stream, int device);

}  // namespace rlk::simt::rms_norm
