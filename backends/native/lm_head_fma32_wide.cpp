// fp32 FMA chains in blocks of 1024, 16 lanes over the columns
#include "lm_head_run.hpp"

namespace rlk::native {
namespace {

using Forms = LmHeadChain<chain_kernels_avx512, Chain::fma32>;
}  // namespace

extern const rlk_implementation lm_head_fma32_wide, lm_head_bwd_fma32_wide;
const rlk_implementation lm_head_fma32_wide =
    implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
        {.id = "native.avx512",
         .doc = "fp32 FMA chains in blocks of 1024, 16 lanes over the columns",
         .priority = 102,
         .arithmetic = "fma32/kb1024",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});
const rlk_implementation lm_head_bwd_fma32_wide =
    implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
        {.id = "native.avx512",
         .doc = "fp32 FMA chains in blocks of 1024, 16 lanes over the columns",
         .priority = 102,
         .arithmetic = "fma32/kb1024",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});

}  // namespace rlk::native
