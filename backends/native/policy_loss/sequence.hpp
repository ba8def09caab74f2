// The body of each sequence_<isa>.cpp: an Engine on vectors of the given type. Tokens are computed side by side, a tile at a
// time, and added one after another.
#pragma once

#include <algorithm>

#include "native/policy_loss/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::policy_loss {

inline constexpr std::int64_t kTile = 256;

template <class L, int W>
class Team {
  using Row = native::Row<L, W>;
  const PolicyProblem& p_;

  template <class T>
  static T load(const float* x, std::int64_t t) {
    T out{};
    if (x != nullptr) std::memcpy(&out, x + t, sizeof out);
    return out;
  }
  template <class T>
  loss32::Token<T> token(std::int64_t b, std::int64_t t, const float* mask) const {
    const T advantage = p_.advantage_of_sequence ? T{} + p_.advantage[b] : load<T>(p_.advantage, t);
    return {load<T>(mask, 0),       load<T>(p_.logp, t), load<T>(p_.old, t),    advantage,
            load<T>(p_.rollout, t), load<T>(p_.ref, t),  load<T>(p_.entropy, t)};
  }
  // Token t, or vector of them, is column i of the tile.
  template <class T, class F, int N>
  void step(const F& f, bool keep, std::int64_t b, std::int64_t t, std::int64_t i, const float* mask,
            float (&tile)[N][kTile]) const {
    const loss32::Values<T, N> v = f(token<T>(b, t, mask + i));
    for (int q = 0; q < N; ++q) std::memcpy(tile[q] + i, &v.sum[q], sizeof(T));
    if (keep && p_.factor != nullptr) std::memcpy(p_.factor + t, &v.slope, sizeof(T));
    if (keep && p_.entropy_factor != nullptr) std::memcpy(p_.entropy_factor + t, &v.active, sizeof(T));
  }

 public:
  using Sum = float;
  explicit Team(const PolicyProblem& p) : p_(p) {}

  template <class F, int N>
  void sum(std::int64_t b, const F& f, bool keep, float (&sums)[N]) const {
    alignas(64) float tile[N][kTile], mask[kTile];
    const std::int64_t last = p_.last(b);
    for (std::int64_t first = p_.first(b); first < last; first += kTile) {
      const std::int64_t n = std::min(kTile, last - first);
      for (std::int64_t i = 0; i < n; ++i) mask[i] = p_.mask.at(first + i);
      std::int64_t i = 0;
      for (; i + W <= n; i += W) step<L>(f, keep, b, first + i, i, mask, tile);
      for (; i < n; ++i) step<float>(f, keep, b, first + i, i, mask, tile);
      for (i = 0; i < n; ++i)
        for (int q = 0; q < N; ++q) sums[q] += tile[q][i];
    }
  }

  static void totals(const PolicyProblem& p, std::int64_t b, float* bad) {
    const Team team(p);
    const auto facts = loss32::facts_of(p, team, b);
    float sums[loss32::Terms<float>::kSums] = {};
    team.sum(b, loss32::Terms<float>{p, facts}, true, sums);
    Row::narrow(rows::Type::f32, sums, p.totals + b * loss32::kTotals, loss32::kTotals);
    *bad = sums[loss32::kTotals];
  }

  static void factors(const PolicyProblem& p, std::int64_t b, double denominator) {
    const float active = p.totals[b * loss32::kTotals + loss32::kActive];
    const double share = loss32::share_of(p.weighting, active, denominator);
    const std::int64_t first = p.first(b), n = p.last(b) - first;
    const auto by = static_cast<float>(share);
    const float of_entropy = loss32::entropy_share(p.weighting, share);
    const auto scale = [by](auto x) {
      using T = decltype(x);
      const T zero{}, product = x * by;
      return x == zero ? zero : product;
    };
    const auto place = [of_entropy](auto x) {
      using T = decltype(x);
      const T zero{}, whole = zero + of_entropy;
      return x != zero ? whole : zero;
    };
    if (p.factor != nullptr) {
      float* x = p.factor + first;
      Row::map(by == 0 ? 0 : n, scale, x, static_cast<const float*>(x));
      if (by == 0) std::fill_n(x, n, 0.0f);
      Row::narrow(rows::Type::f32, x, x, n);
    }
    if (p.entropy_factor != nullptr) {
      float* x = p.entropy_factor + first;
      Row::map(n, place, x, static_cast<const float*>(x));
    }
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Team<L, W>::totals, Team<L, W>::factors};
}

}  // namespace rlk::native::policy_loss
