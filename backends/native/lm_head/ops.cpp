// lm_head and its backward by chains (chain.hpp), an implementation per instruction set:
//
//   native           fma32/kb1024  fp32, lanes over the columns
//   native.kb256     fma32/kb256   the bits of onednn.kb256, on request
//   native.golden    fma64         fp64, one rounding
#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

constexpr Facts kFma32 =
    pinned_facts("fp32 FMA chains in blocks of 1024, lanes over the columns", "fma32/kb1024");
constexpr Facts kKb256{.id = "",
                       .doc = "fp32 FMA chains in blocks of 256, lanes over the columns",
                       .priority = 20,
                       .arithmetic = "fma32/kb256",
                       .dtypes = kFloats,
                       .traits = kPinned};
constexpr Facts kGolden = golden_facts("ascending fp64 FMA chain, one rounding");

template <Family F, Chain Sum>
constexpr Levels forward(const Facts& facts) {
  return by_level([&]<Isa I>() {
    using Forms = LmHeadChain<chain_kernels<I>, Sum>;
    return implement<LmHead, Forms::run, Forms::supports, Forms::workspace>(facts_at<F, I>(facts));
  });
}
template <Family F, Chain Sum>
constexpr Levels backward(const Facts& facts) {
  return by_level([&]<Isa I>() {
    using Forms = LmHeadChain<chain_kernels<I>, Sum>;
    return implement<LmHeadBwd, Forms::run_bwd, Forms::supports_bwd, Forms::workspace_bwd>(
        facts_at<F, I>(facts));
  });
}

}  // namespace

extern const Levels lm_head_fma32, lm_head_kb256, lm_head_golden;
constinit const Levels lm_head_fma32 = forward<"native", Chain::fma32>(kFma32);
constinit const Levels lm_head_kb256 = forward<"native.kb256", Chain::fma32_kb256>(kKb256);
constinit const Levels lm_head_golden = forward<"native.golden", Chain::fma64>(kGolden);

extern const Levels lm_head_bwd_fma32, lm_head_bwd_kb256, lm_head_bwd_golden;
constinit const Levels lm_head_bwd_fma32 = backward<"native", Chain::fma32>(kFma32);
constinit const Levels lm_head_bwd_kb256 = backward<"native.kb256", Chain::fma32_kb256>(kKb256);
constinit const Levels lm_head_bwd_golden = backward<"native.golden", Chain::fma64>(kGolden);

}  // namespace rlk::native
