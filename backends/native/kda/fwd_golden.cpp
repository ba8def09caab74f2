// Token by token with the state in fp64.
#include "native/kda/recurrent.hpp"
#include "native/kda/run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

std::uint64_t workspace(const KdaFwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, recurrent::forward_tasks(p), recurrent::forward_scratch(p));
}

rlk_code run(const KdaFwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  run_tasks(call, recurrent::forward_tasks(p), recurrent::forward_scratch(p), 0,
            [&](std::int64_t task, void* scratch) { recurrent::forward(p, task, scratch); });
  return RLK_OK;
}

rlk_verdict supports(const KdaFwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_fwd_golden;
const rlk_implementation kda_fwd_golden =
    implement<KdaFwd, run, supports, workspace>({.id = "native.golden",
                                                 .doc = "token by token with the state in fp64",
                                                 .priority = 0,
                                                 .arithmetic = "fma64",
                                                 .dtypes = kTypes,
                                                 .traits = kTraits | RLK_GOLDEN});

}  // namespace rlk::native
