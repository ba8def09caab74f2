// The seam between ratio_kl's implementations on a GPU and their kernels, which different compilers build. A launch returns
// the error's text, or null.
#pragma once

#include "arithmetic/ratio_kl/ratio_kl.hpp"

namespace rlk::simt::ratio_kl {

using loss32::RatioProblem;

const char* run_forward(const RatioProblem& p, void* stream, int device);
const char* run_backward(const RatioProblem& p, void* stream, int device);

}  // namespace rlk::simt::ratio_kl
