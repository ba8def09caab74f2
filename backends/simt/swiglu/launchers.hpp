// The seam between swiglu's implementations on a GPU and their kernels, which different compilers build. A launch returns
// the error's text, or null.
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"

namespace rlk::simt::swiglu {

using act32::Problem;

const char* run_forward(const Problem& p, void* stream, int device);
const char* run_backward(const Problem& p, void* stream, int device);

}  // namespace rlk::simt::swiglu
