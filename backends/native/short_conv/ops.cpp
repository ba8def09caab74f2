// short_conv and its gradients on the CPU: conv32 by instruction set.
//
// Bytes: x is read and y written once; the backward reads x and d_y and writes d_x once, and a block's share of d_weight stays in
// cache.
#include "arithmetic/short_conv/bind.hpp"
#include "native/short_conv/bounds.hpp"
#include "native/short_conv/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using conv32::problem_of;
using short_conv::engine_for;
using short_conv::kTile;
using short_conv::Problem;

std::uint64_t floats(std::int64_t n) { return static_cast<std::uint64_t>(n) * sizeof(float); }
std::int64_t tiles(const Problem& p) { return (p.width + kTile - 1) / kTile; }
std::int64_t tasks(const Problem& p) { return p.width == 0 ? 0 : tiles(p) * p.blocks(); }
std::int64_t state_tasks(const Problem& p) { return p.final || p.d_initial ? p.sequences * tiles(p) : 0; }

// The filter in fp32, and what blocks leave for d_weight and d_bias.
std::uint64_t shared_bytes(const Problem& p) {
  return floats(p.share() + (p.sums() && p.width != 0 ? p.blocks() * p.share() : 0));
}
template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request& r) {
  const Problem p = problem_of(a);
  return workers::workspace_for(r.threads, std::max(tasks(p), state_tasks(p)),
                                floats(short_conv::kScratchFloats), shared_bytes(p));
}

const float* parameters(const Problem& p, const Call& call) {
  auto* out = reinterpret_cast<float*>(workers::shared_workspace(call));
  for (std::int64_t d = 0; d < p.width; ++d) {
    for (int t = 0; t < p.taps; ++t)
      out[t * p.width + d] = rows::load(p.weight.type, p.weight.data, d * p.taps + t);
    if (p.bias) out[p.taps * p.width + d] = rows::load(p.bias.type, p.bias.data, d);
  }
  return out;
}

// run(block or sequence, first channel, scratch)
template <class Run>
void run_tiles(const Problem& p, const Call& call, std::int64_t count, Run run) {
  workers::run_tasks(call, count, floats(short_conv::kScratchFloats), shared_bytes(p),
                     [&](std::int64_t task, std::byte* scratch) {
                       run(task / tiles(p), task % tiles(p) * kTile, reinterpret_cast<float*>(scratch));
                     });
}

template <Isa I>
rlk_code run(const ShortConv& a, const Call& call) {
  if (const rlk_code code = short_conv::check_bounds(a, call); code != RLK_OK) return code;
  const Problem p = problem_of(a);
  constexpr const short_conv::Engine& engine = engine_for(I);
  const float* filter = parameters(p, call);
  run_tiles(p, call, tasks(p),
            [&](std::int64_t block, std::int64_t first, float*) { engine.forward(p, block, first, filter); });
  // Afterwards: the result may be the initial state.
  run_tiles(p, call, state_tasks(p),
            [&](std::int64_t n, std::int64_t first, float* scratch) { engine.state(p, n, first, scratch); });
  return RLK_OK;
}

template <Isa I>
rlk_code run_backward(const ShortConvBwd& a, const Call& call) {
  if (const rlk_code code = short_conv::check_bounds(a, call); code != RLK_OK) return code;
  const Problem p = problem_of(a);
  constexpr const short_conv::Engine& engine = engine_for(I);
  const float* filter = parameters(p, call);
  float* shares = reinterpret_cast<float*>(workers::shared_workspace(call)) + p.share();
  if (p.sums() && p.width != 0) std::fill_n(shares, p.blocks() * p.share(), 0.0f);
  if (p.d_x || p.sums())
    run_tiles(p, call, tasks(p), [&](std::int64_t block, std::int64_t first, float* scratch) {
      engine.backward(p, block, first, filter, scratch, p.sums() ? shares + block * p.share() : nullptr);
    });
  run_tiles(p, call, state_tasks(p), [&](std::int64_t n, std::int64_t first, float* scratch) {
    engine.d_state(p, n, first, filter, scratch);
  });
  const auto total = [&](std::int64_t at) {
    double sum = 0;
    for (std::int64_t block = 0; block < p.blocks(); ++block) sum += double{shares[block * p.share() + at]};
    return sum;
  };
  for (std::int64_t d = 0; d < p.width; ++d) {
    for (int t = 0; p.d_weight && t < p.taps; ++t)
      rows::store(p.d_weight.type, p.d_weight.data, d * p.taps + t, total(t * p.width + d));
    if (p.d_bias) rows::store(p.d_bias.type, p.d_bias.data, d, total(p.taps * p.width + d));
  }
  return RLK_OK;
}

constexpr Facts facts(const char* doc) { return pinned_facts(doc, "conv32"); }

}  // namespace

extern const Levels short_conv_tiles, short_conv_bwd_tiles;
constinit const Levels short_conv_tiles = by_level([]<Isa I>() {
  return implement<ShortConv, run<I>, nullptr, workspace<ShortConv>>(
      facts_at<"native.tiles", I>(facts("tiles of 128 rows and 512 channels")));
});
constinit const Levels short_conv_bwd_tiles = by_level([]<Isa I>() {
  return implement<ShortConvBwd, run_backward<I>, nullptr, workspace<ShortConvBwd>>(
      facts_at<"native.tiles", I>(
          facts("tiles of 128 rows and 512 channels, d_weight by blocks of 128 rows")));
});

}  // namespace rlk::native
