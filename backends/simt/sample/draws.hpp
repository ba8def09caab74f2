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

// No score with a word is more than (z - most) tau and this: E >= v, so -ln E <= -ln v, and the margin is a thousand times what
// the functions on either side are off by.
__device__ __forceinline__ float most_noise(std::uint32_t word) {
  constexpr float kLn2 = 0.693147182f, kMargin = 0.01f;
  const float w = word == 0 ? 0.5f : static_cast<float>(word);
  return fused(rough_log2(w), -kLn2, 32 * kLn2 + kMargin);
}

// A pack's entries and words.
struct Noisy {
  float z[kPack];
  std::uint32_t words[kPack];
  __device__ __forceinline__ Noisy(const float (&entries)[kPack], const std::uint32_t (&noise)[kPack]) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) z[k] = entries[k], words[k] = noise[k];
  }
};
RLK_DEVICE_CALL Best largest_of_pack(Noisy pack, std::int32_t first, Best best) {
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (pack.z[k] > -__builtin_inff()) best.take(pack.z[k], first + k);
  return best;
}
RLK_DEVICE_CALL Best best_of_pack(Noisy pack, float most, float tau, std::int32_t first, float reached,
                                  Best best) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const float x = pack.z[k], bound = (x - most) * tau + most_noise(pack.words[k]);
    if (x == -__builtin_inff() || bound < best.score || bound < reached) continue;
    best.take(score(x, most, tau, pack.words[k]), first + k);
  }
  return best;
}

// The best of a pack of entries, of those above -inf, none of which is above `top`; `reached` is a score that is surely reached.
// No entry's bound is above that of the largest with the least word: mostly this alone is asked.
template <class T>
__device__ __forceinline__ void score_pack(const Reader<T>& row, const float (&z)[kPack], float top,
                                           std::int64_t first, float reached, Best& best) {
  if (row.r.greedy) {
    if (top >= reached) best = largest_of_pack({z, {}}, static_cast<std::int32_t>(first), best);
    return;
  }
  const float distance = (top - row.most) * row.r.tau;
  if (distance + most_noise(0) < reached) return;
  const auto group = static_cast<std::uint32_t>((row.p.first + first) >> 2);
  const philox::Counter c = row.r.noise(group), d = row.r.noise(group + 1);
  const std::uint32_t words[kPack] = {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
  std::uint32_t least = words[0];
#pragma unroll
  for (int k = 1; k < kPack; ++k) least = words[k] < least ? words[k] : least;
  if (distance + most_noise(least) < reached) return;
  best = best_of_pack({z, words}, row.most, row.r.tau, static_cast<std::int32_t>(first), reached, best);
}

// Larger where a score is.
__device__ __forceinline__ unsigned order_of(float score) { return ~place(score); }
// The largest score that is reached in the block, as far as it is known there; `mine` is of the wave.
__device__ __forceinline__ float reached_by_block(Shared& s, float mine) {
  unsigned order = order_of(mine), before = 0;
  if (lane() == 0) before = atomicMax(&s.score_reached, order);
  before = __shfl(before, 0, kWave);
  return before > order ? at_place(~before) : mine;
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

// A leaf's tiles joined so far, for one of two sums.
struct LeafSum {
  int which;
  State all = lse128::nothing();
  int turn = 0;

  // Adds tiles, of which this thread's four lanes have one: the block's 128, or 16 of a team, which are joined every other time.
  // `left` entries of the leaf have not been added, these included.
  template <bool OneLeaf>
  __device__ __forceinline__ void join(Shared& s, State tile, std::int64_t left, float c) {
    const bool last = left <= kTiles * kTile;
    const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
    const int half = OneLeaf ? 0 : turn % 2, buffer = OneLeaf ? turn % 2 : turn / 2 % 2;
    auto& tiles = s.tiles[which][buffer];
    ++turn;
    if (thread % kTileLanes == 0) {
      tiles[team][half * kTiles + thread / kTileLanes] = tile;
      if (last && half == 0 && !OneLeaf) tiles[team][kTiles + thread / kTileLanes] = lse128::nothing();
    }
    if (half == 0 && !last && !OneLeaf) return;
    __syncthreads();
    if constexpr (OneLeaf) {
      for (int of = 0; team == 0 && of < kLeaves && of * kTiles * kTile < left; of += kWave / kTiles)
        all = logp::join_tiles(all, tiles[of + lane() / kTiles][lane() % kTiles], lane(), {1, c}, false);
    } else {
      all = logp::join_tiles(all, tiles[team][lane()], lane(), {1, c}, false);
    }
  }
};

// What a lane has of a tile: entries that are not kept are -inf, and `range` is of the others.
template <class T>
struct Held {
  static constexpr bool kWhole = Reader<T>::kWhole;
  rows::Raw<T> raw[kPacks];
  float z[kPacks][kPack];  // where `raw` is not enough
  logp::Range range;
  std::int32_t count;

  __device__ __forceinline__ void get(int i, float (&to)[kPack]) const {
    if constexpr (kWhole) {
      rows::unpack<T>(Type::bf16, raw[i], to);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) to[k] = z[i][k];
    }
  }
  __device__ __forceinline__ void leave_out(int i, int k) {
    if constexpr (kWhole)
      raw[i].part[0].word[k / 2] = k % 2 == 0 ? (raw[i].part[0].word[k / 2] & 0xffff0000u) | kAbsentPair >> 16
                                              : (raw[i].part[0].word[k / 2] & 0xffffu) | kAbsentPair << 16;
    else
      z[i][k] = -__builtin_inff();
  }
  // ids(i): of the first of pack i. Without filters all entries are kept that are there.
  template <bool Filters, class Ids>
  __device__ __forceinline__ void take(const Reader<T>& row, const Kept& kept, std::int64_t end, Ids ids) {
    if constexpr (kWhole && !Filters) {
      range = range_of_all();
      count = kPacks * kPack;
      if (range.least > -__builtin_inff()) return;
    }
    range = {-__builtin_inff(), __builtin_inff()};
    count = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float x[kPack];
      row.unpack(raw[i], rows::pack_at(ids(i), end), x);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const bool has = Filters ? row.has(kept, x[k], ids(i) + k) : x[k] > -__builtin_inff();
        range.largest = logp::larger(range.largest, has ? x[k] : -__builtin_inff());
        range.least = logp::least(range.least, has ? x[k] : __builtin_inff());
        count += has ? 1 : 0;
        if constexpr (!kWhole) z[i][k] = x[k];
        if (Filters && !has) leave_out(i, k);
      }
    }
  }
  __device__ __forceinline__ logp::Range range_of_all() const {
    float x[kPacks * kPack];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) logp::unpack_plain<std::uint16_t>(raw[i], x + i * kPack);
    return logp::range_of<std::uint16_t>(raw, x);
  }
  // logp::tile of what is kept.
  __device__ __forceinline__ State tile(float c) const {
    float m = range.largest, e[kPacks][kPack];
#pragma unroll
    for (int step = 1; step < kTileLanes; step *= 2) m = logp::larger(m, __shfl_xor(m, step, kWave));
    m = add_rn(m, 0.0f);  // one zero
#pragma unroll
    for (int i = 0; i < kPacks; ++i) get(i, e[i]);
    if ((range.least - m) * c >= logp::kPlain) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
#pragma unroll
        for (float& x : e[i]) x = x == -__builtin_inff() ? 0.0f : logp::plain_exp2((x - m) * c);
    } else {
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
#pragma unroll
        for (float& x : e[i]) x = exact_weight(x, m, c);
    }
    return {m, logp::tree(e), 0};
  }
};
template <bool Filters, class T>
__device__ __forceinline__ State tile_of(const Held<T>& here, float c) {
  if constexpr (Held<T>::kWhole && !Filters)
    return logp::plain_tile<std::uint16_t, false>(here.raw, {1, c});
  else
    return here.tile(c);
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
  LeafSum of_kept{0}, of_all{1};
  float reached = -__builtin_inff();
  std::int32_t count = 0;
  Held<T> here;
  const auto id = [&](std::int64_t at, int i) {
    return at + first_tile * kTile + logp::pack_start(thread % kTileLanes, i);
  };
  const auto fetch = [&](std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) here.raw[i] = row.fetch(id(at, i), end);
  };
  if (threadIdx.x == 0) s.score_reached = order_of(reached);
  __syncthreads();
  fetch(start);
  for (std::int64_t at = start; at < start + width; at += kAbreast * kTile) {  // as often for every leaf
    const auto ids = [&](int i) { return id(at, i); };
    if (raw_logp) {
      here.template take<false>(row, kept, end, ids);
      const State tile = __any(here.count) ? tile_of<false>(here, row.r.raw_c) : lse128::nothing();
      of_all.template join<OneLeaf>(s, tile, start + width - at, row.r.raw_c);
    }
    here.template take<Filters>(row, kept, end, ids);
    count += here.count;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float z[kPack];
      here.get(i, z);
      if (here.count > 0) score_pack(row, z, here.range.largest, ids(i), reached, best);
      if (__any(best.score > reached)) reached = wave_max(best.score);
    }
    reached = reached_by_block(s, reached);
    const State tile = logp && __any(here.count) ? tile_of<Filters>(here, row.r.c) : lse128::nothing();
    fetch(at + kAbreast * kTile);
    if (logp) of_kept.template join<OneLeaf>(s, tile, start + width - at, row.r.c);
  }
#pragma unroll
  for (int step = 1; step < kWave; step *= 2) {
    const float other = __shfl_xor(best.score, step, kWave);
    best.take(other, __shfl_xor(best.id, step, kWave));
  }
  count = wave_total(count);
  if (lane() == 0) s.score[wave()] = best.score, s.id[wave()] = best.id, s.count[wave()] = count;
  if (thread == 0 && (!OneLeaf || team == 0))
    s.kept[team] = {of_kept.all.m, of_kept.all.s}, s.all[team] = {of_all.all.m, of_all.all.s};
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
