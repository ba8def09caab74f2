// sm90/ex2/lse2048/l8 as the page has it, in plain loops over numbers, independent of every kernel.
#pragma once

#include "registry/ex2_sm90.hpp"
#include "registry/logp/lse128.hpp"

namespace rlk::registry::lse2048 {

using lse128::kNone;
using lse128::Scale;
using lse128::State;

// Pairs of neighbours, of which there are 256.
inline float tree_of_256(std::array<float, 256> v) {
  for (std::size_t n = 128; n > 0; n /= 2)
    for (std::size_t j = 0; j < n; ++j) v[j] = v[2 * j] + v[2 * j + 1];
  return v[0];
}

// Up to 2048 entries; -inf takes no part.
inline State tile(const float* z, int64_t n, Scale k) {
  State t;
  for (int64_t i = 0; i < n; ++i)
    if (z[i] > t.m) t.m = z[i];
  t.m = t.m + 0.0f;  // one zero
  std::array<float, 256> s{}, u{};
  for (int64_t i = 0; i < n; ++i) {
    if (z[i] == kNone) continue;
    const auto chain = static_cast<std::size_t>(i % 256);
    const float x = (z[i] - t.m) * k.c, e = ex2_sm90(x);
    s[chain] = s[chain] + e;
    if (e != 0) u[chain] = std::fma(e, x, u[chain]);
  }
  t.s = tree_of_256(s);
  t.u = tree_of_256(u) * 0.693147182f;
  return t;
}

inline State join(const State& a, const State& b, Scale k) { return lse128::join_by(ex2_sm90, a, b, k); }

inline State reduce(const std::vector<float>& z, int64_t vocab, int64_t first, int64_t count, Scale k) {
  return lse128::reduce_by(2048, lse2048::tile, lse2048::join, z, vocab, first, count, k);
}

// Of one entry, of a row with this state.
inline float gradient(const State& row, Scale k, float z, bool is_target, float g, const float* g_entropy) {
  if (row.s == 0 || z == kNone) return 0;
  const float x = (z - row.m) * k.c, e = ex2_sm90(x), rest = 1 / row.s;
  const float hit = is_target ? k.tau * g : 0.0f;
  if (!g_entropy) return std::fma(-(k.tau * g * rest), e, hit);
  const float h = *g_entropy, both = std::fma(-h, row.u / row.s, g);
  const float bend = -(k.tau * h * rest * 0.693147182f);
  return std::fma(std::fma(x < -256 ? -256 : x, bend, -(k.tau * both * rest)), e, hit);
}

}  // namespace rlk::registry::lse2048
