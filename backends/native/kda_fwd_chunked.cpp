// Chunks of 64 or 32 tokens in fp32, on the widest vectors there are.
#include "kda_chunk.hpp"
#include "kda_run.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

std::uint64_t workspace(const KdaFwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, chunked::forward_task_count(p), chunked::forward_scratch_bytes(p));
}

rlk_code run(const KdaFwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  const chunked::Engine& engine = chunked::best_engine();
  run_tasks(call, chunked::forward_task_count(p), chunked::forward_scratch_bytes(p), 0,
            [&](std::int64_t task, void* scratch) { engine.forward(p, task, static_cast<float*>(scratch)); });
  return RLK_OK;
}

rlk_verdict supports(const KdaFwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const rlk_implementation kda_fwd_chunked;
const rlk_implementation kda_fwd_chunked = implement<KdaFwd, run, supports, workspace>(
    {.id = "native.fma32",
     .doc = "chunks of 64 or 32 tokens in fp32, on the widest vectors there are",
     .priority = 100,
     .arithmetic = "fma32/kda",
     .dtypes = kTypes,
     .traits = kTraits});

}  // namespace rlk::native
