// lm_head on oneDNN. Rows are cut into fixed heights, columns into panels of 128, K into the rule's blocks;
// every product is one single-threaded primitive that reproduced its rule on this processor, so the bits do
// not depend on M, on a row's place, on the threads, or on whether the weight was packed before
// (lm_head_weight) or is read as it lies.
//
// The fp32 sums pass once through the cache on their way out: rounded, bias added, rounded again, NaN
// canonical (0x7fffffff, in 16 bits 0x7fff).
#pragma once

#include "onednn/rules.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::onednn {

rlk_verdict supports_forward(Rule rule, const LmHead& a, const rlk_request& request);
std::uint64_t workspace_forward(Rule rule, const LmHead& a, const rlk_request& request);
rlk_code run_forward(Rule rule, const LmHead& a, const Call& call);

// An implementation's functions.
template <Rule kRule>
struct Forward {
  static rlk_verdict supports(const LmHead& a, const rlk_request& r) { return supports_forward(kRule, a, r); }
  static std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
    return workspace_forward(kRule, a, r);
  }
  static rlk_code run(const LmHead& a, const Call& call) { return run_forward(kRule, a, call); }
};

}  // namespace rlk::onednn
