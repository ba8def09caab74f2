// qk_norm_rope on the CPU: rms32/rope32 by instruction set.
//
// Bytes: q, k and v once, each result once, a table row once a token. A task is a block of tokens.
#include <algorithm>
#include <string>

#include "arithmetic/qk_norm_rope/bind.hpp"
#include "native/qk_norm_rope/engine.hpp"
#include "native/qk_norm_rope/positions.hpp"

namespace rlk::native {
namespace {

using qk_norm_rope::Problem;
using rlk::rms32_rope32::problem_of;

constexpr std::int64_t kBlock = 16;

template <Isa I>
rlk_code run(const QkNormRope& a, const Call& call) {
  const Problem p = problem_of(a);
  constexpr const qk_norm_rope::Engine& engine = qk_norm_rope::engine_for(I);
  if (p.heads() == 0) return RLK_OK;
  if (const auto error = qk_norm_rope::check_positions(p); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  qk_norm_rope::Weights weights;
  if (p.normed()) engine.weights(p, weights);
  call.parallel_for((p.tokens + kBlock - 1) / kBlock, [&](std::int64_t block) {
    const std::int64_t last = std::min(p.tokens, (block + 1) * kBlock);
    for (std::int64_t token = block * kBlock; token < last; ++token) engine.token(p, token, weights);
  });
  return RLK_OK;
}

}  // namespace

extern const Levels qk_norm_rope_rows;
constinit const Levels qk_norm_rope_rows = by_level([]<Isa I>() {
  return implement<QkNormRope, run<I>>(
      facts_at<"native.rows", I>(pinned_facts("a head in cache", "rms32/rope32")));
});

}  // namespace rlk::native
