// One token in fp32, on the widest vectors there are.
#include "kda_chunk.hpp"
#include "kda_run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

rlk_code run(const KdaDecode& a, const Call& call) {
  const Problem p = problem_of(a);
  const chunked::Engine& engine = chunked::best_engine();
  call.parallel_for(p.batch * p.value_heads, [&](std::int64_t task) { engine.decode(p, task); });
  return RLK_OK;
}

rlk_verdict supports(const KdaDecode& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_decode_vector;
const rlk_implementation kda_decode_vector =
    implement<KdaDecode, run, supports>({.id = "native.fma32",
                                         .doc = "one token in fp32, on the widest vectors there are",
                                         .priority = 100,
                                         .arithmetic = "fma32/kda",
                                         .dtypes = kTypes,
                                         .traits = kTraits});

}  // namespace rlk::native
