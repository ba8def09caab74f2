// The seam between KDA's implementations on a GPU and their kernels, which different compilers build: sizes of
// workspaces, and launches on a stream of a device. A launch returns the error's text, or null.
#pragma once

#include "arithmetic/kda/problem.hpp"

namespace rlk::simt::kda {

using rlk::kda::Problem;
using rlk::kda::Step;

std::int64_t forward_workspace(const Problem& p);
std::int64_t backward_workspace(const Problem& p);
std::int64_t step_workspace(const Step& p);
std::int64_t gate_backward_workspace(const Problem& p);

const char* run_forward(const Problem& p, void* workspace, void* stream, int device);
const char* run_backward(const Problem& p, void* workspace, void* stream, int device);
const char* run_decode(const Problem& p, void* stream, int device);
const char* run_step(const Step& p, void* workspace, void* stream, int device);
const char* run_gate(const Problem& p, void* stream, int device);
const char* run_gate_backward(const Problem& p, void* workspace, void* stream, int device);

}  // namespace rlk::simt::kda
