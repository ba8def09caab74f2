// What the loss ops compute of one token (arithmetic id loss32/f64): templates over float, double, or a GCC vector of float.
// Every operation is rounded to nearest; exp_32 and expm1_32 are those of math.hpp. Knows nothing of the registry.
//
// A masked token's numbers are replaced before anything is computed of them, so that none of them reaches a result.
#pragma once

#include <cstdint>

#include "arithmetic/math.hpp"

namespace rlk::loss32 {

template <class T>
using Scalar = decltype(simt::ExpConstants<T>::kShift + 0);

// One weight a token: floats, or bytes of a bool; absent: all tokens are active.
struct Mask {
  const void* data = nullptr;
  bool bytes = false;
  RLK_HD float at(std::int64_t i) const {
    if (data == nullptr) return 1;
    return bytes ? static_cast<float>(static_cast<const std::uint8_t*>(data)[i])
                 : static_cast<const float*>(data)[i];
  }
};

// Where the parts of a packed list of `limit` elements begin: part n is [at(n), end(n)). Bounds may live on a device, where
// nobody checks them before a launch: whatever they hold, no access leaves the list.
struct Bounds {
  const void* data = nullptr;
  bool wide = false;
  std::int64_t parts = 0, limit = 0;
  RLK_HD std::int64_t raw(std::int64_t n) const {
    return wide ? static_cast<const std::int64_t*>(data)[n] : static_cast<const std::int32_t*>(data)[n];
  }
  RLK_HD std::int64_t at(std::int64_t n) const {
    const std::int64_t b = raw(n);
    return b < 0 ? 0 : b > limit ? limit : b;
  }
  RLK_HD std::int64_t end(std::int64_t n) const {
    const std::int64_t from = at(n), to = at(n + 1);
    return to > from ? to : from;
  }
};

template <class T>
RLK_HD T hold(T x, Scalar<T> limit) {
  const T most = T{} + limit, least = -most;
  x = x < least ? least : x;
  return x > most ? most : x;
}
// y where x lies within the limit, +0 beyond it.
template <class T>
RLK_HD T within(T x, Scalar<T> limit, T y) {
  const T most = T{} + limit, least = -most, zero{};
  y = x < least ? zero : y;
  return x > most ? zero : y;
}

// new - old; two equal infinities differ by nothing.
template <class T>
RLK_HD T log_ratio(T now, T before) {
  const T zero{}, difference = now - before;
  return now == before ? zero : difference;
}

// e^d - 1 - d, never negative. The literal formula is, for a fifth of the tokens whose policy has not moved: what it keeps
// of e^d - 1 is rounding. |d| < 1 takes d^2 P(d), P(d) = 1/2! + d/3! + ...; from 1/2 on, the other form is 3.4e-7 off.
template <class T>
RLK_HD T k3(T d) {
  const T one = T{} + 1, zero{}, minus = -d, square = d * d;
  T series;
  if constexpr (sizeof(Scalar<T>) == 8)
    series = simt::polynomial(
        d, 1.0 / 2432902008176640000.0, 1.0 / 121645100408832000.0, 1.0 / 6402373705728000.0,
        1.0 / 355687428096000.0, 1.0 / 20922789888000.0, 1.0 / 1307674368000.0, 1.0 / 87178291200.0,
        1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
        1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5);
  else
    series = simt::polynomial(d, 1 / 39916800.0f, 1 / 3628800.0f, 1 / 362880.0f, 1 / 40320.0f, 1 / 5040.0f,
                              1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f);
  const T near = square * series, far = simt::expm1<T>(d) - d;
  const T magnitude = d < zero ? minus : d;
  return magnitude < one ? near : far;
}

enum class Kl : std::int32_t { off, k1, k2, k3, k3_st };

// Infinite limits hold nothing.
struct KlRule {
  Kl kind = Kl::off;
  float d_limit = 0, limit = 0;
};

// An estimate of the divergence from ref, and its derivative by logp.
template <class T>
struct KlTerm {
  T value, slope;
};
template <class T>
RLK_HD KlTerm<T> kl_term(const KlRule& rule, T logp, T ref) {
  const T raw = log_ratio<T>(ref, logp), d = hold<T>(raw, rule.d_limit);
  KlTerm<T> out{-d, T{} + 1};
  if (rule.kind != Kl::k1) out.value = rule.kind == Kl::k2 ? d * d * Scalar<T>(0.5) : k3<T>(d);
  if (rule.kind == Kl::k3) out.slope = -simt::expm1<T>(d);
  if (rule.kind == Kl::k2 || rule.kind == Kl::k3_st) out.slope = -d;
  out.slope = within<T>(out.value, rule.limit, within<T>(raw, rule.d_limit, out.slope));
  out.value = hold<T>(out.value, rule.limit);
  return out;
}

}  // namespace rlk::loss32
