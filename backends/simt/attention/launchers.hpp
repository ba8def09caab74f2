// The seam between attention's implementations on a GPU and their kernels, which different compilers build. A launch returns
// the error's text, or null.
#pragma once

#include "arithmetic/attention/backward.hpp"

namespace rlk::simt::attention {

using attn128::Backward;
using attn128::Merge;
using attn128::Problem;

inline constexpr std::int64_t kMostSplits = 65535;  // blocks across

std::int64_t forward_workspace(const Problem& p);
const char* run_forward(const Problem& p, void* workspace, void* stream, int device);

const char* run_part(const Problem& p, void* stream, int device);
const char* run_merge(const Merge& g, void* stream, int device);

std::int64_t backward_workspace(const Backward& g);
const char* run_backward(const Backward& g, void* workspace, void* stream, int device);

}  // namespace rlk::simt::attention
