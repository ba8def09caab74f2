// fp16 products on AMX-FP16: oneDNN 3.
#include <dnnl_version.h>

#include "onednn/lm_head/forward.hpp"

namespace rlk::onednn {

#if DNNL_VERSION_MAJOR >= 3
extern const rlk_implementation lm_head_f16;
const rlk_implementation lm_head_f16 =
    implement<LmHead, Forward<Rule::k32>::run, Forward<Rule::k32>::supports, Forward<Rule::k32>::workspace>(
        {.id = "onednn.f16",
         .doc = "oneDNN matmul on AMX-FP16, checked against its rule",
         .priority = 200,
         .arithmetic = "amx/k32",
         .dtypes = RLK_F16,
         .traits = kPinned,
         .min_arch = RLK_CPU_AMX});
#endif

}  // namespace rlk::onednn
