// Tiles of 128 entries and their joining (rule lse128/l8), as four lanes and as a lane see them: for kernels of logp and sample.
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::logp {

using namespace rlk::lse128;
using rows::kPack;

inline constexpr int kWave = 32;  // lanes that share what they know of their tiles
inline constexpr int kTileLanes = 4;
inline constexpr int kPacks = kTile / kPack / kTileLanes;  // of a lane; tree() says which
static_assert(kPacks == 4);

struct Eight {
  float at[kPack];
};

// The first entry of a lane's pack, from the tile's start.
__device__ __forceinline__ int pack_start(int lane, int pack) {
  return 2 * kPack * lane + pack / 2 * (kTile / 2) + pack % 2 * kPack;
}

// 32 values of a tile's 128, bits 0 to 2 in a pack, bit 3 the number's lowest, bit 6 its other: folded by bits 6, 3, 0, 1, 2, and
// with the other lanes of the tile by 4, 5.
__device__ __forceinline__ float tree(float (&v)[kPacks][kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[0][k] = add_rn(add_rn(v[0][k], v[2][k]), add_rn(v[1][k], v[3][k]));
#pragma unroll
  for (int step = 1; step < kPack; step *= 2)
#pragma unroll
    for (int k = 0; k < kPack; k += 2 * step) v[0][k] = add_rn(v[0][k], v[0][k + step]);
  float sum = add_rn(v[0][0], __shfl_xor(v[0][0], 1, kWave));
  return add_rn(sum, __shfl_xor(sum, 2, kWave));
}

// The least of two, NaN if either is.
__device__ __forceinline__ float least(float a, float b) {
#if defined(__CUDA_ARCH__)
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
#else
  return a != a || a < b ? a : b;
#endif
}

// The larger of two, of a number and NaN the number; either of two zeros.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  float larger;
  asm("max.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return b > a || a != a ? b : a;
#endif
}

// exp2_32 of what is in [kPlain, 0], where neither clamping nor scaling twice has anything to do: the same bits.
inline constexpr float kPlain = -125;
__device__ __forceinline__ float plain_exp2(float x) {
  using C = ExpConstants<float>;
  const float shifted = x + C::kShift, n = shifted - C::kShift, r = (x - n) * C::kLn2;
  const float e = fused(exp_tail(r) * r, r, r) + 1;
  return bits_float(float_bits(e) + (float_bits(shifted) << C::kMantissa));
}

// A tile by four lanes, each of which gets it.
__device__ __forceinline__ State tile(float (&z)[kPacks][kPack], Scale k, bool bends) {
  float m = none(), low = z[0][0];
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      m = larger(m, z[i][j]);
      low = least(low, z[i][j]);
    }
#pragma unroll
  for (int step = 1; step < kTileLanes; step *= 2) {
    m = larger(m, __shfl_xor(m, step, kWave));
  }
  m = add_rn(m, 0.0f);  // one zero
  float u[kPacks][kPack] = {};
  if ((low - m) * k.c >= kPlain) {  // and no NaN
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float d = z[i][j] - m;
        z[i][j] = plain_exp2(d * k.c);
        if (bends) u[i][j] = z[i][j] * (d * k.tau);
      }
  } else {
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float e = weight(z[i][j], m, k.c);
        if (bends) u[i][j] = bend(e, z[i][j], m, k.tau);
        z[i][j] = e;
      }
  }
  const float s = tree(z);
  return {m, s, bends ? tree(u) : 0.0f};
}

// How a tile joins what came before it: all is multiplied by `by`, what bends it moves by `bend_by`, and s and u are added.
struct alignas(16) Joining {
  float by, s, bend_by, u;
};

// join() of `all` and the tiles of the first lanes, a tile a lane, ascending; every lane gets it. Other lanes have nothing().
// `room` has a place for each of the 32 lanes; without it they ask each other, which takes longer.
template <int Tiles = kWave>
__device__ __forceinline__ State join_tiles(State all, State mine, int lane, Scale k, bool bends,
                                            Joining* room = nullptr) {
  // The maximum up to this tile, of tiles with a sum alone.
  const bool there = mine.s != 0;
  float m = there ? mine.m : none();
  bool some = there;
  for (int step = 1; step < kWave; step *= 2) {
    const float other = __shfl_up(m, static_cast<unsigned>(step), kWave);
    const bool others = __shfl_up(static_cast<int>(some), static_cast<unsigned>(step), kWave) != 0;
    if (lane < step) continue;
    m = other > m ? other : m;
    some = some || others;
  }
  const bool any = all.s != 0;
  if (any) m = all.m > m ? all.m : m;
  float before = __shfl_up(m, 1u, kWave);
  bool first = __shfl_up(static_cast<int>(some), 1u, kWave) == 0 && !any;
  if (lane == 0) before = all.m, first = !any;
  // What came before times a_by, and this tile as it is added; nothing changes where there is no tile.
  const float d = there && !first ? before - m : 0, by = there ? exp2<float>((mine.m - m) * k.c) : 0;
  const float a_by = !there ? 1.0f : first ? 0.0f : exp2<float>(d * k.c);
  const float s = !there ? 0.0f : first ? mine.s : mine.s * by;
  const float bend_by = d * k.tau;
  float u = 0;
  if (bends && there) u = first ? mine.u : shifted(mine.s, mine.u, mine.m - m, by, k.tau) * by;
  if (room) {
    wave_sync();  // what lies there was read
    room[lane] = {a_by, s, bend_by, u};
    wave_sync();
  }
#pragma unroll 8
  for (int t = 0; t < Tiles; ++t) {
    const Joining tile = room    ? room[t]
                         : bends ? Joining{__shfl(a_by, t, kWave), __shfl(s, t, kWave),
                                           __shfl(bend_by, t, kWave), __shfl(u, t, kWave)}
                                 : Joining{__shfl(a_by, t, kWave), __shfl(s, t, kWave), 0, 0};
    if (bends) {
      const float old = tile.by == 0 ? 0.0f : fused(all.s, tile.bend_by, all.u);
      all.u = fused(old, tile.by, tile.u);
    }
    all.s = fused(all.s, tile.by, tile.s);
  }
  all.m = __shfl(m, kWave - 1, kWave);
  return all;
}

}  // namespace rlk::simt::logp
