// The portable GPU kernels of sample and sample_verify (arithmetic sample/philox-g1): the native backend's tokens on every GPU.
//
// A block has a row, 64 threads each leaf of the log-probability's sum, four lanes a tile of 128 as in logp. The row is read
// again for every pass, from cache. Selects count in shared memory, in integers, so the order of their atomic adds does not
// matter; what is left after two digits is mostly few entries, which are then kept there. An exact score is computed only
// where a bound on it reaches the best so far.
#pragma once

#include "arithmetic/sample/sample.hpp"
#include "simt/logp/tiles.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::sample {

using namespace rlk::sampling;
using logp::kPacks;
using logp::kTileLanes;
using logp::kWave;
using lse128::State;
using rows::kPack;

inline constexpr int kTeam = 64, kThreads = kLeaves * kTeam;  // a leaf's threads, and all
inline constexpr int kTiles = kTeam / kTileLanes;
inline constexpr int kBinBits = 11, kBins = 1 << kBinBits;
inline constexpr int kBinsOfThread = kBins / kThreads;
inline constexpr int kListed = 2048;  // entries that a select keeps
inline constexpr int kWaves = kThreads / kWave;

using Mass = unsigned long long;

struct Shared {
  Mass bins[kBins];
  std::uint64_t listed[kListed];
  Mass sums[kWaves];
  Mass before;  // what lies above the cut's bin
  unsigned bin;
  std::int32_t list;
  float score[kWaves], most[kWaves];
  std::int32_t id[kWaves], count[kWaves];
  State tiles[2][kLeaves][kTiles];
  Part kept[kLeaves], all[kLeaves];
};
static_assert(sizeof(Shared) <= 48 << 10);

struct Eight {
  float at[kPack];
};
RLK_DEVICE_CALL Eight bent(float softcap, Eight z) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) z.at[k] = capped(z.at[k], softcap);
  return z;
}

// The block's view of its row.
template <class T>
struct Reader {
  const Problem& p;
  const sampling::Parameters r;
  const void* logits;
  float most = -__builtin_inff();

  __device__ float z(std::int64_t i) const {
    return capped(rows::round_to(p.round, rows::load(p.type, logits, i)), p.softcap);
  }
  __device__ __forceinline__ bool has(const Kept& k, float x, std::int64_t i) const {
    return k.has(x, static_cast<std::int32_t>(i)) && (k.least <= 0 || weight(x, most, r.c) >= k.least);
  }
  __device__ __forceinline__ rows::Raw<T> fetch(std::int64_t i, std::int64_t end) const {
    return rows::fetch_pack<T>(p.type, logits, i, rows::pack_at(i, end));
  }
  // Absent entries are -inf.
  __device__ __forceinline__ void unpack(const rows::Raw<T>& raw, int n, float (&z)[kPack]) const {
    rows::unpack<T>(p.type, raw, z);
    if (p.round != Type::f32) rows::round_pack<rows::Any>(p.round, z);
    if (p.softcap > 0) {
      Eight eight;
#pragma unroll
      for (int k = 0; k < kPack; ++k) eight.at[k] = z[k];
      eight = bent(p.softcap, eight);
#pragma unroll
      for (int k = 0; k < kPack; ++k) z[k] = eight.at[k];
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) z[k] = k < n ? capped(z[k], 0) : -__builtin_inff();
  }
  // body(first id, how many, entries) for all packs, in no order.
  template <class Body>
  __device__ __forceinline__ void for_packs(Body body) const {
    for (std::int64_t at = std::int64_t{threadIdx.x} * kPack; at < p.vocab; at += kPacks * kThreads * kPack) {
      rows::Raw<T> raw[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) raw[i] = fetch(at + i * kThreads * kPack, p.vocab);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const std::int64_t first = at + i * kThreads * kPack;
        const int n = rows::pack_at(first, p.vocab);
        float z[kPack];
        unpack(raw[i], n, z);
        if (n > 0) body(first, n, z);
      }
    }
  }
};

__device__ __forceinline__ int wave() { return static_cast<int>(threadIdx.x) / kWave; }
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWave; }

__device__ __forceinline__ float wave_max(float x) {
#pragma unroll
  for (int step = 1; step < kWave; step *= 2) {
    const float other = __shfl_xor(x, step, kWave);
    x = other > x ? other : x;
  }
  return x;
}
template <class Number>
__device__ __forceinline__ Number wave_total(Number x) {
#pragma unroll
  for (int step = 1; step < kWave; step *= 2) x += __shfl_xor(x, step, kWave);
  return x;
}

// The largest entry of the row; NaN where an entry is NaN or +inf.
template <class T>
__device__ __forceinline__ float largest(const Reader<T>& row, Shared& s) {
  float most = -__builtin_inff();
  std::int32_t bad = 0;
  row.for_packs([&](std::int64_t, int, const float(&z)[kPack]) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      most = z[k] > most ? z[k] : most;
      bad += z[k] < __builtin_inff() ? 0 : 1;
    }
  });
  most = wave_max(most);
  bad = wave_total(bad);
  if (lane() == 0) s.most[wave()] = most, s.count[wave()] = bad;
  __syncthreads();
  bad = 0;
  for (int w = 0; w < kWaves; ++w) {
    most = s.most[w] > most ? s.most[w] : most;
    bad += s.count[w];
  }
  __syncthreads();
  return bad > 0 ? __builtin_nanf("") : most;
}

// The bin in which `target` is reached, s.bin, and what lies before it, s.before; kBins where it is not reached.
__device__ __forceinline__ void find_bin(Shared& s, Mass before, Mass target) {
  const Mass* mine = s.bins + threadIdx.x * kBinsOfThread;
  Mass sum = 0;
  for (int k = 0; k < kBinsOfThread; ++k) sum += mine[k];
  Mass up_to = sum;  // with all before it in the wave
#pragma unroll
  for (int step = 1; step < kWave; step *= 2) {
    const Mass other = __shfl_up(up_to, static_cast<unsigned>(step), kWave);
    if (lane() >= step) up_to += other;
  }
  if (lane() == kWave - 1) s.sums[wave()] = up_to;
  if (threadIdx.x == 0) s.bin = kBins;
  __syncthreads();
  before += up_to - sum;
  for (int w = 0; w < wave(); ++w) before += s.sums[w];
  if (before < target && before + sum >= target) {
    unsigned k = 0;
    while (before + mine[k] < target) before += mine[k++];
    s.bin = threadIdx.x * kBinsOfThread + k, s.before = before;
  }
  __syncthreads();
}

// Where the first entries of the order whose value adds up to `target` end: bits of place first, then of the id among
// equals. value(z, id) is 0 for entries that are not there. False where all of them together are less.
template <class T, class Value>
__device__ __forceinline__ bool cut(const Reader<T>& row, Shared& s, Value value, Mass target, Kept& kept) {
  std::uint64_t prefix = 0;
  Mass before = 0;
  int known = 0;        // bits of the 64
  bool listed = false;  // whether the list has all entries with the prefix
  for (int digit = 0; digit < 6; ++digit) {
    const int bits = digit % 3 == 2 ? 10 : kBinBits;
    for (unsigned b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
    if (threadIdx.x == 0 && !listed) s.list = 0;
    __syncthreads();
    // Whether an entry that is there has the prefix.
    const auto count = [&](std::uint64_t key, float z) {
      if (known > 0 && key >> (64 - known) != prefix) return false;
      const Mass v = value(z, static_cast<std::int64_t>(key & 0xffffffffu));
      if (v != 0) atomicAdd(&s.bins[key >> (64 - known - bits) & ((1u << bits) - 1)], v);
      return v != 0;
    };
    if (listed) {
      for (int i = static_cast<int>(threadIdx.x); i < s.list; i += kThreads)
        count(s.listed[i], at_place(static_cast<std::uint32_t>(s.listed[i] >> 32)));
    } else {
      row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          const std::uint64_t key = std::uint64_t{place(z[k])} << 32 | static_cast<std::uint64_t>(first + k);
          if (k >= n || !count(key, z[k]) || digit == 0) continue;
          if (const std::int32_t at = atomicAdd(&s.list, 1); at < kListed) s.listed[at] = key;
        }
      });
    }
    __syncthreads();
    listed = listed || (digit > 0 && s.list <= kListed);
    find_bin(s, before, target);
    const unsigned bin = s.bin;
    before = s.before;
    __syncthreads();
    if (bin == kBins) return false;
    prefix = prefix << bits | bin;
    known += bits;
  }
  kept.cut = at_place(static_cast<std::uint32_t>(prefix >> 32));
  kept.last = static_cast<std::int32_t>(prefix & 0xffffffffu);
  return true;
}

template <class T>
__device__ __forceinline__ Mass total(const Reader<T>& row, Shared& s, const Kept& kept) {
  Mass sum = 0;
  row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (k < n && row.has(kept, z[k], first + k)) sum += mass(weight(z[k], row.most, row.r.c));
  });
  sum = wave_total(sum);
  if (lane() == 0) s.sums[wave()] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWaves; ++w) sum += s.sums[w];
  __syncthreads();
  return sum;
}

template <class T>
__device__ __forceinline__ Kept filtered(const Reader<T>& row, Shared& s) {
  Kept kept;
  if (row.p.min_p_first) kept.least = row.r.least;
  if (row.r.top_k > 0) {
    const Kept all = kept;
    cut(
        row, s, [&](float z, std::int64_t i) { return Mass{row.has(all, z, i)}; },
        static_cast<Mass>(row.r.top_k), kept);
  }
  if (row.r.top_p < 1) {
    const Kept before = kept;
    const Mass target = wanted(row.r.top_p, total(row, s, before));
    cut(
        row, s,
        [&](float z, std::int64_t i) {
          return row.has(before, z, i) ? Mass{mass(weight(z, row.most, row.r.c))} : Mass{0};
        },
        target, kept);
  }
  kept.least = row.r.least;
  return kept;
}

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
__device__ __forceinline__ Drawn joined_leaves(const Reader<T>& row, const Shared& s) {
  const Joined all = joined_waves(s);
  Drawn d;
  d.token = all.best.id, d.count = all.count;
  const float z = row.z(d.token);
  if (row.p.wants_logp()) d.logp = log_probability(z, joined(s.kept, row.r.c), row.r.tau);
  if (row.p.wants_raw()) d.logp_raw = log_probability(z, joined(s.all, row.r.raw_c), row.r.raw_tau);
  return d;
}

// The sum of a leaf with 16 more tiles, of which this thread's four lanes have one.
__device__ __forceinline__ State join_leaf(Shared& s, int buffer, State all, State tile, float c) {
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  if (thread % kTileLanes == 0) s.tiles[buffer][team][thread / kTileLanes] = tile;
  __syncthreads();
  const State mine = lane() < kTiles ? s.tiles[buffer][team][lane()] : lse128::nothing();
  return logp::join_tiles<kTiles>(all, mine, lane(), {1, c}, false);
}

// Leaves what the waves and leaves have in `s`.
template <class T>
__device__ __forceinline__ void draw_tiles(const Reader<T>& row, Shared& s, const Kept& kept, bool logp,
                                           bool raw_logp) {
  const int team = static_cast<int>(threadIdx.x) / kTeam, thread = static_cast<int>(threadIdx.x) % kTeam;
  const std::int64_t width = row.p.leaf(), start = team * width;
  const std::int64_t end = start + width < row.p.vocab ? start + width : row.p.vocab;
  Best best;
  State of_kept = lse128::nothing(), of_all = lse128::nothing();
  float reached = -__builtin_inff();
  std::int32_t count = 0;
  int buffer = 0;
  rows::Raw<T> raw[kPacks];
  const auto id = [&](std::int64_t at, int i) {
    return at + thread / kTileLanes * kTile + logp::pack_start(thread % kTileLanes, i);
  };
  const auto fetch = [&](std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) raw[i] = row.fetch(id(at, i), end);
  };
  fetch(start);
  for (std::int64_t at = start; at < start + width; at += kTiles * kTile) {  // as often for every leaf
    float z[kPacks][kPack];
    const auto unpack = [&] {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) row.unpack(raw[i], rows::pack_at(id(at, i), end), z[i]);
    };
    if (raw_logp) {
      unpack();
      of_all = join_leaf(s, buffer, of_all, logp::tile(z, {1, row.r.raw_c}, false), row.r.raw_c);
      buffer = 1 - buffer;
    }
    unpack();
    fetch(at + kTiles * kTile);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const std::int64_t first = id(at, i);
      int here = 0;
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (!row.has(kept, z[i][k], first + k)) z[i][k] = -__builtin_inff();
        here += z[i][k] > -__builtin_inff() ? 1 : 0;
      }
      if (here > 0) score_pack(row, z[i], first, reached, best);
      count += here;
      reached = wave_max(best.score);
    }
    if (logp) {
      of_kept = join_leaf(s, buffer, of_kept, logp::tile(z, {1, row.r.c}, false), row.r.c);
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
  if (thread == 0) s.kept[team] = {of_kept.m, of_kept.s}, s.all[team] = {of_all.m, of_all.s};
  __syncthreads();
}

template <class T>
__device__ __forceinline__ void keep(const Reader<T>& row, std::int64_t at, bool there, const Kept& kept) {
  const Problem& p = row.p;
  for (std::int64_t w = threadIdx.x; 32 * w < p.vocab; w += kThreads) {
    std::uint32_t bits = 0;
    for (std::int64_t i = 32 * w; there && i < 32 * w + 32 && i < p.vocab; ++i)
      bits |= std::uint32_t{row.has(kept, row.z(i), i)} << (i - 32 * w);
    p.keep[at * p.keep_stride + w] = static_cast<std::int32_t>(bits);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) draw(Problem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t at = blockIdx.x;
  Reader<T> row{p, parameters_of(p, at), p.logits_of(at)};
  row.most = largest(row, s);
  const bool there = row.r.valid && row.most > -__builtin_inff();
  Drawn d;
  Kept kept;
  if (there) {
    kept = filtered(row, s);
    draw_tiles(row, s, kept, p.wants_logp(), p.wants_raw());
    d = joined_leaves(row, s);
  }
  if (p.keep) keep(row, at, there, kept);
  if (threadIdx.x != 0) return;
  if (p.recorded)
    if (const std::int64_t id = p.recorded[at]; there && id >= 0 && id < p.vocab)
      d.recorded_kept = row.has(kept, row.z(id), id);
  write(p, at, d);
}

// ---- parts of a vocabulary

// What the filter whose cut is this leaves of this part's entries.
template <class T>
__device__ __forceinline__ void cut_at(const Reader<T>& row, Shared& s, const Edge& edge, Kept& kept) {
  if (!edge.there || (edge.take == kAllOfThem && kept.cut == edge.cut)) return;
  const float least = kept.least;
  kept.cut = edge.cut, kept.last = edge.take == 0 ? -1 : static_cast<std::int32_t>(row.p.vocab);
  if (edge.take <= 0) return;
  Kept found;
  if (cut(
          row, s,
          [&](float z, std::int64_t) {
            return Mass{z == edge.cut && (least <= 0 || weight(z, row.most, row.r.c) >= least)};
          },
          static_cast<Mass>(edge.take), found))
    kept.last = found.last;
}

template <class T>
__device__ __forceinline__ void count_digit(const Reader<T>& row, Shared& s, const std::int64_t* state,
                                            std::int64_t* out) {
  const Problem& p = row.p;
  const bool masses = p.step == Step::top_p, on = counts(p, row.r, state);
  Kept kept;
  if (p.min_p_first) kept.least = row.r.least;
  if (on && masses) cut_at(row, s, edge_of(state, top_k_slots(), p.part), kept);
  for (unsigned b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
  __syncthreads();
  if (on)
    row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k >= n || !row.has(kept, z[k], first + k) || !has_prefix(p, state, place(z[k]))) continue;
        atomicAdd(&s.bins[bin_of(p, place(z[k]))],
                  masses ? Mass{mass_below_one(weight(z[k], row.most, row.r.c))} : Mass{1});
      }
    });
  __syncthreads();
  for (unsigned b = threadIdx.x; b < kBins; b += kThreads) out[b] = static_cast<std::int64_t>(s.bins[b]);
}

template <class T>
__device__ __forceinline__ void find(const Reader<T>& row, Shared& s, const std::int64_t* state, Kept& kept,
                                     std::int64_t* out) {
  const Problem& p = row.p;
  if (p.min_p_first) kept.least = row.r.least;
  cut_at(row, s, edge_of(state, top_k_slots(), p.part), kept);
  cut_at(row, s, edge_of(state, top_p_slots(), p.part), kept);
  kept.least = row.r.least;
  draw_tiles(row, s, kept, true, true);
  if (threadIdx.x != 0) return;
  const Joined all = joined_waves(s);
  Found f;
  f.count = all.count;
  f.kept = joined(s.kept, row.r.c), f.all = joined(s.all, row.r.raw_c);
  if (all.best.id >= 0) f.score = all.best.score, f.id = p.first + all.best.id, f.z = row.z(all.best.id);
  put(out, f);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) part(Problem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t at = blockIdx.x;
  Reader<T> row{p, parameters_of(p, at), p.logits_of(at)};
  std::int64_t* out = p.partials + at * p.partials_stride;
  if (p.step == Step::largest) {
    const float most = largest(row, s);
    if (threadIdx.x == 0) out[0] = bits_of(simt::from_float<float>(row.r.valid ? most : __builtin_nanf("")));
    return;
  }
  const std::int64_t* state = p.state + at * p.state_stride;
  row.most = float_of(state[kStateMost]);
  const bool there = is_finite(row.most);
  if (p.step != Step::token) {
    if (there)
      count_digit(row, s, state, out);
    else
      for (unsigned b = threadIdx.x; b < kBins; b += kThreads) out[b] = 0;
    return;
  }
  Kept kept;
  if (there)
    find(row, s, state, kept, out);
  else if (threadIdx.x == 0)
    put_nothing(out);
  if (p.keep) keep(row, at, there, kept);
}

// A row of sample_merge: a block adds the bins of all parts.
__global__ void __launch_bounds__(kThreads, 1) merge(MergeProblem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t row = blockIdx.x;
  std::int64_t next[kStateWidth];
  if (p.step == Step::token) {
    if (threadIdx.x == 0) merge_token(p, row);
    return;
  }
  if (p.step == Step::largest) {
    merge_largest(p, row, next);
  } else if (begin_digit(p, row, next)) {  // the same for all threads
    const int bins = 1 << digit_bits(p.digit);
    Mass sum = 0;
    for (int b = static_cast<int>(threadIdx.x); b < kBins; b += kThreads) {
      s.bins[b] = b < bins ? p.bin(row, b) : 0;
      sum += s.bins[b];
    }
    std::uint64_t target = static_cast<std::uint64_t>(next[kStateTarget]);
    if (p.step == Step::top_k || p.digit == 0) {
      sum = wave_total(sum);
      if (lane() == 0) s.sums[wave()] = sum;
      __syncthreads();
      sum = 0;
      for (int w = 0; w < kWaves; ++w) sum += s.sums[w];
      target = first_target(p, row, sum);
      if (p.step == Step::top_p) next[kStateTarget] = static_cast<std::int64_t>(target);
    }
    __syncthreads();
    find_bin(s, static_cast<Mass>(next[p.slots().before]), target);
    end_digit(p, row, target, s.bin == kBins ? -1 : static_cast<int>(s.bin), s.before, next);
  }
  if (p.next && threadIdx.x == 0)
    for (int i = 0; i < kStateWidth; ++i) p.next[row * p.next_stride + i] = next[i];
}

// Rows without a token.
__global__ void __launch_bounds__(kThreads) count_bad(MergeProblem p) {
  std::int32_t* counts = dynamic_shared<std::int32_t>();
  std::int32_t bad = 0;
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kThreads) bad += p.none(row);
  counts[threadIdx.x] = bad;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int t = 1; t < kThreads; ++t) bad += counts[t];
  *p.bad_count = bad;
}

inline void launch_count(const MergeProblem& p, hipStream_t stream) {
  hipLaunchKernelGGL(count_bad, dim3(1), dim3(kThreads), kThreads * sizeof(std::int32_t), stream, p);
}

inline void launch(const Problem& p, hipStream_t stream) {
  if (p.rows > 0)
    rows::for_type(p.type == Type::bf16, [&]<class T>(T) {
      hipLaunchKernelGGL((draw<T>), dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared),
                         stream, p);
    });
  if (p.bad_count) {
    MergeProblem counted;
    counted.rows = p.rows, counted.token = p.token, counted.bad_count = p.bad_count;
    launch_count(counted, stream);
  }
}

inline void launch_part(const Problem& p, hipStream_t stream) {
  if (p.rows > 0)
    rows::for_type(p.type == Type::bf16, [&]<class T>(T) {
      hipLaunchKernelGGL((part<T>), dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared),
                         stream, p);
    });
}

inline void launch_merge(const MergeProblem& p, hipStream_t stream) {
  if (p.rows > 0)
    hipLaunchKernelGGL(merge, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared), stream, p);
  if (p.bad_count) launch_count(p, stream);
}

}  // namespace rlk::simt::sample
