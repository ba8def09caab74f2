// policy_loss (arithmetic id loss32/f64): the call as plain data, what is computed of one token and of one sequence, and how
// totals become a loss. Templates over float, double, or a GCC vector of float.
//
// A token is fp32; sums over a sequence ascend from +0 in fp32; sums over sequences ascend in fp64. A team (native code, or a
// GPU block) computes tokens side by side and adds them in order.
#pragma once

#include "arithmetic/loss.hpp"

namespace rlk::loss32 {

enum class Level : std::int32_t { token, sequence };
enum class Form : std::int32_t { clip, cispo, reinforce, soft_gate };
enum class IsMode : std::int32_t { none, truncate, mask, zero };
enum class IsLevel : std::int32_t { token, sequence, geometric };
enum class Agg : std::int32_t { token_mean, seq_mean_token_mean, seq_mean_token_sum, constant };

// Of a sequence, in this order: sums of policy terms, estimates and entropies, and counts.
enum { kPolicy, kKl, kEntropy, kActive, kClipped, kTotals };
// Of a call: kPolicy, kKl, kEntropy as they enter the loss, active tokens, the clipped share of them, active sequences.
inline constexpr int kSequences = kTotals, kMetrics = kTotals + 1;

inline constexpr float kLeastLog = -104;  // where exp_32 ends: stands for -inf in products

// How totals become a loss.
struct Weighting {
  enum Type : std::int32_t { f32, f64, i32, i64 };
  Agg agg = Agg::token_mean;
  float kl_coef = 0, entropy_coef = 0;
  const void* denominator = nullptr;  // absent: the call's own
  Type type = f32;

  RLK_HD double given() const {
    if (type == f32) return static_cast<double>(*static_cast<const float*>(denominator));
    if (type == f64) return *static_cast<const double*>(denominator);
    if (type == i32) return static_cast<double>(*static_cast<const std::int32_t*>(denominator));
    return static_cast<double>(*static_cast<const std::int64_t*>(denominator));
  }
};

struct PolicyProblem {
  Bounds packed;  // of tokens, or no data: rows of `width`
  std::int64_t sequences = 0, width = 0, tokens = 0;
  const float *logp = nullptr, *old = nullptr, *advantage = nullptr, *rollout = nullptr, *ref = nullptr,
              *entropy = nullptr;
  bool advantage_of_sequence = false;
  Mask mask;
  Level level = Level::token;
  Form form = Form::clip;
  IsMode is_mode = IsMode::none;
  IsLevel is_level = IsLevel::token;
  float clip_low = 0, clip_high = 0, dual_clip = 0, tau_positive = 1, tau_negative = 1;
  float clamp = 0, sequence_clamp = 0, is_low = 0, is_high = 0;
  KlRule kl;
  Weighting weighting;
  float *loss = nullptr, *totals = nullptr, *metrics = nullptr, *factor = nullptr, *entropy_factor = nullptr;

  RLK_HD std::int64_t first(std::int64_t b) const { return packed.data ? packed.at(b) : b * width; }
  RLK_HD std::int64_t last(std::int64_t b) const { return packed.data ? packed.end(b) : (b + 1) * width; }
  RLK_HD std::int64_t covered() const {
    return packed.data ? (sequences > 0 ? packed.at(sequences) : 0) : tokens;
  }
};

// ---- one token

template <class T>
struct Token {
  T mask, logp, old, advantage, rollout, ref, entropy;
};

// What a token knows of its sequence.
template <class S>
struct Sequence {
  S weight = 1, ratio = 1;
  bool inside = true;  // the ratio is not held
};

// A masked token's numbers are replaced by zeros.
template <class T>
RLK_HD Token<T> read(const Token<T>& t) {
  const T zero{};
  return {t.mask,
          t.mask != zero ? t.logp : zero,
          t.mask != zero ? t.old : zero,
          t.mask != zero ? t.advantage : zero,
          t.mask != zero ? t.rollout : zero,
          t.mask != zero ? t.ref : zero,
          t.mask != zero ? t.entropy : zero};
}

// Of the policy that answered to the one that is trained: the factor of a token, and whether it stays.
template <class T>
struct Weight {
  T value, active, in;
};
template <class T>
RLK_HD Weight<T> weight_of(const PolicyProblem& p, const Sequence<Scalar<T>>& s, const Token<T>& t) {
  const T zero{}, one = zero + 1;
  const T present = t.mask != zero ? one : zero;
  if (p.is_mode == IsMode::none) return {one, present, one};
  T w = zero + s.weight;
  if (p.is_level == IsLevel::token) w = simt::exp<T>(hold<T>(log_ratio<T>(t.old, t.rollout), p.clamp));
  const T most = zero + p.is_high, least = zero + p.is_low;
  if (p.is_mode == IsMode::truncate) return {w > most ? most : w, present, one};
  const T above = w > most ? zero : one, in = w < least ? zero : above;
  return {w, p.is_mode == IsMode::mask ? (in != zero ? present : zero) : present, in};
}

// A policy term and its derivative by logp.
template <class T>
struct Term {
  T value, slope, clipped;
};

// ratio and its derivative, which is the ratio itself or +0.
template <class T>
RLK_HD Term<T> clipped_term(const PolicyProblem& p, T a, T ratio, T moving) {
  const T zero{}, one = zero + 1;
  const T low = one - Scalar<T>(p.clip_low), high = one + Scalar<T>(p.clip_high);
  const T above = ratio > high ? high : ratio, bounded = ratio < low ? low : above;
  const T free = a * ratio, held = a * bounded, slope = a * moving;
  Term<T> out{held > free ? held : free, held > free ? zero : slope, held > free ? one : zero};
  if (p.dual_clip <= 0) return out;
  const T most = a * Scalar<T>(p.dual_clip), cap = a > zero ? most : zero + __builtin_inff();
  out.slope = out.value > cap ? zero : out.slope;
  out.clipped = out.value > cap ? one : out.clipped;
  out.value = out.value > cap ? cap : out.value;
  return out;
}
// factor * logp, where the factor has no derivative.
template <class T>
RLK_HD Term<T> weighted_log(T factor, T logp) {
  const T zero{}, least = zero + kLeastLog, infinity = zero + __builtin_inff(), none = -infinity;
  const T bounded = logp == none ? least : logp;
  return {factor * bounded, logp == none ? zero : factor, zero};
}
template <class T>
RLK_HD Term<T> gated_term(const PolicyProblem& p, T advantage, T a, T ratio, T moving) {
  const T zero{}, one = zero + 1, positive = zero + p.tau_positive, negative = zero + p.tau_negative;
  const T tau = advantage > zero ? positive : negative;
  const T z = tau * (ratio - one), minus = -z;
  const T e = simt::exp<T>(minus), gate = one / (e + 1);
  const T bend = Scalar<T>(4) * gate * (e * gate);
  return {a * (Scalar<T>(4) / tau * gate), a * bend * moving, zero};
}

template <class T>
RLK_HD Term<T> policy_term(const PolicyProblem& p, const Sequence<Scalar<T>>& s, const Token<T>& t) {
  const T zero{}, one = zero + 1, a = -t.advantage;
  const T x = log_ratio<T>(t.logp, t.old);
  T ratio = zero + s.ratio;
  if (p.level == Level::token) ratio = simt::exp<T>(hold<T>(x, p.clamp));
  const T moving = s.inside ? within<T>(x, p.clamp, ratio) : zero;
  if (p.form == Form::clip) return clipped_term<T>(p, a, ratio, moving);
  if (p.form == Form::soft_gate) return gated_term<T>(p, t.advantage, a, ratio, moving);
  if (p.form == Form::reinforce) return weighted_log<T>(a, t.logp);
  const T high = one + Scalar<T>(p.clip_high), bounded = ratio > high ? high : ratio;
  Term<T> out = weighted_log<T>(a * bounded, t.logp);
  out.clipped = ratio > high ? one : zero;
  return out;
}

RLK_HD Token<float> token_at(const PolicyProblem& p, std::int64_t b, std::int64_t t) {
  const auto get = [t](const float* x) { return x != nullptr ? x[t] : 0.0f; };
  return {p.mask.at(t),   p.logp[t],  p.old[t],      p.advantage[p.advantage_of_sequence ? b : t],
          get(p.rollout), get(p.ref), get(p.entropy)};
}

// ---- what a team sums: N values a token

template <class T, int N>
struct Values {
  T sum[N];
  T slope, active;
};

// The log-weight of a token and its count, before any token leaves.
struct WeightLogs {
  static constexpr int kSums = 2;
  const PolicyProblem& p;
  template <class T>
  RLK_HD Values<T, kSums> operator()(const Token<T>& token) const {
    const Token<T> t = read(token);
    const T zero{}, one = zero + 1;
    return {{log_ratio<T>(t.old, t.rollout), t.mask != zero ? one : zero}, zero, zero};
  }
};
// The log-ratio of an active token and its count.
template <class S>
struct RatioLogs {
  static constexpr int kSums = 2;
  const PolicyProblem& p;
  const Sequence<S>& s;
  template <class T>
  RLK_HD Values<T, kSums> operator()(const Token<T>& token) const {
    const Token<T> t = read(token);
    const T zero{}, active = weight_of<T>(p, s, t).active;
    const T x = hold<T>(log_ratio<T>(t.logp, t.old), p.clamp);
    return {{active != zero ? x : zero, active}, zero, zero};
  }
};
// Totals, and the count of active tokens whose logp or old_logp is -inf.
template <class S>
struct Terms {
  static constexpr int kSums = kTotals + 1;
  const PolicyProblem& p;
  const Sequence<S>& s;
  template <class T>
  RLK_HD Values<T, kSums> operator()(const Token<T>& token) const {
    const Token<T> t = read(token);
    const T zero{}, one = zero + 1, infinity = zero + __builtin_inff(), none = -infinity;
    const Weight<T> w = weight_of<T>(p, s, t);
    Term<T> term = policy_term<T>(p, s, t);
    if (p.is_mode != IsMode::none) {
      const T value = w.value * term.value, slope = w.value * term.slope;
      term.value = w.in != zero ? value : zero;
      term.slope = w.in != zero ? slope : zero;
    }
    KlTerm<T> kl{zero, zero};
    if (p.kl.kind != Kl::off) kl = kl_term<T>(p.kl, t.logp, t.ref);
    if (p.weighting.kl_coef != 0) term.slope = term.slope + Scalar<T>(p.weighting.kl_coef) * kl.slope;
    const T without_logp = t.logp == none ? one : zero, bad = t.old == none ? one : without_logp;
    const T active = w.active;
    return {{active != zero ? term.value : zero, active != zero ? kl.value : zero,
             active != zero ? t.entropy : zero, active, active != zero ? term.clipped : zero,
             active != zero ? bad : zero},
            active != zero ? term.slope : zero,
            active};
  }
};

// ---- one sequence

// team.sum(first, last, values, keep, sums) adds the values of the tokens to `sums`, and leaves slopes and activity of each
// token where the team keeps them if `keep`.
template <class Team>
RLK_HD Sequence<typename Team::Sum> facts_of(const PolicyProblem& p, Team& team, std::int64_t b) {
  using S = typename Team::Sum;
  Sequence<S> s;
  if (p.is_mode != IsMode::none && p.is_level != IsLevel::token) {
    S sums[2] = {};
    team.sum(b, WeightLogs{p}, false, sums);
    S log = sums[0];
    if (p.is_level == IsLevel::geometric) log = sums[1] == 0 ? 0 : sums[0] / sums[1];
    s.weight = simt::exp<S>(hold<S>(log, p.clamp));
  }
  if (p.level == Level::sequence) {
    S sums[2] = {};
    team.sum(b, RatioLogs<S>{p, s}, false, sums);
    const S mean = sums[1] == 0 ? 0 : sums[0] / sums[1], most = p.sequence_clamp;
    s.inside = !(mean > most);
    s.ratio = simt::exp<S>(mean > most ? most : mean);
  }
  return s;
}

// ---- all sequences

// What a sequence of these totals adds: to `quantity` as it enters the loss, or to a count.
RLK_HD double contribution(const Weighting& w, const float* totals, int quantity) {
  const auto active = static_cast<double>(totals[kActive]);
  if (active == 0) return 0;
  const double x = quantity == kSequences ? 1 : static_cast<double>(totals[quantity]);
  return quantity < kActive && w.agg == Agg::seq_mean_token_mean ? x / active : x;
}
// That of all sequences, ascending in fp64.
RLK_HD double over_sequences(const Weighting& w, const float* totals, std::int64_t sequences, int quantity) {
  double sum = 0;
  for (std::int64_t b = 0; b < sequences; ++b) sum += contribution(w, totals + b * kTotals, quantity);
  return sum;
}

// What sums are divided by.
RLK_HD double denominator_of(const Weighting& w, const double* sums) {
  if (w.denominator != nullptr) return w.given();
  return w.agg == Agg::token_mean ? sums[kActive] : sums[kSequences];
}

// From the six sums to the loss; metrics may be null.
RLK_HD void finish(const Weighting& w, const double* sums, float* loss, float* metrics) {
  const double by = denominator_of(w, sums);
  double part[kActive];
  for (int q = 0; q < kActive; ++q) part[q] = by == 0 ? 0 : sums[q] / by;
  double total = part[kPolicy];
  if (w.kl_coef != 0) total = simt::fused(static_cast<double>(w.kl_coef), part[kKl], total);
  if (w.entropy_coef != 0) total = simt::fused(-static_cast<double>(w.entropy_coef), part[kEntropy], total);
  *loss = simt::from_float<float>(static_cast<float>(total));
  if (metrics == nullptr) return;
  for (int q = 0; q < kActive; ++q) metrics[q] = simt::from_float<float>(static_cast<float>(part[q]));
  metrics[kActive] = static_cast<float>(sums[kActive]);
  metrics[kClipped] = sums[kActive] == 0 ? 0 : static_cast<float>(sums[kClipped] / sums[kActive]);
  metrics[kSequences] = static_cast<float>(sums[kSequences]);
}

// The part of the loss that a token of this sequence has.
RLK_HD double share_of(const Weighting& w, float active, double by) {
  if (by == 0 || active == 0) return 0;
  return w.agg == Agg::seq_mean_token_mean ? 1 / static_cast<double>(active) / by : 1 / by;
}

// What the entropy of an active token is multiplied by in the loss.
RLK_HD float entropy_share(const Weighting& w, double share) {
  return static_cast<float>(-static_cast<double>(w.entropy_coef) * share) + 0.0f;  // never -0
}

// policy_loss_bwd: each gradient is its factor times d_loss, +0 where the factor is 0.
struct FactorProblem {
  std::int64_t tokens = 0;
  const float *d_loss = nullptr, *factor = nullptr, *entropy_factor = nullptr;
  float *d_logp = nullptr, *d_entropy = nullptr;
};
RLK_HD float gradient(float factor, float d_loss) {
  return simt::from_float<float>(factor == 0 ? 0 : factor * d_loss);
}

}  // namespace rlk::loss32
