// The gate's gradients in fp32, parameter sums in fp64.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

Problem blocks_of(const KdaGateBwd& a) {
  Problem p = gate_problem_of(a);
  p.sequences = chunked::gate_block_count(p);
  return p;
}

std::uint64_t workspace(const KdaGateBwd& a, const rlk_request&) {
  return 64 + chunked::partials_bytes(blocks_of(a));
}

template <Isa I>
rlk_code run(const KdaGateBwd& a, const Call& call) {
  const Problem p = blocks_of(a);
  constexpr const chunked::Engine& engine = chunked::engine_for(I);
  double* partials = shared_part(call);
  call.parallel_for(p.sequences, [&](std::int64_t block) { engine.gate_backward(p, block, partials); });
  engine.finish(p, partials);
  return RLK_OK;
}

rlk_verdict supports(const KdaGateBwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const Levels kda_gate_bwd_vector;
constinit const Levels kda_gate_bwd_vector = by_level([]<Isa I>() {
  return implement<KdaGateBwd, run<I>, supports, workspace>(
      facts_at<"native.fma32", I>({.id = "",
                                   .doc = "the gate's gradients in fp32, parameter sums in fp64",
                                   .priority = 100,
                                   .arithmetic = "fma32/kda",
                                   .dtypes = kTypes,
                                   .traits = kTraits}));
});

}  // namespace rlk::native
