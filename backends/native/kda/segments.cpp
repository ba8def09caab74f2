// kda_fwd and kda_bwd by segments of 4096 tokens, so that one long sequence occupies every core.
//
//   native.seg4096     fma32/kda/seg4096  the rule and the steps are in arithmetic/kda/segments.hpp
//
// On request: forward computes every whole segment twice, once for K + V columns without outputs, backward makes these maps too and the
// chain of gradients twice; it pays where there are more cores than heads. Of each whole segment and value head K (K + V) floats lie in
// the workspace, in the backward K V more.
#include "native/kda/chunk.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;
using namespace kda;

template <class Args>
rlk_verdict supports(const Args& a, const rlk_request&) {
  return check(a);
}

// Where what the steps leave each other lies in the shared part, and the most tasks that a step has.
struct Shared {
  std::uint64_t maps = 0, ends = 0, partials = 0, bytes = 0;
  std::int64_t tasks = 0;

  Shared(const Problem& p, const SegmentSizes& sizes, bool backward) {
    ends = line(sizes.map_bytes);
    partials = ends + (backward ? line(sizes.end_bytes) : 0);
    bytes = partials + (backward ? partials_bytes(by_pieces(p, sizes)) : 0);
    tasks = sizes.pieces * p.value_heads;
    if (backward) tasks = std::max(tasks, sizes.pieces * p.heads);
  }
  // The partial sums of the backward are one per piece.
  static Problem by_pieces(Problem p, const SegmentSizes& sizes) {
    p.sequences = sizes.pieces;
    return p;
  }
};

std::uint64_t forward_bytes(const KdaFwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  const SegmentSizes sizes = segment_sizes(p);
  const Shared shared(p, sizes, false);
  return workspace_for(request.threads, shared.tasks, sizes.scratch_bytes, shared.bytes);
}

template <Isa I>
rlk_code forward(const KdaFwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  const Engine& engine = engine_for(I);
  const SegmentSizes sizes = segment_sizes(p);
  const Shared shared(p, sizes, false);
  auto* maps = reinterpret_cast<float*>(workers::shared_workspace(call));
  const auto step = [&](std::int64_t tasks, auto task) {
    run_tasks(call, tasks, sizes.scratch_bytes, shared.bytes,
              [&](std::int64_t i, void* scratch) { task(p, i, static_cast<float*>(scratch), maps); });
  };
  if (sizes.maps > 0) {
    step(sizes.maps * p.value_heads, engine.map_segment);
    step(p.sequences * p.value_heads, engine.join_segments);
  }
  step(sizes.pieces * p.value_heads, engine.run_segment);
  return RLK_OK;
}

std::uint64_t backward_bytes(const KdaBwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  const SegmentSizes sizes = segment_sizes(p);
  const Shared shared(p, sizes, true);
  return workspace_for(request.threads, shared.tasks, sizes.back_scratch_bytes, shared.bytes);
}

template <Isa I>
rlk_code backward(const KdaBwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  const Engine& engine = engine_for(I);
  const SegmentSizes sizes = segment_sizes(p);
  const Shared shared(p, sizes, true);
  std::byte* base = workers::shared_workspace(call);
  auto* maps = reinterpret_cast<float*>(base);
  auto* ends = reinterpret_cast<float*>(base + shared.ends);
  auto* partials = reinterpret_cast<double*>(base + shared.partials);
  const auto step = [&](std::int64_t tasks, auto task) {
    run_tasks(call, tasks, sizes.back_scratch_bytes, shared.bytes,
              [&](std::int64_t i, void* scratch) { task(i, static_cast<float*>(scratch)); });
  };
  if (sizes.maps > 0) {
    step(sizes.maps * p.value_heads,
         [&](std::int64_t i, float* scratch) { engine.map_segment(p, i, scratch, maps); });
    step(sizes.pieces * p.value_heads,
         [&](std::int64_t i, float* scratch) { engine.map_segment_back(p, i, scratch, ends); });
    step(p.sequences * p.value_heads, [&](std::int64_t i, float* scratch) {
      engine.join_segments(p, i, scratch, maps);
      engine.join_segments_back(p, i, scratch, maps, ends);
    });
  }
  step(sizes.pieces * p.heads,
       [&](std::int64_t i, float* scratch) { engine.run_segment_back(p, i, scratch, maps, ends, partials); });
  engine.finish(Shared::by_pieces(p, sizes), partials);
  return RLK_OK;
}

constexpr Facts facts() {
  return {.id = "",
          .doc = "chunks in fp32, long sequences by segments of 4096 tokens",
          .priority = 20,
          .arithmetic = "fma32/kda/seg4096",
          .dtypes = kTypes,
          .traits = kTraits};
}

}  // namespace

extern const Levels kda_fwd_segments, kda_bwd_segments;
constinit const Levels kda_fwd_segments = by_level([]<Isa I>() {
  return implement<KdaFwd, forward<I>, supports<KdaFwd>, forward_bytes>(
      facts_at<"native.seg4096", I>(facts()));
});
constinit const Levels kda_bwd_segments = by_level([]<Isa I>() {
  return implement<KdaBwd, backward<I>, supports<KdaBwd>, backward_bytes>(
      facts_at<"native.seg4096", I>(facts()));
});

}  // namespace rlk::native
