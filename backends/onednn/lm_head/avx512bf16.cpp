// bf16 products on AVX512-BF16.
#include "onednn/lm_head/forward.hpp"

namespace rlk::onednn {

extern const rlk_implementation lm_head_avx512bf16;
const rlk_implementation lm_head_avx512bf16 =
    implement<LmHead, Forward<Rule::pairs>::run, Forward<Rule::pairs>::supports,
              Forward<Rule::pairs>::workspace>(
        {.id = "onednn.avx512bf16",
         .doc = "oneDNN matmul on AVX512-BF16, checked against its rule",
         .priority = 99,
         .arithmetic = "avx512bf16/kb1024",
         .dtypes = RLK_BF16,
         .traits = kPinned,
         .min_arch = RLK_CPU_AVX512BF16});

}  // namespace rlk::onednn
