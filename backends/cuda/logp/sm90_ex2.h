// The seam between cuda.sm90_ex2 and its kernels. A launch returns the error's text, or null.
#pragma once

#include "simt/logp/launchers.hpp"

namespace rlk::cuda::logp {

using lse128::Problem;

// `states`: simt::logp::states_bytes of the workspace.
const char* run_forward(const Problem& p, void* states, void* stream, int device);
const char* run_backward(const Problem& p, void* states, void* stream, int device);

}  // namespace rlk::cuda::logp
