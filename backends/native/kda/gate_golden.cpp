// The gate in fp64, rounded once.
#include "native/kda/recurrent.hpp"
#include "native/kda/run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

rlk_code run(const KdaGate& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  call.parallel_for(p.tokens, [&](std::int64_t token) { recurrent::gate(p, token); });
  return RLK_OK;
}

rlk_verdict supports(const KdaGate& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_gate_golden;
const rlk_implementation kda_gate_golden =
    implement<KdaGate, run, supports>({.id = "native.golden",
                                       .doc = "the gate in fp64, rounded once",
                                       .priority = 0,
                                       .arithmetic = "fma64",
                                       .dtypes = kTypes,
                                       .traits = kTraits | RLK_GOLDEN});

}  // namespace rlk::native
