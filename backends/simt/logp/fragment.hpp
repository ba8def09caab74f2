// Tiles of 128 logits and their gradients where a tensor core leaves them: four lanes have a row, each of every eight columns two
// neighbours. The bits of the kernels that find logits in memory (plain.hpp), of logits that nothing bends or masks.
//
// Of the tree's bits 6, 3 and 0 are a lane's own, 1 and 2 are between the four lanes, 4 and 5 again a lane's own.
#pragma once

#include "simt/logp/tiles.hpp"

namespace rlk::simt::logp {

inline constexpr int kFragment = kTile / kTileLanes;  // logits of a lane, of a tile
inline constexpr int kTwos = kFragment / 2;

// The column of a lane's number i, from the tile's first.
__device__ __forceinline__ int fragment_column(int lane, int i) { return i / 2 * 8 + 2 * lane + i % 2; }
// And the lane and number of a column.
__device__ __forceinline__ int lane_of_column(int column) { return column / 2 % kTileLanes; }
__device__ __forceinline__ int number_of_column(int column) { return column / 8 * 2 + column % 2; }

// What bits 6, 3 and 0 of the tree leave of a lane's: s, and where `Bends` u.
struct FragmentSums {
  float s[kPacks], u[kPacks];
};
struct FragmentLogits {
  float at[kFragment];
};

// weigh(z, e, u) for every logit.
template <bool Bends, class Weigh>
__device__ __forceinline__ FragmentSums fragment_sums(const float (&z)[kFragment], Weigh&& weigh) {
  FragmentSums sums = {};
#pragma unroll
  for (int q = 0; q < kPacks; ++q) {
    float e[2][2][2], u[2][2][2];  // bits 6, 3 and 0
#pragma unroll
    for (int i = 0; i < 8; ++i)
      weigh(z[4 * q + i / 4 * kTwos + i % 4], e[i / 4][i / 2 % 2][i % 2], u[i / 4][i / 2 % 2][i % 2]);
    const auto fold = [](const float(&v)[2][2][2]) {
      return add_rn(add_rn(add_rn(v[0][0][0], v[1][0][0]), add_rn(v[0][1][0], v[1][1][0])),
                    add_rn(add_rn(v[0][0][1], v[1][0][1]), add_rn(v[0][1][1], v[1][1][1])));
    };
    sums.s[q] = fold(e);
    if constexpr (Bends) sums.u[q] = fold(u);
  }
  return sums;
}
RLK_DEVICE_CALL FragmentSums sums_of_any_fragment(FragmentLogits z, float m, Scale k) {
  return fragment_sums<true>(z.at, [&](float logit, float& e, float& u) {
    e = weight(logit, m, k.c);
    u = bend(e, logit, m, k.tau);
  });
}

// The rest of the tree, by the four lanes.
__device__ __forceinline__ float fragment_tree(float (&v)[kPacks]) {
#pragma unroll
  for (int step = 1; step < kTileLanes; step *= 2)
#pragma unroll
    for (float& x : v) x = add_rn(x, __shfl_xor(x, step, kWave));
  return add_rn(add_rn(v[0], v[1]), add_rn(v[2], v[3]));
}

// A tile by four lanes, each of which gets it.
template <bool Bends>
__device__ __forceinline__ State fragment_tile(const float (&z)[kFragment], Scale k) {
  float m = none(), low = z[0];
#pragma unroll
  for (const float x : z) m = larger(m, x), low = least(low, x);
#pragma unroll
  for (int step = 1; step < kTileLanes; step *= 2) m = larger(m, __shfl_xor(m, step, kWave));
  m = add_rn(m, 0.0f);  // one zero
  FragmentSums sums;
  if ((low - m) * k.c >= kPlain) {  // and no NaN
    sums = fragment_sums<Bends>(z, [&](float logit, float& e, float& u) {
      const float d = logit - m;
      e = plain_exp2(d * k.c);
      if constexpr (Bends) u = e * (d * k.tau);
    });
  } else {
    FragmentLogits all;
#pragma unroll
    for (int i = 0; i < kFragment; ++i) all.at[i] = z[i];
    sums = sums_of_any_fragment(all, m, k);
  }
  return {m, fragment_tree(sums.s), Bends ? fragment_tree(sums.u) : 0.0f};
}

// Number `i` of some registers, whose numbers are known while compiling alone.
template <int Size>
__device__ __forceinline__ float taken(const float (&v)[Size], int i) {
  float x = v[0];
#pragma unroll
  for (int j = 1; j < Size; ++j)
    if (j == i) x = v[j];
  return x;
}
template <int Size>
__device__ __forceinline__ void put(float (&v)[Size], int i, float x) {
#pragma unroll
  for (int j = 0; j < Size; ++j)
    if (j == i) v[j] = x;
}

RLK_DEVICE_CALL FragmentLogits slopes_of_any_fragment(Slope k, FragmentLogits z) {
#pragma unroll
  for (float& x : z.at) x = lse128::gradient<float>(k, x, 0.0f);
  return z;
}
RLK_DEVICE_CALL float slope_of_target(Slope k, float z) { return lse128::gradient<float>(k, z, 1.0f); }

// Logits of a row, of one tile or more, into their gradients. `target`: its number, or -1 where another lane has it.
template <int Size>
__device__ __forceinline__ void fragment_slopes(float (&z)[Size], const Slope& k, int target) {
  float largest = none(), low = z[0];
#pragma unroll
  for (const float x : z) largest = larger(largest, x), low = least(low, x);
  const float at_target = target >= 0 ? slope_of_target(k, taken(z, target)) : 0;
  if (!k.bends && (low - k.m) * k.c >= kPlain && largest <= k.m) {
#pragma unroll
    for (float& x : z) x = k.tau * (k.g * (0.0f - plain_exp2((x - k.m) * k.c) * k.rest));
  } else {
#pragma unroll
    for (int tile = 0; tile < Size; tile += kFragment) {
      FragmentLogits all;
#pragma unroll
      for (int i = 0; i < kFragment; ++i) all.at[i] = z[tile + i];
      all = slopes_of_any_fragment(k, all);
#pragma unroll
      for (int i = 0; i < kFragment; ++i) z[tile + i] = all.at[i];
    }
  }
  if (target >= 0) put(z, target, at_target);
}

}  // namespace rlk::simt::logp
