// fp32 FMA chains in blocks of 1024, any processor
#include "lm_head_run.hpp"

namespace rlk::native {
namespace {
const ChainKernels* scalar() { return &chain_kernels_scalar(); }
using Forms = LmHeadChain<scalar, Chain::fma32>;
}  // namespace

extern const rlk_implementation lm_head_fma32_scalar, lm_head_bwd_fma32_scalar;
const rlk_implementation lm_head_fma32_scalar =
    implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
        {.id = "native.scalar",
         .doc = "fp32 FMA chains in blocks of 1024, any processor",
         .priority = 100,
         .arithmetic = "fma32/kb1024",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});
const rlk_implementation lm_head_bwd_fma32_scalar =
    implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
        {.id = "native.scalar",
         .doc = "fp32 FMA chains in blocks of 1024, any processor",
         .priority = 100,
         .arithmetic = "fma32/kb1024",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});

}  // namespace rlk::native
