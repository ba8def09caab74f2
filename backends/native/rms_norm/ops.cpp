// rms_norm and its gradients on the CPU: rms32 by instruction set.
//
// Bytes: x and y once, weight once a block of 128 rows; the backward reads x and d_y once and writes d_x, and d_weight's
// share of a block stays in cache.
#include "arithmetic/rms_norm/bind.hpp"
#include "native/rms_norm/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using rlk::rms32::problem_of;
using rms_norm::engine_for;
using rms_norm::Problem;

std::uint64_t floats(std::int64_t n) { return static_cast<std::uint64_t>(n) * sizeof(float); }

// The weight in fp32, and what blocks leave for d_weight.
std::uint64_t shared_bytes(const Problem& p) { return floats(p.width * (1 + (p.d_weight ? p.blocks() : 0))); }

template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request& r) {
  const Problem p = problem_of(a);
  return workers::workspace_for(r.threads, p.blocks(), floats(rms_norm::scratch_floats(p.width)),
                                shared_bytes(p));
}

// run(block, weight, scratch, shares of d_weight) for every block.
template <class Run>
void run_blocks(const Problem& p, const rms_norm::Engine& engine, const Call& call, Run run) {
  auto* weight = reinterpret_cast<float*>(workers::shared_workspace(call));
  if (p.weight) engine.weights(p, weight);
  workers::run_tasks(call, p.blocks(), floats(rms_norm::scratch_floats(p.width)), shared_bytes(p),
                     [&](std::int64_t block, std::byte* scratch) {
                       run(block, p.weight ? weight : nullptr, reinterpret_cast<float*>(scratch),
                           weight + p.width);
                     });
}

template <Isa I>
rlk_code run(const RmsNorm& a, const Call& call) {
  const Problem p = problem_of(a);
  constexpr const rms_norm::Engine& engine = engine_for(I);
  run_blocks(p, engine, call, [&](std::int64_t block, const float* weight, float* scratch, float*) {
    engine.forward(p, block, weight, scratch);
  });
  return RLK_OK;
}

template <Isa I>
rlk_code run_backward(const RmsNormBwd& a, const Call& call) {
  const Problem p = problem_of(a);
  constexpr const rms_norm::Engine& engine = engine_for(I);
  run_blocks(p, engine, call, [&](std::int64_t block, const float* weight, float* scratch, float* all) {
    engine.backward(p, block, weight, scratch, p.d_weight ? all + block * p.width : nullptr);
  });
  const float* shares = reinterpret_cast<const float*>(workers::shared_workspace(call)) + p.width;
  for (std::int64_t i = 0; p.d_weight && i < p.width; ++i) {
    double sum = 0;
    for (std::int64_t block = 0; block < p.blocks(); ++block) sum += double{shares[block * p.width + i]};
    rows::store(p.d_weight_type, p.d_weight, i, sum);
  }
  return RLK_OK;
}

}  // namespace

extern const Levels rms_norm_rows, rms_norm_bwd_rows;
constinit const Levels rms_norm_rows = by_level([]<Isa I>() {
  return implement<RmsNorm, run<I>, nullptr, workspace<RmsNorm>>(
      facts_at<"native.rows", I>(pinned_facts("a row in cache, 1024 fp32 lanes", "rms32")));
});
constinit const Levels rms_norm_bwd_rows = by_level([]<Isa I>() {
  return implement<RmsNormBwd, run_backward<I>, nullptr, workspace<RmsNormBwd>>(
      facts_at<"native.rows", I>(pinned_facts("a row in cache, d_weight by blocks of 128 rows", "rms32")));
});

}  // namespace rlk::native
