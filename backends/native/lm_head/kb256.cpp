// lm_head in fp32 FMA chains in blocks of 256: the bits of onednn.kb256, for who asks for them.
#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

constexpr Facts kFacts{.id = "",
                       .doc = "fp32 FMA chains in blocks of 256, lanes over the columns",
                       .priority = 20,
                       .arithmetic = "fma32/kb256",
                       .dtypes = kLmHeadTypes,
                       .traits = kPinned};

}  // namespace

extern const Levels lm_head_kb256, lm_head_bwd_kb256;
constinit const Levels lm_head_kb256 = by_level([]<Isa I>() {
  using Forms = LmHeadChain<chain_kernels<I>, Chain::fma32_kb256>;
  return implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<"native.kb256", I>(kFacts));
});
constinit const Levels lm_head_bwd_kb256 = by_level([]<Isa I>() {
  using Forms = LmHeadChain<chain_kernels<I>, Chain::fma32_kb256>;
  return implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
      facts_at<"native.kb256", I>(kFacts));
});

}  // namespace rlk::native
