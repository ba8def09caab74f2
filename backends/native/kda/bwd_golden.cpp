// Token by token with states in fp64, replayed from every 64th.
#include "native/kda/recurrent.hpp"
#include "native/kda/run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

std::uint64_t workspace(const KdaBwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, recurrent::backward_tasks(p), recurrent::backward_scratch(p),
                       recurrent::partials_bytes(p));
}

rlk_code run(const KdaBwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  double* partials = shared_part(call);
  run_tasks(call, recurrent::backward_tasks(p), recurrent::backward_scratch(p), recurrent::partials_bytes(p),
            [&](std::int64_t task, void* scratch) { recurrent::backward(p, task, scratch, partials); });
  recurrent::finish(p, partials);
  return RLK_OK;
}

rlk_verdict supports(const KdaBwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_bwd_golden;
const rlk_implementation kda_bwd_golden = implement<KdaBwd, run, supports, workspace>(
    {.id = "native.golden",
     .doc = "token by token with states in fp64, replayed from every 64th",
     .priority = 0,
     .arithmetic = "fma64",
     .dtypes = kTypes,
     .traits = kTraits | RLK_GOLDEN});

}  // namespace rlk::native
