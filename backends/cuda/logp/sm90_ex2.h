// The seam between cuda.sm90_ex2 and its kernels. A launch returns the error's text, or null.
#pragma once

#include "simt/logp/launchers.hpp"

namespace rlk::cuda::logp {

using lse128::Problem;

// `states`: simt::logp::states_bytes of the workspace. The sums of the leaves, and the gradient from them or from p's stats.
const char* run_sums(const Problem& p, void* states, void* stream, int device);
const char* run_gradients(const Problem& p, void* states, void* stream, int device);

}  // namespace rlk::cuda::logp
