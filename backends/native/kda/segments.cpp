// kda_fwd by segments of 4096 tokens, so that one long sequence occupies every core.
//
//   native.seg4096     fma32/kda/seg4096  the rule and the three steps are in arithmetic/kda/segments.hpp
//
// On request: it computes every whole segment twice, once for K + V columns without outputs, and pays where there are more cores than
// heads. Of each whole segment and value head K (K + V) floats lie in the workspace.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;
using namespace kda;

rlk_verdict supports(const KdaFwd& a, const rlk_request&) { return check(a); }

std::int64_t most_tasks(const Problem& p, const SegmentSizes& sizes) {
  return std::max(sizes.pieces, p.sequences * p.value_heads);
}

std::uint64_t workspace(const KdaFwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  const SegmentSizes sizes = segment_sizes(p);
  return workspace_for(request.threads, most_tasks(p, sizes), sizes.scratch_bytes, sizes.map_bytes);
}

template <Isa I>
rlk_code run(const KdaFwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  const Engine& engine = engine_for(I);
  const SegmentSizes sizes = segment_sizes(p);
  auto* maps = reinterpret_cast<float*>(workers::shared_workspace(call));
  const auto step = [&](std::int64_t tasks, auto task) {
    run_tasks(call, tasks, sizes.scratch_bytes, sizes.map_bytes,
              [&](std::int64_t i, void* scratch) { task(p, i, static_cast<float*>(scratch), maps); });
  };
  if (sizes.maps > 0) {
    step(sizes.maps, engine.map_segment);
    step(p.sequences * p.value_heads, engine.join_segments);
  }
  step(sizes.pieces, engine.run_segment);
  return RLK_OK;
}

}  // namespace

extern const Levels kda_fwd_segments;
constinit const Levels kda_fwd_segments = by_level([]<Isa I>() {
  Facts facts =
      facts_at<"native.seg4096", I>({.id = "",
                                     .doc = "chunks in fp32, long sequences by segments of 4096 tokens",
                                     .priority = 20,
                                     .arithmetic = "fma32/kda/seg4096",
                                     .dtypes = kTypes,
                                     .traits = kTraits});
  return implement<KdaFwd, run<I>, supports, workspace>(facts);
});

}  // namespace rlk::native
