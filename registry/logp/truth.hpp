// A row's log-probability in fp64, as plainly as it can be said: what the references of logp and linear_logp share. Nothing
// is rounded but by logits_round.
#pragma once

#include <cmath>
#include <vector>

#include "registry/reference.hpp"

namespace rlk::registry::logp {

enum class Target { token, ignored, bad };

// The parts of a call, from the arguments of either op.
template <class Args>
class Layout {
 public:
  // `columns` of the logits, were they a tensor.
  Layout(const Args& a, int64_t columns) : a_(a) {
    const int64_t vocab = a.vocab ? a.vocab : columns, leaf = 16 * ((vocab + 127) / 128);
    vocab_ = vocab;
    start_ = std::min(vocab, a.leaf_first * leaf);
    here_ = std::min(vocab, (a.leaf_first + a.leaf_count) * leaf) - start_;
  }
  int64_t here() const { return here_; }
  bool first() const { return a_.leaf_first == 0; }

  double tau(int64_t row) const {
    const double t =
        a_.temperatures ? Rows(a_.temperatures).get(0, row) : double{static_cast<float>(a_.temperature)};
    return t > 0 && std::isfinite(t) ? 1 / t : NAN;
  }
  Target target(int64_t row) const {
    const int64_t id = id_of(row);
    return id == a_.ignore_index ? Target::ignored : id < 0 || id >= vocab_ ? Target::bad : Target::token;
  }
  // -1: in another part of the vocabulary.
  int64_t column(int64_t row) const {
    const int64_t at = id_of(row) - start_;
    return at >= 0 && at < here_ ? at : -1;
  }
  bool kept(int64_t row, int64_t column) const {
    if (!a_.keep) return true;
    const auto word = static_cast<uint32_t>(static_cast<int64_t>(Rows(a_.keep).get(row, column / 32)));
    return word >> (column % 32) & 1;
  }
  DType round() const {
    using Round = decltype(a_.logits_round);
    return a_.logits_round == Round::bf16   ? DType::bf16
           : a_.logits_round == Round::fp16 ? DType::f16
                                            : DType::f64;
  }
  double cap() const { return static_cast<float>(a_.softcap); }
  // What a logit is before the temperature. An infinite one stays infinite.
  double entry(double z) const {
    if (round() != DType::f64) z = round_to(round(), z);
    return cap() > 0 && !std::isinf(z) ? cap() * std::tanh(z / cap()) : z;
  }
  // Rows whose target is no token or is not kept.
  int64_t bad(int64_t rows) const {
    int64_t n = 0;
    for (int64_t m = 0; m < rows; ++m) {
      const Target t = target(m);
      if (t == Target::bad) n += first();
      if (t == Target::token && column(m) >= 0) n += !kept(m, column(m));
    }
    return n;
  }

 private:
  int64_t id_of(int64_t row) const {
    const int64_t at = a_.target.stride(0) * row;
    return a_.target.dtype() == DType::i32 ? a_.target.template data<int32_t>()[at]
                                           : a_.target.template data<int64_t>()[at];
  }
  const Args& a_;
  int64_t vocab_, start_, here_;
};

// Of one row; `z` are its entries after entry(), -inf where one takes no part.
struct Truth {
  double most = -INFINITY, sum = 0, entropy_sum = 0, target = -INFINITY;
  double tau;

  Truth(const std::vector<double>& z, double t, int64_t column) : tau(t) {
    for (double x : z)
      if (x > most) most = x;
    for (double x : z) {
      if (x == -INFINITY) continue;
      const double e = std::exp((x - most) * tau);
      sum += e;
      entropy_sum += e == 0 ? 0 : e * ((x - most) * tau);
    }
    if (column >= 0) target = z[static_cast<std::size_t>(column)];
  }
  explicit Truth(double t) : tau(t) {}  // of a row that is left out, in the first part
  bool none() const { return sum == 0; }
  double logp() const { return none() ? -INFINITY : (target - most) * tau - std::log(sum); }
  double lse() const { return none() ? -INFINITY : std::fma(most, tau, std::log(sum)); }
  double entropy() const { return none() ? 0 : std::log(sum) - entropy_sum / sum; }
  // d/dz of g_logp * logp + g_entropy * entropy, times what softcap leaves of it.
  double slope(double z, bool is_target, double g_logp, double g_entropy) const {
    if (none() || z == -INFINITY) return 0;
    const double p = std::exp((z - most) * tau) / sum;
    const double ln_p = (z - most) * tau - std::log(sum);
    const double bend = p == 0 ? 0 : g_entropy * p * (ln_p + entropy());
    return tau * (g_logp * (is_target - p) - bend);
  }
  void join(const Truth& b) {
    if (b.target != -INFINITY) target = b.target;
    if (b.none()) return;
    if (none()) {
      most = b.most, sum = b.sum, entropy_sum = b.entropy_sum;
      return;
    }
    const double top = b.most > most ? b.most : most;
    const auto scaled = [&](double m, double s, double u, double& to_s, double& to_u) {
      const double d = (m - top) * tau, a = std::exp(d);
      to_s = s * a;
      to_u = a == 0 ? 0 : (s * d + u) * a;
    };
    double s1, u1, s2, u2;
    scaled(most, sum, entropy_sum, s1, u1);
    scaled(b.most, b.sum, b.entropy_sum, s2, u2);
    most = top, sum = s1 + s2, entropy_sum = u1 + u2;
  }
};

// Rows whose target is left out: 0 everywhere, which shards say by the sum 1 in the first of them.
inline Truth left_out(bool first) {
  Truth t(1.0);
  if (first) t.most = 0, t.sum = 1, t.target = 0;
  return t;
}

template <class Args>
void write_truth(const Args& a, int64_t row, const Truth& t) {
  if (a.logp) Rows(a.logp).set(0, row, t.logp());
  if (a.lse) Rows(a.lse).set(0, row, t.lse());
  if (a.entropy) Rows(a.entropy).set(0, row, t.entropy());
  if (!a.stats) return;
  const double all[] = {t.most, t.sum, t.entropy_sum, t.target};
  for (int i = 0; i < 4; ++i) Rows(a.stats).set(row, i, std::isnan(t.sum) ? NAN : all[i]);
}

}  // namespace rlk::registry::logp
