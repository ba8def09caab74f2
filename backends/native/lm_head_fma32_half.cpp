// fp32 FMA chains in blocks of 1024, 8 lanes over the columns
#include "lm_head_run.hpp"

namespace rlk::native {
namespace {

using Forms = LmHeadChain<chain_kernels_avx2, Chain::fma32>;
}  // namespace

extern const rlk_implementation lm_head_fma32_half, lm_head_bwd_fma32_half;
const rlk_implementation lm_head_fma32_half =
    implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
        {.id = "native.avx2",
         .doc = "fp32 FMA chains in blocks of 1024, 8 lanes over the columns",
         .priority = 101,
         .arithmetic = "fma32/kb1024",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});
const rlk_implementation lm_head_bwd_fma32_half =
    implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
        {.id = "native.avx2",
         .doc = "fp32 FMA chains in blocks of 1024, 8 lanes over the columns",
         .priority = 101,
         .arithmetic = "fma32/kb1024",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});

}  // namespace rlk::native
