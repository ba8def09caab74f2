// The seam between sample's implementations on a GPU and their kernels, which different compilers build. A launch returns the
// error's text, or null.
#pragma once

#include "arithmetic/sample/sample.hpp"

namespace rlk::simt::sample {

using sampling::Problem;

using sampling::MergeProblem;

std::int64_t workspace_bytes(const Problem& p);
const char* run(const Problem& p, void* workspace, void* stream, int device);
const char* run_part(const Problem& p, void* stream, int device);
const char* run_merge(const MergeProblem& p, void* stream, int device);

}  // namespace rlk::simt::sample
