// fp32 FMA chains in blocks of 256, with the best instruction set at hand: the bits of onednn.kb256, for who
// asks for them.
#include "lm_head_run.hpp"

namespace rlk::native {
namespace {

const ChainKernels* best() { return &chain_kernels_best(); }
using Forms = LmHeadChain<best, Chain::fma32_kb256>;

}  // namespace

extern const rlk_implementation lm_head_kb256, lm_head_bwd_kb256;
const rlk_implementation lm_head_kb256 = implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
    {.id = "native.kb256",
     .doc = "fp32 FMA chains in blocks of 256, any processor",
     .priority = 20,
     .arithmetic = "fma32/kb256",
     .dtypes = kLmHeadTypes,
     .traits = kPinned});
const rlk_implementation lm_head_bwd_kb256 =
    implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
        {.id = "native.kb256",
         .doc = "fp32 FMA chains in blocks of 256, any processor",
         .priority = 20,
         .arithmetic = "fma32/kb256",
         .dtypes = kLmHeadTypes,
         .traits = kPinned});

}  // namespace rlk::native
