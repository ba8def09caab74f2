// policy_loss, its gradient and loss_reduce on the CPU: loss32/f64 by instruction set, and golden in fp64.
//
// Bytes: every tensor of tokens is read once, and once more for each mean over a sequence; factors are written, and scaled
// when the denominator is known.
#include <algorithm>

#include "arithmetic/policy_loss/bind.hpp"
#include "native/policy_loss/engine.hpp"
#include "rlk/backend.hpp"
#include "rlk/half.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using loss32::PolicyProblem;
using loss32::problem_of;
using loss32::Weighting;

// A count for each sequence.
std::uint64_t workspace(const PolicyLoss& a, const rlk_request&) {
  return 64 + static_cast<std::uint64_t>(problem_of(a).sequences) * sizeof(float);
}

// Loss and metrics from the totals; returns what the loss was divided by.
double reduce(const Weighting& w, const float* totals, std::int64_t sequences, float* loss, float* metrics) {
  double sums[loss32::kMetrics];
  for (int q = 0; q < loss32::kMetrics; ++q) sums[q] = loss32::over_sequences(w, totals, sequences, q);
  loss32::finish(w, sums, loss, metrics);
  return loss32::denominator_of(w, sums);
}

// totals(sequence, count), then factors(sequence, denominator), for every sequence; tokens of none have factor 0.
template <class Totals, class Factors>
rlk_code run_passes(const PolicyProblem& p, const Call& call, Totals totals, Factors factors) {
  if (p.packed.data != nullptr)
    if (const std::string wrong = loss32::wrong_bounds(PolicyLoss::kName, "cu_seqlens", p.packed);
        !wrong.empty())
      return call.fail(RLK_INVALID_ARGUMENT, wrong);
  auto* bad = reinterpret_cast<float*>(workers::shared_workspace(call));
  call.parallel_for(p.sequences, [&](std::int64_t b) { totals(b, bad + b); });
  const double by = reduce(p.weighting, p.totals, p.sequences, p.loss, p.metrics);
  if (p.metrics != nullptr) {
    double all = 0;
    for (std::int64_t b = 0; b < p.sequences; ++b) all += double{bad[b]};
    p.metrics[loss32::kMetrics] = static_cast<float>(all);
  }
  if (p.factor == nullptr && p.entropy_factor == nullptr) return RLK_OK;
  call.parallel_for(p.sequences, [&](std::int64_t b) { factors(b, by); });
  for (float* x : {p.factor, p.entropy_factor})
    if (x != nullptr) std::fill(x + p.covered(), x + p.tokens, 0.0f);
  return RLK_OK;
}

template <Isa I>
rlk_code run(const PolicyLoss& a, const Call& call) {
  const PolicyProblem p = problem_of(a);
  constexpr const policy_loss::Engine& engine = policy_loss::engine_for(I);
  return run_passes(
      p, call, [&](std::int64_t b, float* bad) { engine.totals(p, b, bad); },
      [&](std::int64_t b, double by) { engine.factors(p, b, by); });
}

// ---- golden

float rounded(double x) { return canonical(static_cast<float>(x)); }

struct GoldenTeam {
  using Sum = double;
  const PolicyProblem& p;
  // body(token, its number) for the tokens of a sequence.
  template <class Body>
  void for_tokens(std::int64_t b, Body body) const {
    for (std::int64_t t = p.first(b); t < p.last(b); ++t) {
      const loss32::Token<float> x = loss32::token_at(p, b, t);
      body(loss32::Token<double>{x.mask, x.logp, x.old, x.advantage, x.rollout, x.ref, x.entropy}, t);
    }
  }
  template <class F, int N>
  void sum(std::int64_t b, const F& f, bool, double (&sums)[N]) const {
    for_tokens(b, [&](const loss32::Token<double>& token, std::int64_t) {
      const loss32::Values<double, N> v = f(token);
      for (int q = 0; q < N; ++q) sums[q] += v.sum[q];
    });
  }
};

void golden_totals(const PolicyProblem& p, std::int64_t b, float* bad) {
  const GoldenTeam team{p};
  const auto facts = loss32::facts_of(p, team, b);
  double sums[loss32::Terms<double>::kSums] = {};
  team.sum(b, loss32::Terms<double>{p, facts}, false, sums);
  for (int q = 0; q < loss32::kTotals; ++q) p.totals[b * loss32::kTotals + q] = rounded(sums[q]);
  *bad = static_cast<float>(sums[loss32::kTotals]);
}
void golden_factors(const PolicyProblem& p, std::int64_t b, double denominator) {
  const GoldenTeam team{p};
  const auto facts = loss32::facts_of(p, team, b);
  const double share =
      loss32::share_of(p.weighting, p.totals[b * loss32::kTotals + loss32::kActive], denominator);
  team.for_tokens(b, [&](const loss32::Token<double>& token, std::int64_t t) {
    const auto v = loss32::Terms<double>{p, facts}(token);
    if (p.factor != nullptr) p.factor[t] = rounded(v.slope == 0 || share == 0 ? 0 : v.slope * share);
    if (p.entropy_factor != nullptr)
      p.entropy_factor[t] = v.active == 0 ? 0 : loss32::entropy_share(p.weighting, share);
  });
}

rlk_code run_golden(const PolicyLoss& a, const Call& call) {
  const PolicyProblem p = problem_of(a);
  return run_passes(
      p, call, [&](std::int64_t b, float* bad) { golden_totals(p, b, bad); },
      [&](std::int64_t b, double by) { golden_factors(p, b, by); });
}

// ---- the gradient, and the reduction of gathered totals

rlk_code run_backward(const PolicyLossBwd& a, const Call& call) {
  constexpr std::int64_t kTask = 16384;
  const loss32::FactorProblem p = problem_of(a);
  const float d_loss = *p.d_loss;
  call.parallel_for((p.tokens + kTask - 1) / kTask, [&](std::int64_t task) {
    for (std::int64_t t = task * kTask; t < std::min(p.tokens, (task + 1) * kTask); ++t) {
      if (p.d_logp != nullptr) p.d_logp[t] = loss32::gradient(p.factor[t], d_loss);
      if (p.d_entropy != nullptr) p.d_entropy[t] = loss32::gradient(p.entropy_factor[t], d_loss);
    }
  });
  return RLK_OK;
}

rlk_code run_reduce(const LossReduce& a, const Call&) {
  reduce(loss32::weighting_of(a), loss32::floats(a.totals), a.totals.dim(0), loss32::floats(a.loss),
         loss32::floats(a.metrics));
  return RLK_OK;
}

// Golden too: nothing but results is rounded.
constexpr Facts exact_facts(const char* id, const char* doc) {
  Facts facts = pinned_facts(doc, "loss32/f64", RLK_F32);
  facts.id = id, facts.traits |= RLK_GOLDEN;
  return facts;
}

}  // namespace

extern const Levels policy_loss_sequences;
constinit const Levels policy_loss_sequences = by_level([]<Isa I>() {
  return implement<PolicyLoss, run<I>, nullptr, workspace>(facts_at<"native.sequences", I>(
      pinned_facts("tokens in fp32, sums by sequence in fp32 and over them in fp64", "loss32/f64", RLK_F32)));
});

extern const rlk_implementation policy_loss_golden, policy_loss_bwd_tokens, loss_reduce_sequences;
constinit const rlk_implementation policy_loss_golden = implement<PolicyLoss, run_golden, nullptr, workspace>(
    golden_facts("ascending fp64 sums, one rounding", RLK_F32));
constinit const rlk_implementation policy_loss_bwd_tokens =
    implement<PolicyLossBwd, run_backward>(exact_facts("native.tokens", "one product a token"));
constinit const rlk_implementation loss_reduce_sequences =
    implement<LossReduce, run_reduce>(exact_facts("native.sequences", "ascending fp64 sums, one rounding"));

}  // namespace rlk::native
