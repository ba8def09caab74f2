// swiglu and its gradients on the CPU: act32 by instruction set, and golden in fp64.
//
// Bytes: gate and up are read once and out is written once; the backward reads three tensors and writes two.
#include <algorithm>

#include "arithmetic/swiglu/bind.hpp"
#include "native/swiglu/engine.hpp"
#include "rlk/backend.hpp"

namespace rlk::native {
namespace {

using act32::Problem;
using act32::problem_of;

// run(row, first column) for every tile; a task is enough of them to be worth a thread.
template <class Run>
void for_tiles(const Problem& p, const Call& call, Run run) {
  constexpr std::int64_t kTiles = 8;
  const std::int64_t across = (p.width + swiglu::kTile - 1) / swiglu::kTile, all = p.axes.rows * across;
  call.parallel_for((all + kTiles - 1) / kTiles, [&](std::int64_t task) {
    for (std::int64_t i = task * kTiles; i < std::min(all, (task + 1) * kTiles); ++i)
      run(i / across, i % across * swiglu::kTile);
  });
}

template <Isa I>
rlk_code run(const Swiglu& a, const Call& call) {
  const Problem p = problem_of(a);
  for_tiles(p, call,
            [&](std::int64_t row, std::int64_t first) { swiglu::engine_for(I).forward(p, row, first); });
  return RLK_OK;
}
template <Isa I>
rlk_code run_backward(const SwigluBwd& a, const Call& call) {
  const Problem p = problem_of(a);
  for_tiles(p, call,
            [&](std::int64_t row, std::int64_t first) { swiglu::engine_for(I).backward(p, row, first); });
  return RLK_OK;
}

// ---- golden

double get(const Problem& p, const rows::Tensor& t, std::int64_t row, std::int64_t i) {
  return rows::load(t.type, t.row(p.axes, row), i);
}
void put(const Problem& p, const rows::Tensor& t, std::int64_t row, std::int64_t i, double x) {
  rows::store(t.type, t.row(p.axes, row), i, x);
}
double activated(const Problem& p, double gate) {
  const double x = act32::activated<double>(p, gate);
  if (!p.twice) return x;
  std::uint32_t cell = 0;
  rows::store(p.gate.type, &cell, 0, x);
  return rows::load(p.gate.type, &cell, 0);
}

rlk_code run_golden(const Swiglu& a, const Call& call) {
  const Problem p = problem_of(a);
  call.parallel_for(p.axes.rows, [&](std::int64_t row) {
    for (std::int64_t i = 0; i < p.width; ++i)
      put(p, p.out, row, i, activated(p, get(p, p.gate, row, i)) * act32::held_up(p, get(p, p.up, row, i)));
  });
  return RLK_OK;
}
rlk_code run_backward_golden(const SwigluBwd& a, const Call& call) {
  const Problem p = problem_of(a);
  call.parallel_for(p.axes.rows, [&](std::int64_t row) {
    for (std::int64_t i = 0; i < p.width; ++i) {
      const double d = get(p, p.d_out, row, i), gate = get(p, p.gate, row, i), up = get(p, p.up, row, i);
      if (p.d_gate) put(p, p.d_gate, row, i, act32::d_gate(p, d, gate, up));
      if (p.d_up) put(p, p.d_up, row, i, act32::d_up(p, d, activated(p, gate), up));
    }
  });
  return RLK_OK;
}

constexpr Facts kTiles = pinned_facts("elementwise in fp32", "act32");
constexpr Facts kGolden = golden_facts("elementwise in fp64, one rounding");

}  // namespace

extern const Levels swiglu_tiles, swiglu_bwd_tiles;
constinit const Levels swiglu_tiles =
    by_level([]<Isa I>() { return implement<Swiglu, run<I>>(facts_at<"native.tiles", I>(kTiles)); });
constinit const Levels swiglu_bwd_tiles = by_level(
    []<Isa I>() { return implement<SwigluBwd, run_backward<I>>(facts_at<"native.tiles", I>(kTiles)); });

extern const rlk_implementation swiglu_golden, swiglu_bwd_golden;
constinit const rlk_implementation swiglu_golden = implement<Swiglu, run_golden>(kGolden);
constinit const rlk_implementation swiglu_bwd_golden = implement<SwigluBwd, run_backward_golden>(kGolden);

}  // namespace rlk::native
