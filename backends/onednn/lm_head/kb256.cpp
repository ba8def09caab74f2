// fp32 products of 256 along K: what oneDNN keeps on every processor with AVX2. bf16 is upcast on the way.
#include "onednn/lm_head/forward.hpp"

namespace rlk::onednn {

extern const rlk_implementation lm_head_kb256;
const rlk_implementation lm_head_kb256 =
    implement<LmHead, Forward<Rule::kb256>::run, Forward<Rule::kb256>::supports,
              Forward<Rule::kb256>::workspace>(
        {.id = "onednn.kb256",
         .doc = "oneDNN matmul in strict fp32, K in blocks of 256, checked against its rule",
         .priority = 98,
         .arithmetic = "fma32/kb256",
         .dtypes = RLK_F32 | RLK_BF16,
         .traits = kPinned,
         .min_arch = RLK_CPU_AVX2});

}  // namespace rlk::onednn
