// linear on Intel's matrix unit, bf16, arithmetic amx/k32/tree8: lm_head's product, its depth cut into leaves.
#include "native/lm_head/product_amx.hpp"
#include "registry/linear/geometry.hpp"

namespace rlk::native {
namespace {

#if RLK_HAS_AMX

AmxProduct product_of(const Linear& a) {
  const std::int64_t total = a.k_total == 0 ? a.weight.dim(1) : a.k_total;
  return {a.x, a.weight, a.bias, a.residual, a.y, leaves::width(total), static_cast<int>(a.leaf_count)};
}
rlk_code run(const Linear& a, const Call& call) { return run_amx(product_of(a), call); }
std::uint64_t workspace(const Linear& a, const rlk_request& r) { return amx_workspace(product_of(a), r); }
rlk_verdict supports(const Linear& a, const rlk_request&) {
  if (a.activation != Linear::Activation::none)
    return refuse("activation is swiglu, the matrix unit's sums leave before it", {},
                  "call linear, then swiglu: same bits");
  return kAccept;
}

#else

rlk_code run(const Linear&, const Call&) { return RLK_UNSUPPORTED; }
std::uint64_t workspace(const Linear&, const rlk_request&) { return 0; }
rlk_verdict supports(const Linear&, const rlk_request&) { return refuse(kNoAmx); }

#endif

}  // namespace

extern const rlk_implementation linear_amx;
const rlk_implementation linear_amx = implement<Linear, run, supports, workspace>(
    amx_facts("Intel's matrix unit, the weight read as it lies", "amx/k32/tree8"));

}  // namespace rlk::native
