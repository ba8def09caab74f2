// tp_sum on the CPU: tree8 by instruction set, and golden in fp64.
//
// Bytes: T partials, and the residual, are read once and y is written once.
#include <algorithm>

#include "arithmetic/tp_sum/bind.hpp"
#include "native/tp_sum/engine.hpp"
#include "rlk/backend.hpp"

namespace rlk::native {
namespace {

using rlk::tree8::Problem;
using rlk::tree8::problem_of;

template <Isa I>
rlk_code run(const TpSum& a, const Call& call) {
  const Problem p = problem_of(a);
  constexpr std::int64_t kTiles = 8;  // enough of them to be worth a thread
  const std::int64_t across = (p.width + tp_sum::kTile - 1) / tp_sum::kTile, all = p.axes.rows * across;
  call.parallel_for((all + kTiles - 1) / kTiles, [&](std::int64_t task) {
    for (std::int64_t i = task * kTiles; i < std::min(all, (task + 1) * kTiles); ++i)
      tp_sum::engine_for(I).run(p, i / across, i % across * tp_sum::kTile);
  });
  return RLK_OK;
}

// Stores `sum` and adds what follows to what was stored.
rlk_code run_golden(const TpSum& a, const Call& call) {
  const Problem p = problem_of(a);
  call.parallel_for(p.axes.rows, [&](std::int64_t row) {
    const float* x[tree8::kMost] = {};
    for (int t = 0; t < p.count; ++t) x[t] = static_cast<const float*>(p.partials[t].row(p.axes, row));
    void* y = p.y.row(p.axes, row);
    for (std::int64_t i = 0; i < p.width; ++i) {
      double sum = 0;
      for (int t = 0; t < p.count; ++t) sum += double{x[t][i]};
      rows::store(p.y.type, y, i, sum);
      if (p.bias != nullptr)
        rows::store(p.y.type, y, i, rows::load(p.y.type, y, i) + rows::load(p.bias_type, p.bias, i));
      if (p.residual)
        rows::store(p.y.type, y, i,
                    rows::load(p.y.type, y, i) + rows::load(p.residual.type, p.residual.row(p.axes, row), i));
    }
  });
  return RLK_OK;
}

}  // namespace

extern const Levels tp_sum_tiles;
constinit const Levels tp_sum_tiles = by_level([]<Isa I>() {
  return implement<TpSum, run<I>>(
      facts_at<"native.tiles", I>(pinned_facts("the top of the tree, in fp32", "tree8", RLK_F32)));
});
extern const rlk_implementation tp_sum_golden;
constinit const rlk_implementation tp_sum_golden =
    implement<TpSum, run_golden>(golden_facts("ascending fp64 sum, one rounding", RLK_F32));

}  // namespace rlk::native
