// What a block draws from the entries that are kept: for the kernels of sample.
//
// An exact score is computed only where a bound on it reaches the best so far.
#pragma once

#include "simt/sample/filters.hpp"

namespace rlk::simt::sample {

struct Best {
  float score = -__builtin_inff();
  std::int32_t id = -1;
  __device__ void take(float other, std::int32_t at) {
    if (at >= 0 && (id < 0 || other > score || (other == score && at < id))) score = other, id = at;
  }
};

RLK_DEVICE_CALL float exact_score(float z, float most, float tau, std::uint32_t word) {
  return score(z, most, tau, word);
}

// No score with a word is more than (z - most) tau and this: E >= v, so -ln E <= -ln v, and the margin is a thousand times what
// the functions on either side are off by.
__device__ __forceinline__ float most_noise(std::uint32_t word) {
  constexpr float kLn2 = 0.693147182f, kMargin = 0.01f;
  const float w = word == 0 ? 0.5f : static_cast<float>(word);
  return fused(rough_log2(w), -kLn2, 32 * kLn2 + kMargin);
}

// The best of a pack of entries, of those above -inf; `reached` is a score that is surely reached.
template <class T>
__device__ __forceinline__ void score_pack(const Reader<T>& row, const float (&z)[kPack], std::int64_t first,
                                           float reached, Best& best) {
  if (row.r.greedy) {
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (z[k] > -__builtin_inff()) best.take(z[k], static_cast<std::int32_t>(first + k));
    return;
  }
  float top = z[0];
#pragma unroll
  for (int k = 1; k < kPack; ++k) top = z[k] > top ? z[k] : top;
  if ((top - row.most) * row.r.tau + most_noise(0) < reached) return;  // with the best of words
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const philox::Counter c = row.r.noise(static_cast<std::uint32_t>((row.p.first + first) / 4 + half));
    const std::uint32_t words[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float x = z[4 * half + k];
      const float bound = (x - row.most) * row.r.tau + most_noise(words[k]);
      if (x == -__builtin_inff() || bound < best.score || bound < reached) continue;
      best.take(exact_score(x, row.most, row.r.tau, words[k]),
                static_cast<std::int32_t>(first + 4 * half + k));
    }
  }
}

// What all waves found, joined by each thread.
struct Joined {
  Best best;
  std::int32_t count = 0;
};
__device__ __forceinline__ Joined joined_waves(const Shared& s) {
  Joined all;
  for (int w = 0; w < kWaves; ++w) {
    all.best.take(s.score[w], s.id[w]);
    all.count += s.count[w];
  }
  return all;
}
template <class T>
__device__ __forceinline__ Drawn drawn(const Reader<T>& row, const Joined& found, const Part* kept,
                                       const Part* all) {
  Drawn d;
  d.token = found.best.id, d.count = found.count;
  const float z = row.z(d.token);
  if (row.p.wants_logp()) d.logp = log_probability(z, joined(kept, row.r.c), row.r.tau);
  if (row.p.wants_raw()) d.logp_raw = log_probability(z, joined(all, row.r.raw_c), row.r.raw_tau);
  return d;
}

// The sum of a leaf with 16 more tiles, of which this thread's four lanes have one. OneLeaf: with the 128 of the block, which
// the first team adds.
template <bool OneLeaf>
__device__ __forceinline__ State join_leaf(Shared& s, int buffer, State all, State tile, float c) {
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  if (thread % kTileLanes == 0) s.tiles[buffer][team][thread / kTileLanes] = tile;
  __syncthreads();
  if constexpr (OneLeaf) {
    const State* const tiles = s.tiles[buffer][0];
    for (int first = 0; team == 0 && first < kLeaves * kTiles; first += kWave)
      all = logp::join_tiles(all, tiles[first + lane()], lane(), {1, c}, false);
    return all;
  }
  const State mine = lane() < kTiles ? s.tiles[buffer][team][lane()] : lse128::nothing();
  return logp::join_tiles<kTiles>(all, mine, lane(), {1, c}, false);
}

// Leaves what the waves and leaves have in `s`. Without filters all entries are kept that are there. OneLeaf: of leaf blockIdx.y
// alone, whose sums go to the first place.
template <bool Filters, bool OneLeaf = false, class T>
__device__ __forceinline__ void draw_tiles(const Reader<T>& row, Shared& s, const Kept& kept, bool logp,
                                           bool raw_logp) {
  constexpr int kAbreast = OneLeaf ? kLeaves * kTiles : kTiles;  // of a leaf
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  const int first_tile = (OneLeaf ? team * kTiles : 0) + thread / kTileLanes;
  const std::int64_t width = row.p.leaf(), start = (OneLeaf ? static_cast<int>(blockIdx.y) : team) * width;
  const std::int64_t end = start + width < row.p.vocab ? start + width : row.p.vocab;
  Best best;
  State of_kept = lse128::nothing(), of_all = lse128::nothing();
  float reached = -__builtin_inff();
  std::int32_t count = 0;
  int buffer = 0;
  rows::Raw<T> raw[kPacks];
  const auto id = [&](std::int64_t at, int i) {
    return at + first_tile * kTile + logp::pack_start(thread % kTileLanes, i);
  };
  const auto fetch = [&](std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw[i] = row.fetch(id(at, i), end);
  };
  fetch(start);
  for (std::int64_t at = start; at < start + width; at += kAbreast * kTile) {  // as often for every leaf
    float z[kPacks][kPack];
    const auto unpack = [&] {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) row.unpack(raw[i], rows::pack_at(id(at, i), end), z[i]);
    };
    if (raw_logp) {
      unpack();
      of_all = join_leaf<OneLeaf>(s, buffer, of_all, logp::tile(z, {1, row.r.raw_c}, false), row.r.raw_c);
      buffer = 1 - buffer;
    }
    unpack();
    fetch(at + kAbreast * kTile);
    int in_tile = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const std::int64_t first = id(at, i);
      int here = 0;
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (Filters && !row.has(kept, z[i][k], first + k)) z[i][k] = -__builtin_inff();
        here += z[i][k] > -__builtin_inff() ? 1 : 0;
      }
      if (here > 0) score_pack(row, z[i], first, reached, best);
      count += here, in_tile += here;
      reached = wave_max(best.score);
    }
    if (logp) {
      State tile = lse128::nothing();
      if (!Filters || __any(in_tile)) tile = logp::tile(z, {1, row.r.c}, false);
      of_kept = join_leaf<OneLeaf>(s, buffer, of_kept, tile, row.r.c);
      buffer = 1 - buffer;
    }
  }
#pragma unroll
  for (int step = 1; step < kWave; step *= 2) {
    const float other = __shfl_xor(best.score, step, kWave);
    best.take(other, __shfl_xor(best.id, step, kWave));
  }
  count = wave_total(count);
  if (lane() == 0) s.score[wave()] = best.score, s.id[wave()] = best.id, s.count[wave()] = count;
  if (thread == 0 && (!OneLeaf || team == 0))
    s.kept[team] = {of_kept.m, of_kept.s}, s.all[team] = {of_all.m, of_all.s};
  __syncthreads();
}

// By all blocks of the row.
template <class T>
__device__ __forceinline__ void keep(const Reader<T>& row, std::int64_t at, bool there, const Kept& kept) {
  const Problem& p = row.p;
  const std::int64_t blocks = gridDim.y;
  for (std::int64_t w = blockIdx.y * kThreads + threadIdx.x; 32 * w < p.vocab; w += blocks * kThreads) {
    std::uint32_t bits = 0;
    for (std::int64_t i = 32 * w; there && i < 32 * w + 32 && i < p.vocab; ++i)
      bits |= std::uint32_t{row.has(kept, row.z(i), i)} << (i - 32 * w);
    p.keep[at * p.keep_stride + w] = static_cast<std::int32_t>(bits);
  }
}

// One thread writes what a row has.
template <class T>
__device__ __forceinline__ void finish(const Reader<T>& row, std::int64_t at, Drawn d, bool there,
                                       const Kept& kept) {
  const Problem& p = row.p;
  if (p.recorded)
    if (const std::int64_t id = p.recorded[at]; there && id >= 0 && id < p.vocab)
      d.recorded_kept = row.has(kept, row.z(id), id);
  write(p, at, d);
}

}  // namespace rlk::simt::sample
