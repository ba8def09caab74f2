// What the written rules of loss32/f64 share: one token in fp32, independent of every kernel.
#pragma once

#include <cmath>
#include <limits>

#include "registry/exp32.hpp"
#include "registry/reference.hpp"
#include "rlk/half.hpp"

namespace rlk::registry::rule32 {

inline float at(const In& t, int64_t i) { return static_cast<float>(load(t.dtype(), t.data<char>(), i)); }
inline void set(const Out& t, int64_t i, float x) { t.data<float>()[i] = canonical(x); }
inline bool active(const In& mask, int64_t i) { return !mask || at(mask, i) != 0; }

inline float log_ratio(float now, float before) { return now == before ? 0 : now - before; }
inline float held(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }
inline bool beyond(float x, float limit) { return x < -limit || x > limit; }
inline float limit_of(double attribute) {
  return attribute == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(attribute);
}

// e^d - 1 - d: |d| < 1 takes d^2 (1/2! + d/3! + ... + d^9/11!), from the highest power down.
inline float k3(float d) {
  if (!(std::fabs(d) < 1)) return expm1_32(d) - d;
  float factorial = 39916800, series = 1 / factorial;
  for (int n = 11; n > 2; --n) {
    factorial /= static_cast<float>(n);
    series = std::fma(series, d, 1 / factorial);
  }
  return d * d * series;
}

struct Estimate {
  float value, slope;
};
// kind: 0 to 3 for k1, k2, k3, k3_st.
inline Estimate kl_estimate(int kind, float d_limit, float limit, float logp, float ref) {
  const float raw = log_ratio(ref, logp), d = held(raw, d_limit);
  Estimate e{kind == 0   ? -d
             : kind == 1 ? d * d * 0.5f
                         : k3(d),
             kind == 0   ? 1
             : kind == 2 ? -expm1_32(d)
                         : -d};
  if (beyond(raw, d_limit) || beyond(e.value, limit)) e.slope = 0;
  e.value = held(e.value, limit);
  return e;
}

}  // namespace rlk::registry::rule32
