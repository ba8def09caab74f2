// bf16 products on AMX.
#include "onednn/lm_head/forward.hpp"

namespace rlk::onednn {

extern const rlk_implementation lm_head_bf16;
const rlk_implementation lm_head_bf16 =
    implement<LmHead, Forward<Rule::k32>::run, Forward<Rule::k32>::supports, Forward<Rule::k32>::workspace>(
        {.id = "onednn.bf16",
         .doc = "oneDNN matmul on AMX, checked against its rule",
         .priority = 200,
         .arithmetic = "amx/k32",
         .dtypes = RLK_BF16,
         .traits = kPinned,
         .min_arch = RLK_CPU_AMX});

}  // namespace rlk::onednn
