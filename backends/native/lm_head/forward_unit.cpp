// lm_head on a matrix unit, bf16, arithmetic amx/k32 (product_unit.hpp): Intel's, or what stands for it on other processors.
#include "native/lm_head/product_unit.hpp"

namespace rlk::native {
namespace {

UnitProduct product_of(const LmHead& a) {
  static const In none;
  return {a.hidden, a.weight, a.bias, none, a.out, kDepthBlock, 0};
}

template <const MatrixUnit* (*Unit)()>
struct Forms {
  static rlk_code run(const LmHead& a, const Call& call) {
    return run_product(*Unit(), product_of(a), PlainRows{}, call);
  }
  static std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
    return product_workspace<PlainRows>(product_of(a), r);
  }
  static rlk_verdict supports(const LmHead&, const rlk_request&) {
    return Unit() ? kAccept : refuse(kNoUnit);
  }
  static constexpr rlk_implementation of(const Facts& facts) {
    return implement<LmHead, run, supports, workspace>(facts);
  }
};

}  // namespace

extern const rlk_implementation lm_head_amx;
constinit const rlk_implementation lm_head_amx =
    Forms<amx_unit>::of(amx_facts("Intel's matrix unit, the weight read as it lies", "amx/k32"));
extern const Levels lm_head_replay_amx;
constinit const Levels lm_head_replay_amx = by_level([]<Isa I>() {
  return Forms<replay_unit<I>>::of(facts_at<"native.replay_amx", I>(amx_replay_facts("amx/k32")));
});

}  // namespace rlk::native
