// Chunks of 64 or 32 tokens in fp32.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;

std::uint64_t workspace(const KdaBwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, chunked::backward_task_count(p), chunked::backward_scratch_bytes(p),
                       chunked::partials_bytes(p));
}

template <Isa I>
rlk_code run(const KdaBwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  constexpr const chunked::Engine& engine = chunked::engine_for(I);
  double* partials = shared_part(call);
  run_tasks(call, chunked::backward_task_count(p), chunked::backward_scratch_bytes(p),
            chunked::partials_bytes(p), [&](std::int64_t task, void* scratch) {
              engine.backward(p, task, static_cast<float*>(scratch), partials);
            });
  engine.finish(p, partials);
  return RLK_OK;
}

rlk_verdict supports(const KdaBwd& a, const rlk_request&) { return check(a); }

}  // namespace

extern const Levels kda_bwd_chunked;
constinit const Levels kda_bwd_chunked = by_level([]<Isa I>() {
  return implement<KdaBwd, run<I>, supports, workspace>(
      facts_at<"native.fma32", I>({.id = "",
                                   .doc = "chunks of 64 or 32 tokens in fp32",
                                   .priority = 100,
                                   .arithmetic = "fma32/kda",
                                   .dtypes = kTypes,
                                   .traits = kTraits}));
});

}  // namespace rlk::native
