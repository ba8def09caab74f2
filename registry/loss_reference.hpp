// What the references of the loss ops share, in fp64 and as plainly as it can be said.
#pragma once

#include <cmath>
#include <limits>

#include "registry/reference.hpp"

namespace rlk::registry {

inline double at(const In& t, int64_t i) { return load(t.dtype(), t.data<char>(), i); }
inline void set(const Out& t, int64_t i, double x) { store(t.dtype(), t.data<char>(), i, x); }

inline bool active(const In& mask, int64_t i) { return !mask || at(mask, i) != 0; }

// Two equal infinities differ by nothing.
inline double log_ratio(double now, double before) { return now == before ? 0 : now - before; }
inline double held(double x, double limit) { return x < -limit ? -limit : x > limit ? limit : x; }
// 0 stands for no limit.
inline double limit_of(double attribute) {
  return attribute == 0 ? std::numeric_limits<double>::infinity() : static_cast<float>(attribute);
}

struct KlOptions {
  enum Kind { k1, k2, k3, k3_st } kind;
  double d_limit, limit;
};
struct KlEstimate {
  double value, slope;
};
inline KlEstimate kl_estimate(const KlOptions& o, double logp, double ref) {
  const double raw = log_ratio(ref, logp), d = held(raw, o.d_limit);
  double k3 = std::expm1(d) - d;
  if (std::fabs(d) < 0.25) {  // d^2 / 2! + d^3 / 3! + ...
    double term = d * d / 2;
    k3 = 0;
    for (int n = 3; n < 20; ++n) k3 += term, term *= d / n;
  }
  KlEstimate e{-d, 1};
  if (o.kind == KlOptions::k2) e = {d * d / 2, -d};
  if (o.kind == KlOptions::k3) e = {k3, -std::expm1(d)};
  if (o.kind == KlOptions::k3_st) e = {k3, -d};
  if (std::fabs(raw) > o.d_limit || std::fabs(e.value) > o.limit) e.slope = 0;
  e.value = held(e.value, o.limit);
  return e;
}

}  // namespace rlk::registry
