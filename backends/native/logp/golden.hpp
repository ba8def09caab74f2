// A row of logp in fp64: ascending sums, nothing rounded but by logits_round. Golden logp and golden linear_logp share it.
#pragma once

#include <span>

#include "native/logp/engine.hpp"

namespace rlk::native::logp {

inline double round_to(lse128::Type type, double x) {
  if (type == lse128::Type::f32) return x;
  std::uint32_t cell = 0;
  rows::store(type, &cell, 0, x);
  return rows::load(type, &cell, 0);
}
inline double capped(const Problem& p, double z) {
  if (p.cap == 0 || z - z != 0) return z;
  return double{p.cap} * simt::tanh<double>(z / double{p.cap});
}

struct GoldenRow {
  double most = -__builtin_inf(), sum = 0, entropy_sum = 0, target = -__builtin_inf(), tau = 1;

  bool none() const { return sum == 0; }
  double logp() const { return none() ? -__builtin_inf() : (target - most) * tau - simt::ln<double>(sum); }
  double lse() const { return none() ? -__builtin_inf() : simt::fused(most, tau, simt::ln<double>(sum)); }
  double entropy() const { return none() ? 0 : simt::ln<double>(sum) - entropy_sum / sum; }
};

inline double golden_tau(const Problem& p, std::int64_t row) {
  const float t = p.temperatures ? p.temperatures[row] : p.temperature;
  return t > 0 && t < __builtin_inff() ? 1 / double{t} : __builtin_nan("");
}

inline GoldenRow golden_left_out(const Problem& p) {
  GoldenRow r;
  if (p.first == 0) r.most = 0, r.sum = 1, r.target = 0;
  return r;
}

// `z` are the row's entries as they were rounded.
inline GoldenRow golden_row(const Problem& p, std::int64_t row, std::span<const double> z) {
  GoldenRow r;
  r.tau = golden_tau(p, row);
  const auto entry = [&](std::size_t i) {
    return p.kept(row, static_cast<std::int64_t>(i)) ? capped(p, z[i]) : -__builtin_inf();
  };
  for (std::size_t i = 0; i < z.size(); ++i)
    if (const double x = entry(i); x > r.most) r.most = x;
  for (std::size_t i = 0; i < z.size(); ++i) {
    const double x = entry(i);
    if (x == -__builtin_inf()) continue;
    const double d = (x - r.most) * r.tau, e = simt::exp<double>(d);
    r.sum += e;
    r.entropy_sum += e == 0 ? 0 : e * d;
  }
  if (const std::int64_t at = p.column(row); at >= 0) r.target = entry(static_cast<std::size_t>(at));
  return r;
}

inline void write_golden(const Problem& p, std::int64_t row, const GoldenRow& r) {
  const auto put = [](float* to, std::int64_t i, double x) {
    if (to) to[i] = simt::from_float<float>(static_cast<float>(x));
  };
  put(p.logp, row, r.logp());
  put(p.lse, row, r.lse());
  put(p.entropy, row, r.entropy());
  const double all[] = {r.most, r.sum, r.entropy_sum, r.target};
  for (int i = 0; i < lse128::kStats; ++i)
    put(p.stats, lse128::kStats * row + i, r.sum == r.sum ? all[i] : r.sum);
}

// Of the entry in column c, whose logit was rounded to z.
inline double golden_gradient(const Problem& p, std::int64_t row, const GoldenRow& r, double z,
                              std::int64_t c) {
  if (r.none() || !p.kept(row, c)) return 0;
  if (z == -__builtin_inf()) return 0;
  const double x = capped(p, z), d = (x - r.most) * r.tau, prob = simt::exp<double>(d) / r.sum;
  const double g = p.d_logp ? double{p.d_logp[row]} : 0, h = p.d_entropy ? double{p.d_entropy[row]} : 0;
  const double bend = prob == 0 ? 0 : h * prob * (d - simt::ln<double>(r.sum) + r.entropy());
  double slope = r.tau * (g * ((c == p.column(row) ? 1.0 : 0.0) - prob) - bend);
  if (p.cap != 0) {
    const double y = simt::tanh<double>(z / double{p.cap});
    slope *= 1 - y * y;
  }
  return slope;
}

}  // namespace rlk::native::logp
