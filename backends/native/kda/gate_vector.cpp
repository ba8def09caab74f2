// The gate in fp32.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

template <Isa I>
rlk_code run(const KdaGate& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  constexpr const chunked::Engine& engine = chunked::engine_for(I);
  call.parallel_for(chunked::gate_block_count(p), [&](std::int64_t block) { engine.gate(p, block); });
  return RLK_OK;
}

rlk_verdict supports(const KdaGate& a, const rlk_request&) { return check(a); }

}  // namespace

extern const Levels kda_gate_vector;
constinit const Levels kda_gate_vector = by_level([]<Isa I>() {
  return implement<KdaGate, run<I>, supports>(facts_at<"native.fma32", I>({.id = "",
                                                                           .doc = "the gate in fp32",
                                                                           .priority = 100,
                                                                           .arithmetic = "fma32/kda",
                                                                           .dtypes = kTypes,
                                                                           .traits = kTraits}));
});

}  // namespace rlk::native
