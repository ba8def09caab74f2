// policy_loss in plain loops, once for the reference (fp64) and the written rule (fp32): F is the type of every number and
// M its exponential and KL estimate. No kernel includes this.
#pragma once

#include <limits>
#include <vector>

#include "registry/reference.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::plain {

template <class F, bool Writable>
F at(const View<Writable>& t, int64_t i) {
  return static_cast<F>(load(t.dtype(), t.template data<char>(), i));
}
template <class F>
F option(double attribute) {
  return static_cast<F>(static_cast<float>(attribute));
}

// Of a sequence: policy, kl, entropy, active, clipped; and active tokens without a log-probability.
template <class F>
struct Sums {
  F total[5] = {}, bad = 0;
};

template <class F, class M>
class Policy {
 public:
  explicit Policy(const PolicyLoss& a) : a_(a), clamp_(option<F>(a.clamp)) {}

  int64_t sequences() const { return a_.cu_seqlens ? a_.cu_seqlens.dim(0) - 1 : a_.logp.dim(0); }
  int64_t first(int64_t b) const {
    return a_.cu_seqlens ? static_cast<int64_t>(load(a_.cu_seqlens.dtype(), a_.cu_seqlens.data<char>(), b))
                         : b * a_.logp.dim(1);
  }
  int64_t last(int64_t b) const { return first(b + 1); }

  // Slopes of all tokens of the sequence, and whether they are active, beside its sums.
  Sums<F> sequence(int64_t b, std::vector<F>& slopes, std::vector<bool>& activity) const {
    std::vector<F> weights, ratios;
    std::vector<bool> active, in, moves;
    weigh(b, weights, active, in);
    take_ratios(b, active, ratios, moves);
    Sums<F> sums;
    for (int64_t t = first(b); t < last(b); ++t) {
      const auto i = static_cast<std::size_t>(t - first(b));
      activity[static_cast<std::size_t>(t)] = active[i];
      if (!active[i]) continue;
      Term term = policy(b, t, ratios[i], moves[i]);
      if (a_.is_mode != PolicyLoss::IsMode::none) {
        term.value = in[i] ? weights[i] * term.value : 0;
        term.slope = in[i] ? weights[i] * term.slope : 0;
      }
      sums.total[0] += term.value;
      sums.total[3] += 1;
      sums.total[4] += static_cast<F>(term.clipped);
      if (a_.kl != PolicyLoss::Kl::off) {
        const auto [value, slope] = M::estimate(a_, at<F>(a_.logp, t), at<F>(a_.ref_logp, t));
        sums.total[1] += value;
        if (const F coef = option<F>(a_.kl_coef); coef != 0) term.slope = term.slope + coef * slope;
      }
      if (a_.entropy) sums.total[2] += at<F>(a_.entropy, t);
      sums.bad += static_cast<F>(at<F>(a_.logp, t) == -kInfinity || at<F>(a_.old_logp, t) == -kInfinity);
      slopes[static_cast<std::size_t>(t)] = term.slope;
    }
    return sums;
  }

 private:
  static constexpr F kInfinity = std::numeric_limits<F>::infinity();
  struct Term {
    F value, slope;
    bool clipped = false;
  };

  static F difference(F now, F before) { return now == before ? 0 : now - before; }
  static F held(F x, F limit) { return x < -limit ? -limit : x > limit ? limit : x; }
  bool masked(int64_t t) const { return a_.mask && at<F>(a_.mask, t) == 0; }
  F log_weight(int64_t t) const { return difference(at<F>(a_.old_logp, t), at<F>(a_.rollout_logp, t)); }
  F log_ratio(int64_t t) const { return difference(at<F>(a_.logp, t), at<F>(a_.old_logp, t)); }

  void weigh(int64_t b, std::vector<F>& weights, std::vector<bool>& active, std::vector<bool>& in) const {
    F sum = 0, count = 0;
    for (int64_t t = first(b); t < last(b); ++t) {
      active.push_back(!masked(t));
      if (a_.is_mode == PolicyLoss::IsMode::none || masked(t)) continue;
      sum += log_weight(t), count += 1;
    }
    if (a_.is_level == PolicyLoss::IsLevel::geometric && count != 0) sum = sum / count;
    const F low = option<F>(a_.is_low), high = option<F>(a_.is_high);
    for (int64_t t = first(b); t < last(b); ++t) {
      const auto i = static_cast<std::size_t>(t - first(b));
      F w = 1;
      if (a_.is_mode != PolicyLoss::IsMode::none && active[i])
        w = M::exp(held(a_.is_level == PolicyLoss::IsLevel::token ? log_weight(t) : sum, clamp_));
      const bool truncates = a_.is_mode == PolicyLoss::IsMode::truncate;
      in.push_back(truncates || !(w < low || w > high));
      weights.push_back(truncates && w > high ? high : w);
      if (a_.is_mode == PolicyLoss::IsMode::mask && !in[i]) active[i] = false;
    }
  }

  void take_ratios(int64_t b, const std::vector<bool>& active, std::vector<F>& ratios,
                   std::vector<bool>& moves) const {
    F sum = 0, count = 0;
    for (int64_t t = first(b); t < last(b); ++t)
      if (active[static_cast<std::size_t>(t - first(b))]) sum += held(log_ratio(t), clamp_), count += 1;
    const F mean = count == 0 ? 0 : sum / count, most = option<F>(a_.sequence_clamp);
    for (int64_t t = first(b); t < last(b); ++t) {
      const bool mine = a_.level == PolicyLoss::Level::token,
                 here = active[static_cast<std::size_t>(t - first(b))];
      const F x = here ? log_ratio(t) : 0;
      ratios.push_back(M::exp(mine ? held(x, clamp_) : mean > most ? most : mean));
      moves.push_back(!(x < -clamp_ || x > clamp_) && (mine || !(mean > most)));
    }
  }

  Term policy(int64_t b, int64_t t, F ratio, bool moves) const {
    using Form = PolicyLoss::Form;
    const F advantage =
        at<F>(a_.advantages, a_.advantages_per == PolicyLoss::AdvantagesPer::sequence ? b : t);
    const F a = -advantage, low = 1 - option<F>(a_.clip_low), high = 1 + option<F>(a_.clip_high);
    if (a_.form == Form::clip) {
      const F free = a * ratio, bounded = a * (ratio < low ? low : ratio > high ? high : ratio);
      Term term{free, moves ? a * ratio : a * 0};
      if (bounded > free) term = {bounded, 0, true};
      const F most = a * option<F>(a_.dual_clip);
      if (a_.dual_clip > 0 && a > 0 && term.value > most) term = {most, 0, true};
      return term;
    }
    if (a_.form == Form::soft_gate) {
      const F tau = option<F>(advantage > 0 ? a_.tau_positive : a_.tau_negative);
      const F e = M::exp(-(tau * (ratio - 1))), gate = 1 / (e + 1);
      return {a * (4 / tau * gate), a * (4 * gate * (e * gate)) * (moves ? ratio : 0)};
    }
    const bool cispo = a_.form == Form::cispo;
    const F factor = cispo ? a * (ratio > high ? high : ratio) : a, logp = at<F>(a_.logp, t);
    if (logp == -kInfinity) return {factor * -104, 0, cispo && ratio > high};
    return {factor * logp, factor, cispo && ratio > high};
  }

  const PolicyLoss& a_;
  F clamp_;
};

// The loss of totals, in fp64 for both; `by` is what sums are divided by.
struct Reduced {
  double loss, metrics[6], by;
};
template <class Args>
Reduced reduce(const Args& a, const double* totals, int64_t sequences) {
  using Agg = typename Args::Agg;
  double sum[3] = {}, active = 0, clipped = 0, count = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    const double* t = totals + 5 * b;
    if (t[3] == 0) continue;
    for (int q = 0; q < 3; ++q) sum[q] += a.agg == Agg::seq_mean_token_mean ? t[q] / t[3] : t[q];
    active += t[3], clipped += t[4], count += 1;
  }
  Reduced r{0, {}, a.agg == Agg::token_mean ? active : count};
  if (a.denominator) r.by = at<double>(a.denominator, 0);
  for (int q = 0; q < 3; ++q) r.metrics[q] = r.by == 0 ? 0 : sum[q] / r.by;
  r.metrics[3] = active, r.metrics[4] = active == 0 ? 0 : clipped / active, r.metrics[5] = count;
  const double kl = option<double>(a.kl_coef), entropy = option<double>(a.entropy_coef);
  r.loss = r.metrics[0];
  if (kl != 0) r.loss = std::fma(kl, r.metrics[1], r.loss);
  if (entropy != 0) r.loss = std::fma(-entropy, r.metrics[2], r.loss);
  return r;
}

// put(tensor, element, number) stores a result as F means it.
template <class F, class M, class Put>
void policy_loss(const PolicyLoss& a, Put put) {
  const Policy<F, M> policy(a);
  const int64_t tokens = a.logp.numel();
  std::vector<F> slopes(static_cast<std::size_t>(tokens));
  std::vector<bool> active(static_cast<std::size_t>(tokens));
  std::vector<double> totals;
  double bad = 0;
  for (int64_t b = 0; b < policy.sequences(); ++b) {
    const Sums<F> sums = policy.sequence(b, slopes, active);
    for (int q = 0; q < 5; ++q) {
      put(a.totals, 5 * b + q, sums.total[q]);
      totals.push_back(at<double>(a.totals, 5 * b + q));
    }
    bad += double{sums.bad};
  }
  const Reduced r = reduce(a, totals.data(), policy.sequences());
  put(a.loss, 0, r.loss);
  for (int64_t q = 0; a.metrics && q < 7; ++q) put(a.metrics, q, q < 6 ? r.metrics[q] : bad);
  for (int64_t t = 0; t < tokens; ++t) {
    if (a.factor) put(a.factor, t, F(0));
    if (a.entropy_factor) put(a.entropy_factor, t, F(0));
  }
  for (int64_t b = 0; b < policy.sequences(); ++b)
    for (int64_t t = policy.first(b); t < policy.last(b); ++t) {
      const auto i = static_cast<std::size_t>(t);
      const double count = totals[static_cast<std::size_t>(5 * b + 3)];
      double share = r.by == 0 || count == 0 ? 0 : 1 / r.by;
      if (share != 0 && a.agg == PolicyLoss::Agg::seq_mean_token_mean) share = 1 / count / r.by;
      const F by = static_cast<F>(share);
      if (a.factor) put(a.factor, t, slopes[i] == 0 || by == 0 ? F(0) : slopes[i] * by);
      if (a.entropy_factor && active[i])
        put(a.entropy_factor, t, static_cast<F>(-option<double>(a.entropy_coef) * share) + F(0));
    }
}

}  // namespace rlk::registry::plain
