// lm_head on Intel's matrix unit, bf16, arithmetic amx/k32 (product_amx.hpp).
#include "native/lm_head/product_amx.hpp"

namespace rlk::native {
namespace {

#if RLK_HAS_AMX

AmxProduct product_of(const LmHead& a) {
  static const In none;
  return {a.hidden, a.weight, a.bias, none, a.out, kDepthBlock, 0};
}
rlk_code run(const LmHead& a, const Call& call) { return run_amx(product_of(a), call); }
std::uint64_t workspace(const LmHead& a, const rlk_request& r) { return amx_workspace(product_of(a), r); }
rlk_verdict supports(const LmHead&, const rlk_request&) { return kAccept; }

#else

rlk_code run(const LmHead&, const Call&) { return RLK_UNSUPPORTED; }
std::uint64_t workspace(const LmHead&, const rlk_request&) { return 0; }
rlk_verdict supports(const LmHead&, const rlk_request&) { return refuse(kNoAmx); }

#endif

}  // namespace

extern const rlk_implementation lm_head_amx;
const rlk_implementation lm_head_amx = implement<LmHead, run, supports, workspace>(
    amx_facts("Intel's matrix unit, the weight read as it lies", "amx/k32"));

}  // namespace rlk::native
