// ratio_kl in fp32 (arithmetic id loss32/f64): the call as plain data, and what is done to one token.
#pragma once

#include "arithmetic/loss.hpp"

namespace rlk::loss32 {

// Both directions; what is absent is null.
struct RatioProblem {
  std::int64_t tokens = 0;
  float clamp = 0;
  KlRule rule;
  Mask mask;
  const float *logp = nullptr, *old = nullptr, *ref = nullptr;
  const float *d_ratio = nullptr, *d_kl = nullptr;
  float *ratio = nullptr, *kl = nullptr, *d_logp = nullptr;
};

template <class T>
RLK_HD T ratio_of(const RatioProblem& p, T mask, T logp, T old) {
  const T zero{}, one = zero + 1;
  const T x = log_ratio<T>(mask != zero ? logp : zero, mask != zero ? old : zero);
  return mask != zero ? simt::exp<T>(hold<T>(x, p.clamp)) : one;
}
template <class T>
RLK_HD T kl_of(const RatioProblem& p, T mask, T logp, T ref) {
  const T zero{};
  const T value = kl_term<T>(p.rule, mask != zero ? logp : zero, mask != zero ? ref : zero).value;
  return mask != zero ? value : zero;
}

template <class T>
RLK_HD T through_ratio(const RatioProblem& p, T mask, T logp, T old, T d_ratio) {
  const T zero{};
  const T x = log_ratio<T>(mask != zero ? logp : zero, mask != zero ? old : zero);
  const T slope = simt::exp<T>(hold<T>(x, p.clamp)) * (mask != zero ? d_ratio : zero);
  const T inside = within<T>(x, p.clamp, slope);
  return mask != zero ? inside : zero;
}
template <class T>
RLK_HD T through_kl(const RatioProblem& p, T mask, T logp, T ref, T d_kl) {
  const T zero{};
  const T slope = kl_term<T>(p.rule, mask != zero ? logp : zero, mask != zero ? ref : zero).slope;
  const T product = slope * d_kl, inside = slope == zero ? zero : product;
  return mask != zero ? inside : zero;
}

}  // namespace rlk::loss32
