// fp32 products of a whole K: chains of 1024, where oneDNN's own blocks are those (AVX-512). Behind native's
// vector forms: the same bits, and faster up to 32 rows.
#include "onednn/lm_head/forward.hpp"

namespace rlk::onednn {

extern const rlk_implementation lm_head_f32;
const rlk_implementation lm_head_f32 =
    implement<LmHead, Forward<Rule::kb1024>::run, Forward<Rule::kb1024>::supports,
              Forward<Rule::kb1024>::workspace>(
        {.id = "onednn.f32",
         .doc = "oneDNN matmul in strict fp32, checked against its rule",
         .priority = 99,
         .arithmetic = "fma32/kb1024",
         .dtypes = RLK_F32,
         .traits = kPinned,
         .min_arch = RLK_CPU_AVX2});

}  // namespace rlk::onednn
