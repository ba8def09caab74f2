// One token in fp32.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

template <Isa I>
rlk_code run(const KdaDecode& a, const Call& call) {
  const Problem p = problem_of(a);
  constexpr const chunked::Engine& engine = chunked::engine_for(I);
  call.parallel_for(p.batch * p.value_heads, [&](std::int64_t task) { engine.decode(p, task); });
  return RLK_OK;
}

rlk_verdict supports(const KdaDecode& a, const rlk_request&) { return check(a); }

}  // namespace

extern const Levels kda_decode_vector;
constinit const Levels kda_decode_vector = by_level([]<Isa I>() {
  return implement<KdaDecode, run<I>, supports>(facts_at<"native.fma32", I>({.id = "",
                                                                             .doc = "one token in fp32",
                                                                             .priority = 100,
                                                                             .arithmetic = "fma32/kda",
                                                                             .dtypes = kTypes,
                                                                             .traits = kTraits}));
});

}  // namespace rlk::native
