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

inline State join(const State& a, const State& b, Scale k) {
  if (b.s == 0) return a;
  if (a.s == 0) return b;
  State out;
  out.m = b.m > a.m ? b.m : a.m;
  const float d1 = a.m - out.m, d2 = b.m - out.m, a1 = ex2_sm90(d1 * k.c), a2 = ex2_sm90(d2 * k.c);
  const float u1 = a1 == 0 ? 0 : std::fma(a.s, d1 * k.tau, a.u),
              u2 = a2 == 0 ? 0 : std::fma(b.s, d2 * k.tau, b.u);
  out.s = std::fma(a.s, a1, b.s * a2);
  out.u = std::fma(u1, a1, u2 * a2);
  return out;
}

inline State reduce(const std::vector<float>& z, int64_t vocab, int64_t first, int64_t count, Scale k) {
  const int64_t width = 16 * ((vocab + 127) / 128), start = std::min(vocab, first * width);
  std::vector<State> leaves;
  for (int64_t j = first; j < first + count; ++j) {
    State leaf;
    const int64_t end = std::min(vocab, (j + 1) * width) - start;
    for (int64_t at = std::min(vocab, j * width) - start; at < end; at += 2048)
      leaf = lse2048::join(leaf, lse2048::tile(z.data() + at, std::min<int64_t>(2048, end - at), k), k);
    leaves.push_back(leaf);
  }
  return lse128::pairwise(std::move(leaves), k);
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
