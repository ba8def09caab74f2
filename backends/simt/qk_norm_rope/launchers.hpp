// The seam between qk_norm_rope's implementation on a GPU and its kernel, which different compilers build. A launch returns the
// error's text, or null.
#pragma once

#include "arithmetic/qk_norm_rope/problem.hpp"

namespace rlk::simt::qk_norm_rope {

using rms32_rope32::Problem;

const char* run_forward(const Problem& p, void* stream, int device);

}  // namespace rlk::simt::qk_norm_rope
