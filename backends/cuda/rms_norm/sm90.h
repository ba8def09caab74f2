// The seam between cuda.sm90's gradients of rms_norm and their kernels. A launch returns the error's text, or null.
#pragma once

#include "simt/rms_norm/launchers.hpp"

namespace rlk::cuda::rms_norm {

using rms32::Problem;

// Whether these kernels have the call.
bool suits(const Problem& p);
// `workspace`: simt::rms_norm::backward_workspace.
const char* run_gradients(const Problem& p, void* workspace, void* stream, int device);

}  // namespace rlk::cuda::rms_norm
