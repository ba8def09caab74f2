// lm_head in one ascending fp64 FMA chain and one rounding.
#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

constexpr Facts kFacts{.id = "",
                       .doc = "ascending fp64 FMA chain, one rounding",
                       .priority = 0,
                       .arithmetic = "fma64",
                       .dtypes = kLmHeadTypes,
                       .traits = kPinned | RLK_GOLDEN};

}  // namespace

extern const Levels lm_head_golden, lm_head_bwd_golden;
constinit const Levels lm_head_golden = by_level([]<Isa I>() {
  using Forms = LmHeadChain<chain_kernels<I>, Chain::fma64>;
  return implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<"native.golden", I>(kFacts));
});
constinit const Levels lm_head_bwd_golden = by_level([]<Isa I>() {
  using Forms = LmHeadChain<chain_kernels<I>, Chain::fma64>;
  return implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
      facts_at<"native.golden", I>(kFacts));
});

}  // namespace rlk::native
