// lm_head in fp32 FMA chains in blocks of 1024, lanes over the columns.
#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

constexpr Facts kFacts{.id = "",
                       .doc = "fp32 FMA chains in blocks of 1024, lanes over the columns",
                       .priority = 100,
                       .arithmetic = "fma32/kb1024",
                       .dtypes = kLmHeadTypes,
                       .traits = kPinned};

}  // namespace

extern const Levels lm_head_fma32, lm_head_bwd_fma32;
constinit const Levels lm_head_fma32 = by_level([]<Isa I>() {
  using Forms = LmHeadChain<chain_kernels<I>, Chain::fma32>;
  return implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(facts_at<"native", I>(kFacts));
});
constinit const Levels lm_head_bwd_fma32 = by_level([]<Isa I>() {
  using Forms = LmHeadChain<chain_kernels<I>, Chain::fma32>;
  return implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
      facts_at<"native", I>(kFacts));
});

}  // namespace rlk::native
