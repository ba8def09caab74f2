// The seam between what is done by the special function units' exponential (sm90/ex2/lse2048/l8) and its kernels. A launch
// returns the error's text, or null.
#pragma once

#include "simt/logp/launchers.hpp"

namespace rlk::cuda::logp {

using lse128::Matrix;
using lse128::Problem;
using lse128::State;
using simt::logp::Panel;

// As simt::logp::run_fold, of whole tiles of 2048: the sums of the panel's leaf, or of all `leaves` of the call where the panel
// has the whole row. `targets` may be null, and is where leaves are several.
const char* run_fold(const Problem& p, const Panel& panel, int leaves, State* states, float* targets,
                     void* stream, int device);
// As simt::logp::run_gradient, from states or from p's stats.
const char* run_gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                         const State* states, void* stream, int device);

}  // namespace rlk::cuda::logp
