// Chunks of 64 or 32 tokens in fp32.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

std::uint64_t workspace(const KdaFwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, chunked::forward_task_count(p), chunked::forward_scratch_bytes(p));
}

template <Isa I>
rlk_code run(const KdaFwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  constexpr const chunked::Engine& engine = chunked::engine_for(I);
  run_tasks(call, chunked::forward_task_count(p), chunked::forward_scratch_bytes(p), 0,
            [&](std::int64_t task, void* scratch) { engine.forward(p, task, static_cast<float*>(scratch)); });
  return RLK_OK;
}

rlk_verdict supports(const KdaFwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const Levels kda_fwd_chunked;
constinit const Levels kda_fwd_chunked = by_level([]<Isa I>() {
  return implement<KdaFwd, run<I>, supports, workspace>(
      facts_at<"native.fma32", I>({.id = "",
                                   .doc = "chunks of 64 or 32 tokens in fp32",
                                   .priority = 100,
                                   .arithmetic = "fma32/kda",
                                   .dtypes = kTypes,
                                   .traits = kTraits}));
});

}  // namespace rlk::native
