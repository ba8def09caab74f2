// The seam between embedding's implementations on a GPU and their kernels, which different compilers build. A launch returns
// the error's text, or null.
#pragma once

#include "arithmetic/embedding/gather.hpp"

namespace rlk::simt::embedding {

using embed32::Problem;

std::int64_t backward_workspace(std::int64_t tokens, std::int64_t vocab);
const char* run_forward(const Problem& p, void* stream, int device);
const char* run_backward(const Problem& p, void* workspace, void* stream, int device);

}  // namespace rlk::simt::embedding
