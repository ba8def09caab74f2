// ascending fp64 FMA chain, one rounding
#include "lm_head_run.hpp"

namespace rlk::native {
namespace {
const ChainKernels* best() { return &chain_kernels_best(); }
using Forms = LmHeadChain<best, Chain::fma64>;
}  // namespace

extern const rlk_implementation lm_head_golden, lm_head_bwd_golden;
const rlk_implementation lm_head_golden = implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
    {.id = "native.golden",
     .doc = "ascending fp64 FMA chain, one rounding",
     .priority = 0,
     .arithmetic = "fma64",
     .dtypes = kLmHeadTypes,
     .traits = kPinned | RLK_GOLDEN});
const rlk_implementation lm_head_bwd_golden =
    implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
        {.id = "native.golden",
         .doc = "ascending fp64 FMA chain, one rounding",
         .priority = 0,
         .arithmetic = "fma64",
         .dtypes = kLmHeadTypes,
         .traits = kPinned | RLK_GOLDEN});

}  // namespace rlk::native
