// The seam between policy_loss's implementations on a GPU and their kernels, which different compilers build. A launch
// returns the error's text, or null.
#pragma once

#include "arithmetic/policy_loss/policy.hpp"

namespace rlk::simt::policy_loss {

using loss32::FactorProblem;
using loss32::PolicyProblem;
using loss32::Weighting;

std::int64_t workspace_of(const PolicyProblem& p);
const char* run_forward(const PolicyProblem& p, void* workspace, void* stream, int device);
const char* run_backward(const FactorProblem& p, void* stream, int device);
const char* run_reduce(const Weighting& w, const float* totals, std::int64_t sequences, float* loss,
                       float* metrics, void* stream, int device);

}  // namespace rlk::simt::policy_loss
