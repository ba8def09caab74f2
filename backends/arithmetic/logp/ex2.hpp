// logp by the exponential of Hopper's special function units (arithmetic id sm90/ex2/lse2048/l8): what differs from logp.hpp, for
// native code and GPU kernels alike.
//
// A tile is 2048 entries: its maximum, and the sums of 256 chains of eight, joined by a tree. Tiles are joined by the same
// exponential, leaves as logp.hpp joins them.
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "registry/ex2_sm90.hpp"

namespace rlk::lse2048 {

using lse128::Problem;
using lse128::Scale;
using lse128::State;

inline constexpr int kTile = 2048,
                     kChains = 256;  // entries; a chain has those whose place is equal modulo kChains

RLK_HD float exp2_by_unit(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return registry::ex2_sm90(x);
#endif
}

// The larger of an exponent and a number whose power is 0: what is infinite has no part in the sum for the entropy.
RLK_HD float finite_exponent(float x) {
#if defined(__CUDA_ARCH__)
  return fmaxf(x, -256.0f);
#else
  return x > -256.0f ? x : -256.0f;
#endif
}

// What a tile's entries are counted from: its maximum, any number where it has none.
RLK_HD float base_of(float most) { return most == lse128::none() ? 0.0f : most + 0.0f; }
// The exponent of an entry.
RLK_HD float exponent(float z, float base, float c) { return (z - base) * c; }

// Of a tile: its maximum, its sum, and the sum of exponentials times their exponents.
RLK_HD State tile_of(float most, float sum, float bent) {
  return {most == lse128::none() ? most : most + 0.0f, sum, bent * 0.693147182f};
}

RLK_HD State join(const State& a, const State& b, Scale k) {
  if (b.s == 0) return a;
  if (a.s == 0) return b;
  const float m = b.m > a.m ? b.m : a.m;
  return lse128::joined(a, b, m, exp2_by_unit((a.m - m) * k.c), exp2_by_unit((b.m - m) * k.c), k.tau);
}
// Tiles are summed at a temperature that is a number; where it is none, so is what has entries.
RLK_HD Scale counting(Scale k) { return k.c == k.c ? k : lse128::scale_of(1); }
RLK_HD State counted(const State& all, Scale k) {
  return k.c == k.c || all.s == 0 ? all : State{all.m, k.c, k.c};
}

// What all entries of a row share: the gradient of one is its exponential times slope + bend x, where x is its exponent; and the
// target's has `hit` more.
struct Slope {
  float m, c, slope, bend, hit;
  bool nothing;
  RLK_HD bool finite() const { return slope - slope == 0 && bend - bend == 0 && m - m == 0 && c - c == 0; }
};
RLK_HD Slope slope_of(const Problem& p, std::int64_t row, const State& state) {
  const Scale k = p.scale(row);
  const float g = p.d_logp ? p.d_logp[row] + 0.0f : 0.0f;  // -0 counts as +0
  const float h = p.d_entropy ? p.d_entropy[row] + 0.0f : 0.0f;
  const float rest = 1 / state.s, both = p.d_entropy ? simt::fused(-h, state.u / state.s, g) : g;
  return {state.m, k.c, -(k.tau * both * rest), -(k.tau * h * rest * 0.693147182f), k.tau * g, state.s == 0};
}
// Of an entry that takes part, before softcap's part. Bends: with the entropy's.
template <bool Bends>
RLK_HD float gradient_inside(const Slope& k, float z, float hit) {
  const float x = exponent(z, k.m, k.c), e = exp2_by_unit(x);
  const float slope = Bends ? simt::fused(finite_exponent(x), k.bend, k.slope) : k.slope;
  return simt::fused(slope, e, hit);
}
RLK_HD float gradient(const Slope& k, bool bends, float z, bool is_target) {
  if (z == lse128::none()) return 0;
  const float hit = is_target ? k.hit : 0.0f;
  return bends ? gradient_inside<true>(k, z, hit) : gradient_inside<false>(k, z, hit);
}

}  // namespace rlk::lse2048
