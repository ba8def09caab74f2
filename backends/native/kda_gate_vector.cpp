// The gate in fp32.
#include "kda_chunk.hpp"
#include "kda_run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

rlk_code run(const KdaGate& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  const chunked::Engine& engine = chunked::best_engine();
  call.parallel_for(chunked::gate_block_count(p), [&](std::int64_t block) { engine.gate(p, block); });
  return RLK_OK;
}

rlk_verdict supports(const KdaGate& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_gate_vector;
const rlk_implementation kda_gate_vector = implement<KdaGate, run, supports>({.id = "native.fma32",
                                                                              .doc = "the gate in fp32",
                                                                              .priority = 100,
                                                                              .arithmetic = "fma32/kda",
                                                                              .dtypes = kTypes,
                                                                              .traits = kTraits});

}  // namespace rlk::native
