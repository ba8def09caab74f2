// Kernels of logp for logits as they mostly are: bf16 or fp32 in whole packs, that nothing rounds, bends or masks. They give the bits of
// the general ones (kernels.hpp) and ask less of every logit.
//
// plain_fold      a wave has a row and a leaf; four lanes a tile. The least and the largest of bf16 are found two at a time, as they
//                 lie in memory. Tiles with an exponent that is out of the ordinary, or a NaN, are summed out of line
// plain_gradient  one thread two packs a row apart
#pragma once

#include "simt/logp/launchers.hpp"
#include "simt/logp/tiles.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::logp {

inline constexpr int kLane = kPacks * kPack;  // logits of a lane, of a tile

// The largest and the least of some logits. With a NaN among them the least is NaN; the largest is a number where there is one.
struct Range {
  float largest, least;
};

template <class T>
using PlainRaw = rows::Raw<std::conditional_t<sizeof(T) == 4, float, rows::Whole>>;
template <class T>
__device__ __forceinline__ void unpack_plain(const PlainRaw<T>& raw, float* z) {
  float pack[kPack];
  rows::unpack<std::conditional_t<sizeof(T) == 4, float, bf16>>(raw.part, pack);
#pragma unroll
  for (int j = 0; j < kPack; ++j) z[j] = pack[j];
}

#if defined(__CUDA_ARCH__)
// The largest and the least of some pairs of bf16, as they lie, in their first.
template <int Words>
__device__ __forceinline__ void range_of_pairs(std::uint32_t* high, std::uint32_t* low) {
#  pragma unroll
  for (int i = 0; i < Words / 2; ++i) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(high[i]) : "r"(high[i + Words / 2]));
    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(low[i]) : "r"(low[i + Words / 2]));
  }
  if constexpr (Words > 2) range_of_pairs<Words / 2>(high, low);
}
#endif
// Of some packs, which are in z as numbers.
template <class T, int Packs>
__device__ __forceinline__ Range range_of([[maybe_unused]] const PlainRaw<T> (&raw)[Packs], const float* z) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    std::uint32_t high[Packs * 4], low[Packs * 4];
#  pragma unroll
    for (int i = 0; i < Packs * 4; ++i) high[i] = low[i] = raw[i / 4].part[0].word[i % 4];
    range_of_pairs<Packs * 4>(high, low);
    const float a = bits_float(high[0] << 16), b = bits_float(high[0] & 0xffff0000u);
    const float c = bits_float(low[0] << 16), d = bits_float(low[0] & 0xffff0000u);
    return {larger(none(), larger(a, b)), least(c, d)};
  } else
#endif
  {
    float high[4], low[4];  // four chains
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = low[i] = z[i];
#pragma unroll
    for (int i = 4; i < Packs * kPack; ++i)
      high[i % 4] = larger(high[i % 4], z[i]), low[i % 4] = least(low[i % 4], z[i]);
    return {larger(none(), larger(larger(high[0], high[1]), larger(high[2], high[3]))),
            least(least(low[0], low[1]), least(low[2], low[3]))};
  }
}

// What a lane's logits add to its tile, before the other three lanes.
struct Sums {
  float s, u;
};
struct LaneLogits {
  float at[kLane];
};
__device__ __forceinline__ float lane_tree(const float (&v)[kLane]) {
  float x[kPack];
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    x[k] = add_rn(add_rn(v[k], v[2 * kPack + k]), add_rn(v[kPack + k], v[3 * kPack + k]));
#pragma unroll
  for (int step = 1; step < kPack; step *= 2)
#pragma unroll
    for (int k = 0; k < kPack; k += 2 * step) x[k] = add_rn(x[k], x[k + step]);
  return x[0];
}
RLK_DEVICE_CALL Sums sums_of_any(LaneLogits z, float m, Scale k) {
  float u[kLane];
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const float e = weight(z.at[i], m, k.c);
    u[i] = bend(e, z.at[i], m, k.tau);
    z.at[i] = e;
  }
  return {lane_tree(z.at), lane_tree(u)};
}

// A tile by four lanes, each of which gets it.
template <class T, bool Bends>
__device__ __forceinline__ State plain_tile(const PlainRaw<T> (&raw)[kPacks], Scale k) {
  float z[kLane];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) unpack_plain<T>(raw[i], z + i * kPack);
  const Range range = range_of<T>(raw, z);
  float m = range.largest;
#pragma unroll
  for (int step = 1; step < kTileLanes; step *= 2) m = larger(m, __shfl_xor(m, step, kWave));
  m = add_rn(m, 0.0f);  // one zero
  Sums sums;
  if ((range.least - m) * k.c >= kPlain) {  // and no NaN
    float u[kLane];
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      const float d = z[i] - m;
      z[i] = plain_exp2(d * k.c);
      if constexpr (Bends) u[i] = z[i] * (d * k.tau);
    }
    sums.s = lane_tree(z);
    sums.u = Bends ? lane_tree(u) : 0.0f;
  } else {
    LaneLogits all;
#pragma unroll
    for (int i = 0; i < kLane; ++i) all.at[i] = z[i];
    sums = sums_of_any(all, m, k);
  }
  const auto across = [](float sum) {
    sum = add_rn(sum, __shfl_xor(sum, 1, kWave));
    return add_rn(sum, __shfl_xor(sum, 2, kWave));
  };
  return {m, across(sums.s), Bends ? across(sums.u) : 0.0f};
}

// The packs of a lane that are less than `left` from its first, -inf in place of the others.
template <class T>
__device__ __forceinline__ void fetch_plain(const T* from, int left, PlainRaw<T> (&raw)[kPacks]) {
  rows::Bytes16 absent;
#pragma unroll
  for (std::uint32_t& word : absent.word) word = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;
#pragma unroll
  for (int i = 0; i < kPacks; ++i)
#pragma unroll
    for (int part = 0; part < static_cast<int>(sizeof(T) / 2); ++part) {
      const int at = i / 2 * (kTile / 2) + i % 2 * kPack;
      if (at < left)
        raw[i].part[part] = reinterpret_cast<const rows::Bytes16*>(from + at)[part];
      else
        raw[i].part[part] = absent;
    }
}

// What the waves of a leaf share: how tiles are joined, and the tiles, in two halves in turn.
struct PlainDesk {
  Joining room[kWave];
  State tiles[2][kWave];
};
inline constexpr int kPlainThreads = 128;

// `T`: float, or the bits of a bf16. `Waves` of 32 lanes have a leaf.
template <class T, bool Bends, int Waves>
__global__ void __launch_bounds__(kPlainThreads, sizeof(T) == 4 ? 4 : 5)
    plain_fold(Problem p, Panel panel, int leaves, State* states, float* targets) {
  constexpr int kTeam = Waves * kWave, kTeams = kPlainThreads / kTeam, kAtOnce = kTeam / kTileLanes;
  constexpr int kStep = kAtOnce * kTile;
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  PlainDesk& desk = dynamic_shared<PlainDesk>()[team];
  const std::int64_t item = std::int64_t{blockIdx.x} * kTeams + team, row = item / leaves;
  if (row >= p.rows || p.left_out(row)) return;
  const int leaf = leaves == 1 ? panel.leaf : static_cast<int>(item % leaves);
  const std::int64_t from = leaves > 1 ? p.leaf_begin(leaf) : panel.begin,
                     end = leaves > 1 ? p.leaf_end(leaf) : panel.end, start = leaves > 1 ? 0 : panel.begin;
  const Scale k = p.scale(row);
  State* kept = states + row * p.count + leaf;
  State all = from == p.leaf_begin(leaf) ? nothing() : *kept;
  const int tile = thread / kTileLanes, lane = thread % kTileLanes, mine = tile * kTile + pack_start(lane, 0);
  // Whole waves skip what is beyond the longest leaf, which may be two times 32 lanes.
  const int wave = static_cast<int>(warpSize), before = thread / wave * (wave / kTileLanes * kTile);
  const T* at = static_cast<const T*>(panel.logits.row(row)) + (from - start) + mine;
  int left = static_cast<int>(end - from), turns = static_cast<int>(leaves > 1 ? p.leaf : end - from),
      half = 0;
  PlainRaw<T> raw[kPacks];
  fetch_plain<T>(at, left - mine, raw);
  while (turns > 0) {
    State* const tiles = desk.tiles[half];
    half = 1 - half;
#pragma unroll 1
    for (int done = 0; done < kWave; done += kAtOnce, left -= kStep, turns -= kStep) {
      State sums = nothing();
      if (turns > before) {
        const PlainRaw<T> now[kPacks] = {raw[0], raw[1], raw[2], raw[3]};
        at += kStep;
        fetch_plain<T>(at, left - kStep - mine, raw);
        sums = plain_tile<T, Bends>(now, k);
      }
      if (lane == 0) tiles[done + tile] = sums;
    }
    if constexpr (Waves > 1)
      __syncthreads();
    else
      wave_sync();
    if (Waves == 1 || thread < wave)
      all = join_tiles(all, tiles[thread % kWave], thread % kWave, k, Bends, desk.room);
  }
  if (thread != 0) return;
  *kept = all;
  if (targets == nullptr) return;
  const std::int64_t column = p.column(row);
  if (panel.begin == p.leaf_begin(0)) targets[row] = none();
  if (column >= panel.begin && column < panel.end)
    targets[row] = rows::load(panel.logits.type, panel.logits.row(row), column - panel.begin);
}

RLK_DEVICE_CALL Eight any_gradient(Slope k, int here, Eight z) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) z.at[j] = lse128::gradient<float>(k, z.at[j], j == here ? 1.0f : 0.0f);
  return z;
}
inline constexpr int kPlainEach = 4,
                     kPlainSpan = kPlainThreads * kPack;  // packs of a thread, columns between them

// A pack that has the target is a special case, too.
template <class T, class To>
__global__ void __launch_bounds__(kPlainThreads)
    plain_gradient(Problem p, Panel panel, Matrix to, std::int64_t columns, const State* states) {
  const auto across =
      static_cast<unsigned>((columns + kPlainEach * kPlainSpan - 1) / (kPlainEach * kPlainSpan));
  const std::int64_t row = blockIdx.x / across;
  const int first =
      static_cast<int>(blockIdx.x % across) * kPlainEach * kPlainSpan + static_cast<int>(threadIdx.x) * kPack;
  const bool out = p.left_out(row);
  const T* logits = static_cast<const T*>(panel.logits.row(row)) + first;
  const int there = static_cast<int>(panel.end - panel.begin) - first;
  PlainRaw<T> raw[kPlainEach];
#pragma unroll
  for (int i = 0; i < kPlainEach; ++i)
#pragma unroll
    for (int part = 0; part < static_cast<int>(sizeof(T) / 2); ++part)
      raw[i].part[part] = !out && i * kPlainSpan < there
                              ? reinterpret_cast<const rows::Bytes16*>(logits + i * kPlainSpan)[part]
                              : rows::Bytes16{};
  const float* given = p.given ? p.given + row * kStats : nullptr;
  const State state = given ? State{given[0], given[1], given[2]} : states[row * p.count];
  const Slope k = slope_of(p, row, state);
  const std::int64_t target = p.column(row) - panel.begin - first;
#pragma unroll
  for (int i = 0; i < kPlainEach; ++i) {
    if (first + i * kPlainSpan >= columns) return;
    Eight d = {};
    if (!out && !k.nothing && i * kPlainSpan < there) {
      const PlainRaw<T> one[1] = {raw[i]};
      unpack_plain<T>(raw[i], d.at);
      const bool has = target >= i * kPlainSpan && target < i * kPlainSpan + kPack;  // the target
      const bool bends = k.bends || has;
      const Range range = range_of<T>(one, d.at);
      if (!bends && (range.least - k.m) * k.c >= kPlain && range.largest <= k.m) {
#pragma unroll
        for (int j = 0; j < kPack; ++j)
          d.at[j] = k.tau * (k.g * (0.0f - plain_exp2((d.at[j] - k.m) * k.c) * k.rest));
      } else {
        d = any_gradient(k, has ? static_cast<int>(target) - i * kPlainSpan : -1, d);
      }
    }
    rows::put_pack<To>(to.type, to.row(row), first + i * kPlainSpan, kPack, d.at);
  }
}

}  // namespace rlk::simt::logp
