// The seam between short_conv's implementations on a GPU and their kernels, which different compilers build. A launch returns
// the error's text, or null.
#pragma once

#include "arithmetic/short_conv/conv.hpp"

namespace rlk::simt::short_conv {

using conv32::Problem;

std::int64_t backward_workspace(const Problem& p);
const char* run_forward(const Problem& p, void* stream, int device);
const char* run_backward(const Problem& p, void* workspace, void* stream, int device);

}  // namespace rlk::simt::short_conv
