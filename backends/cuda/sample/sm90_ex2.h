// The seam between cuda.sm90_ex2 of sample and its kernels. A launch returns the error's text, or null.
#pragma once

#include "cuda/sample/run.hpp"

namespace rlk::cuda::sample {

const char* run_note(const Problem& p, const Sums& sums, void* stream, int device);
const char* run_finish(const Problem& p, const Sums& sums, void* stream, int device);

}  // namespace rlk::cuda::sample
