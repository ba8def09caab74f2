// The portable GPU kernels of sample and sample_verify (arithmetic sample/philox-g1): the native backend's tokens on every GPU.
//
// A block has a row, 64 threads each leaf of the log-probability's sum, four lanes a tile of 128 as in logp. The row is read
// again for every pass, from cache. Filters (filters.hpp) add up integers, whose order does not matter. An exact score is
// computed only where a bound on it reaches the best so far.
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

// Leaves what the waves and leaves have in `s`. Without filters all entries are kept that are there.
template <bool Filters, class T>
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
      of_kept = join_leaf(s, buffer, of_kept, tile, row.r.c);
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

template <class T, bool Filters>
__global__ void __launch_bounds__(kThreads, 1) draw(Problem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t at = blockIdx.x;
  Reader<T> row{p, parameters_of(p, at), p.logits_of(at)};
  row.most = largest(row, s);
  const bool there = row.r.valid && row.most > -__builtin_inff();
  Drawn d;
  Kept kept;
  if (there) {
    if constexpr (Filters) kept = filtered(row, s);
    draw_tiles<Filters>(row, s, kept, p.wants_logp(), p.wants_raw());
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
        add(s.bins[bin_of(p, place(z[k]))],
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
  draw_tiles<true>(row, s, kept, true, true);
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
      const auto kernel = p.top_k || p.top_p || p.min_p ? draw<T, true> : draw<T, false>;
      hipLaunchKernelGGL(kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared), stream,
                         p);
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
