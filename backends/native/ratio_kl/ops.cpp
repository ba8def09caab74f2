// ratio_kl and its gradient on the CPU: loss32/f64 by instruction set, and golden in fp64.
//
// Bytes: every tensor is read or written once; 4 bytes a token each.
#include <cmath>

#include "arithmetic/ratio_kl/bind.hpp"
#include "native/ratio_kl/engine.hpp"
#include "rlk/backend.hpp"
#include "rlk/half.hpp"

namespace rlk::native {
namespace {

using loss32::problem_of;
using loss32::RatioProblem;
using ratio_kl::engine_for;
using ratio_kl::kTile;

// run(first token) for every tile; a task is enough of them to be worth a thread.
template <class Run>
void for_tiles(const RatioProblem& p, const Call& call, Run run) {
  constexpr std::int64_t kTask = 8 * kTile;
  call.parallel_for((p.tokens + kTask - 1) / kTask, [&](std::int64_t task) {
    for (std::int64_t first = task * kTask; first < std::min(p.tokens, (task + 1) * kTask); first += kTile)
      run(first);
  });
}

template <Isa I>
rlk_code run(const RatioKl& a, const Call& call) {
  const RatioProblem p = problem_of(a);
  for_tiles(p, call, [&](std::int64_t first) { engine_for(I).forward(p, first); });
  return RLK_OK;
}
template <Isa I>
rlk_code run_backward(const RatioKlBwd& a, const Call& call) {
  const RatioProblem p = problem_of(a);
  for_tiles(p, call, [&](std::int64_t first) { engine_for(I).backward(p, first); });
  return RLK_OK;
}

// ---- golden

float rounded(double x) { return canonical(static_cast<float>(x)); }

rlk_code run_golden(const RatioKl& a, const Call& call) {
  const RatioProblem p = problem_of(a);
  call.parallel_for(p.tokens, [&](std::int64_t i) {
    const double mask = double{p.mask.at(i)}, logp = double{p.logp[i]};
    p.ratio[i] = rounded(loss32::ratio_of<double>(p, mask, logp, double{p.old[i]}));
    if (p.kl) p.kl[i] = rounded(loss32::kl_of<double>(p, mask, logp, double{p.ref[i]}));
  });
  return RLK_OK;
}
rlk_code run_backward_golden(const RatioKlBwd& a, const Call& call) {
  const RatioProblem p = problem_of(a);
  call.parallel_for(p.tokens, [&](std::int64_t i) {
    const double mask = double{p.mask.at(i)}, logp = double{p.logp[i]};
    double d = 0;
    if (p.d_ratio) d += loss32::through_ratio<double>(p, mask, logp, double{p.old[i]}, double{p.d_ratio[i]});
    if (p.d_kl) d += loss32::through_kl<double>(p, mask, logp, double{p.ref[i]}, double{p.d_kl[i]});
    p.d_logp[i] = rounded(d);
  });
  return RLK_OK;
}

constexpr Facts kTokens = pinned_facts("token by token in fp32", "loss32/f64", RLK_F32);
constexpr Facts kGolden = golden_facts("token by token in fp64, one rounding", RLK_F32);

}  // namespace

extern const Levels ratio_kl_tokens, ratio_kl_bwd_tokens;
constinit const Levels ratio_kl_tokens =
    by_level([]<Isa I>() { return implement<RatioKl, run<I>>(facts_at<"native.tokens", I>(kTokens)); });
constinit const Levels ratio_kl_bwd_tokens = by_level(
    []<Isa I>() { return implement<RatioKlBwd, run_backward<I>>(facts_at<"native.tokens", I>(kTokens)); });

extern const rlk_implementation ratio_kl_golden, ratio_kl_bwd_golden;
constinit const rlk_implementation ratio_kl_golden = implement<RatioKl, run_golden>(kGolden);
constinit const rlk_implementation ratio_kl_bwd_golden = implement<RatioKlBwd, run_backward_golden>(kGolden);

}  // namespace rlk::native
