// lse128/l8 as the page has it, in plain loops over numbers, independent of every kernel.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "registry/exp32.hpp"
#include "registry/reference.hpp"

namespace rlk::registry::lse128 {

inline constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Scale {
  float tau, c;
};
inline Scale scale_of(float temperature) {
  const float tau = 1 / temperature, c = tau * 1.44269504f;
  if (!(temperature > 0 && c > 0 && std::isfinite(c))) return {NAN, NAN};
  return {tau, c};
}

// Maximum, sum, and sum for the entropy; a sum of 0 is of nothing.
struct State {
  float m = kNone, s = 0, u = 0;
};

inline float tree_of_128(std::array<float, 128> v) {
  int done = 0;  // the bits of places that are added into those without
  for (int bit : {6, 3, 0, 1, 2, 4, 5}) {
    done |= 1 << bit;
    for (int j = 0; j < 128; j = ((j | done) + 1) & ~done)
      v[static_cast<std::size_t>(j)] += v[static_cast<std::size_t>(j + (1 << bit))];
  }
  return v[0];
}

// Up to 128 entries; -inf takes no part.
inline State tile(const float* z, int64_t n, Scale k) {
  State t;
  for (int64_t i = 0; i < n; ++i)
    if (z[i] > t.m) t.m = z[i];
  t.m = t.m + 0.0f;  // one zero
  std::array<float, 128> e{}, u{};
  for (int64_t i = 0; i < n; ++i) {
    if (z[i] == kNone) continue;
    const float d = z[i] - t.m;
    const auto at = static_cast<std::size_t>(i);
    e[at] = exp2_32(d * k.c);
    u[at] = e[at] == 0 ? 0 : e[at] * (d * k.tau);
  }
  t.s = tree_of_128(e);
  t.u = tree_of_128(u);
  return t;
}

// Two states by an exponential.
template <class Exp2>
State join_by(Exp2 exp2, const State& a, const State& b, Scale k) {
  if (b.s == 0) return a;
  if (a.s == 0) return b;
  State out;
  out.m = b.m > a.m ? b.m : a.m;
  const float d1 = a.m - out.m, d2 = b.m - out.m, a1 = exp2(d1 * k.c), a2 = exp2(d2 * k.c);
  const float u1 = a1 == 0 ? 0 : std::fma(a.s, d1 * k.tau, a.u),
              u2 = a2 == 0 ? 0 : std::fma(b.s, d2 * k.tau, b.u);
  out.s = std::fma(a.s, a1, b.s * a2);
  out.u = std::fma(u1, a1, u2 * a2);
  return out;
}
inline State join(const State& a, const State& b, Scale k) { return join_by(exp2_32, a, b, k); }

inline State pairwise(std::vector<State> all, Scale k) {
  for (; all.size() > 1; all.resize(all.size() / 2))
    for (std::size_t i = 0; i + 1 < all.size(); i += 2) all[i / 2] = join(all[i], all[i + 1], k);
  return all[0];
}

// `z` are the entries of the call's leaves: `count` of them from leaf `first` on, of a vocabulary of `vocab`.
// Leaves are made of tiles of `size`, ascending.
template <class Tile, class Join>
State reduce_by(int64_t size, Tile tile, Join join, const std::vector<float>& z, int64_t vocab, int64_t first,
                int64_t count, Scale k) {
  const int64_t width = 16 * ((vocab + 127) / 128), start = std::min(vocab, first * width);
  std::vector<State> leaves;
  for (int64_t j = first; j < first + count; ++j) {
    State leaf;
    const int64_t end = std::min(vocab, (j + 1) * width) - start;
    for (int64_t at = std::min(vocab, j * width) - start; at < end; at += size)
      leaf = join(leaf, tile(z.data() + at, std::min(size, end - at), k), k);
    leaves.push_back(leaf);
  }
  return pairwise(std::move(leaves), k);
}
inline State reduce(const std::vector<float>& z, int64_t vocab, int64_t first, int64_t count, Scale k) {
  return reduce_by(128, tile, join, z, vocab, first, count, k);
}

struct Answer {
  State state;
  float target = kNone;
  Scale k;

  float logp() const { return state.s == 0 ? kNone : (target - state.m) * k.tau - ln32(state.s); }
  float lse() const { return state.s == 0 ? kNone : std::fma(state.m, k.tau, ln32(state.s)); }
  float entropy() const { return state.s == 0 ? 0 : ln32(state.s) - state.u / state.s; }
  float gradient(float z, bool is_target, float g, const float* g_entropy) const {
    if (state.s == 0 || z == kNone) return 0;
    const float d = z - state.m, e = exp2_32(d * k.c);
    const float p = e * (1 / state.s);
    float sum = g * ((is_target ? 1.0f : 0.0f) - p);
    if (g_entropy) {
      const float ln_p = d * k.tau - ln32(state.s);
      sum = sum - (p == 0 ? 0 : *g_entropy * p * (ln_p + entropy()));
    }
    return k.tau * sum;
  }
};

// A target that is left out: what the first part says of it, and the others.
inline Answer left_out(bool first) {
  return first ? Answer{{0, 1, 0}, 0, scale_of(1)} : Answer{{}, kNone, scale_of(1)};
}

}  // namespace rlk::registry::lse128
