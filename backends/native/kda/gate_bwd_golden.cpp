// The gate's gradients in fp64, one ascending sum each.
#include "native/kda/recurrent.hpp"
#include "native/kda/run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

rlk_code run(const KdaGateBwd& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  call.parallel_for(p.value_heads,
                    [&](std::int64_t hv) { recurrent::gate_backward(p, static_cast<int>(hv)); });
  return RLK_OK;
}

rlk_verdict supports(const KdaGateBwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_gate_bwd_golden;
const rlk_implementation kda_gate_bwd_golden =
    implement<KdaGateBwd, run, supports>({.id = "native.golden",
                                          .doc = "the gate's gradients in fp64, one ascending sum each",
                                          .priority = 0,
                                          .arithmetic = "fma64",
                                          .dtypes = kTypes,
                                          .traits = kTraits | RLK_GOLDEN});

}  // namespace rlk::native
