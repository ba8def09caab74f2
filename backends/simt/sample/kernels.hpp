// The portable GPU kernels of sample and sample_verify (arithmetic sample/philox-g1): the native backend's tokens on every GPU.
//
// A block has a row: eight groups of 32 lanes, one for each leaf of the log-probability's sum; a lane has four entries of a
// tile of 128, which are those of one Philox counter. The row is read again for every pass, from cache. Selects count in
// shared memory, in integers, so the order of their atomic adds does not matter.
#pragma once

#include "arithmetic/sample/sample.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::sample {

using namespace rlk::sampling;

inline constexpr int kLanes = 32, kThreads = kLeaves * kLanes;
inline constexpr int kEach = kTile / kLanes;
inline constexpr int kBinBits = 11, kBins = 1 << kBinBits;
inline constexpr int kBinsOfThread = kBins / kThreads;
static_assert(kEach == 4, "the words of a counter");

using Mass = unsigned long long;

struct Shared {
  Mass bins[kBins];
  Mass sums[kThreads];
  Mass before;  // what lies above the cut's bin
  unsigned bin;
  float score[kLeaves], most[kLeaves];
  std::int32_t id[kLeaves], count[kLeaves];
  Part kept[kLeaves], all[kLeaves];
};

// The block's view of its row.
struct Reader {
  const Problem& p;
  const sampling::Parameters r;
  const void* logits;
  float most = -__builtin_inff();

  __device__ float z(std::int64_t i) const {
    return capped(rows::round_to(p.round, rows::load(p.type, logits, i)), p.softcap);
  }
  __device__ bool has(const Kept& k, float x, std::int64_t i) const {
    return k.has(x, static_cast<std::int32_t>(i)) && (k.least <= 0 || weight(x, most, r.c) >= k.least);
  }
};

__device__ __forceinline__ int group() { return static_cast<int>(threadIdx.x) / kLanes; }
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

// body(first id of this lane, how many of its four there are) for the tiles of this group's leaf. Every group runs as often,
// so that all lanes reach what is inside.
template <class Body>
__device__ __forceinline__ void for_tiles(const Problem& p, Body body) {
  const std::int64_t width = p.leaf(), start = group() * width;
  const std::int64_t end = start + width < p.vocab ? start + width : p.vocab;
  for (std::int64_t tile = 0; tile < width; tile += kTile) {
    const std::int64_t first = start + tile + kEach * lane();
    const std::int64_t there = end - first;
    body(first, static_cast<int>(there < 0 ? 0 : there < kEach ? there : kEach));
  }
}

__device__ __forceinline__ float group_max(float x) {
  for (int step = 1; step < kLanes; step *= 2) {
    const float other = __shfl_xor(x, step, kLanes);
    x = other > x ? other : x;
  }
  return x;
}
__device__ __forceinline__ std::int32_t group_total(std::int32_t x) {
  for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor(x, step, kLanes);
  return x;
}

// The largest entry of the row; NaN where no token can be drawn.
__device__ __forceinline__ float largest(const Reader& row, Shared& s) {
  float most = -__builtin_inff();
  std::int32_t bad = 0;
  for_tiles(row.p, [&](std::int64_t first, int n) {
    for (int k = 0; k < n; ++k) {
      const float z = row.z(first + k);
      most = z > most ? z : most;
      bad += !(z < __builtin_inff());
    }
  });
  most = group_max(most);
  bad = group_total(bad);
  if (lane() == 0) s.most[group()] = most, s.count[group()] = bad;
  __syncthreads();
  most = s.most[0], bad = s.count[0];
  for (int g = 1; g < kLeaves; ++g) {
    most = s.most[g] > most ? s.most[g] : most;
    bad += s.count[g];
  }
  __syncthreads();
  return bad > 0 || most == -__builtin_inff() ? __builtin_nanf("") : most;
}

// The bin in which `target` is reached, s.bin, and what lies before it, s.before; kBins where it is not reached.
__device__ __forceinline__ void find_bin(Shared& s, Mass before, Mass target) {
  Mass sum = 0;
  for (int k = 0; k < kBinsOfThread; ++k) sum += s.bins[threadIdx.x * kBinsOfThread + k];
  s.sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned t = 0;
    while (t < kThreads && before + s.sums[t] < target) before += s.sums[t++];
    unsigned bin = t * kBinsOfThread;
    while (bin < kBins && before + s.bins[bin] < target) before += s.bins[bin++];
    s.bin = bin, s.before = before;
  }
  __syncthreads();
}

// Where the first entries of the order whose value adds up to `target` end: bits of place first, then of the id among
// equals. value(z, id) is 0 for entries that are not there. False where all of them together are less.
template <class Value>
__device__ __forceinline__ bool cut(const Reader& row, Shared& s, Value value, Mass target, Kept& kept) {
  std::uint64_t prefix = 0;
  Mass before = 0;
  int known = 0;  // bits of the 64
  for (int digit = 0; digit < 6; ++digit) {
    const int bits = digit % 3 == 2 ? 10 : kBinBits;
    for (unsigned b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
    __syncthreads();
    for_tiles(row.p, [&](std::int64_t first, int n) {
      for (int k = 0; k < n; ++k) {
        const float z = row.z(first + k);
        const std::uint64_t key = std::uint64_t{place(z)} << 32 | static_cast<std::uint64_t>(first + k);
        if (known > 0 && key >> (64 - known) != prefix) continue;
        if (const Mass v = value(z, first + k))
          atomicAdd(&s.bins[key >> (64 - known - bits) & ((1u << bits) - 1)], v);
      }
    });
    __syncthreads();
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

__device__ __forceinline__ Mass total(const Reader& row, Shared& s, const Kept& kept) {
  Mass sum = 0;
  for_tiles(row.p, [&](std::int64_t first, int n) {
    for (int k = 0; k < n; ++k)
      if (const float z = row.z(first + k); row.has(kept, z, first + k))
        sum += mass(weight(z, row.most, row.r.c));
  });
  s.sums[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int t = 0; t < kThreads; ++t) sum += s.sums[t];
  __syncthreads();
  return sum;
}

__device__ __forceinline__ Kept filtered(const Reader& row, Shared& s) {
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

// A tile's part: lane l has the entries 4 l .., so bits 0 and 1 of an index are a register's and 2 to 6 a lane's.
__device__ __forceinline__ Part tile_part(const float (&z)[kEach], float c) {
  float most = z[0];
  for (int k = 1; k < kEach; ++k) most = z[k] > most ? z[k] : most;
  most = group_max(most);
  float e[kEach];
  for (int k = 0; k < kEach; ++k) {
    e[k] = most == -__builtin_inff() ? 0.0f : weight(z[k], most, c);
    e[k] = add_rn(e[k], __shfl_xor(e[k], 16, kLanes));  // bit 6
    e[k] = add_rn(e[k], __shfl_xor(e[k], 2, kLanes));   // bit 3
  }
  float sum = add_rn(add_rn(e[0], e[1]), add_rn(e[2], e[3]));  // bits 0 and 1
  sum = add_rn(sum, __shfl_xor(sum, 1, kLanes));               // bit 2
  sum = add_rn(sum, __shfl_xor(sum, 4, kLanes));               // bit 4
  sum = add_rn(sum, __shfl_xor(sum, 8, kLanes));               // bit 5
  return {most, sum};
}

struct Best {
  float score = -__builtin_inff();
  std::int32_t id = -1;
  __device__ void take(float other, std::int32_t at) {
    if (at >= 0 && (id < 0 || other > score || (other == score && at < id))) score = other, id = at;
  }
};

__device__ __forceinline__ void score_four(const Reader& row, const float (&z)[kEach], std::int64_t first,
                                           Best& best) {
  if (row.r.greedy) {
    for (int k = 0; k < kEach; ++k)
      if (z[k] > -__builtin_inff()) best.take(z[k], static_cast<std::int32_t>(first + k));
    return;
  }
  const philox::Counter c = row.r.noise(static_cast<std::uint32_t>(first / kEach));
  const std::uint32_t words[kEach] = {c.x, c.y, c.z, c.w};
  for (int k = 0; k < kEach; ++k)
    if (z[k] > -__builtin_inff())
      best.take(score(z[k], row.most, row.r.tau, words[k]), static_cast<std::int32_t>(first + k));
}

// What every group found, joined by each thread.
__device__ __forceinline__ Drawn joined_groups(const Reader& row, const Shared& s) {
  Drawn d;
  Best best;
  for (int g = 0; g < kLeaves; ++g) {
    best.take(s.score[g], s.id[g]);
    d.count += s.count[g];
  }
  d.token = best.id;
  const float z = row.z(d.token);
  if (row.p.wants_logp()) d.logp = log_probability(z, joined(s.kept, row.r.c), row.r.tau);
  if (row.p.wants_raw()) d.logp_raw = log_probability(z, joined(s.all, row.r.raw_c), row.r.raw_tau);
  return d;
}

__device__ __forceinline__ Drawn drawn(const Reader& row, Shared& s, const Kept& kept) {
  Best best;
  Part of_kept, of_all;
  std::int32_t count = 0;
  for_tiles(row.p, [&](std::int64_t first, int n) {
    float z[kEach], stays[kEach];
    int here = 0;
    for (int k = 0; k < kEach; ++k) {
      z[k] = k < n ? row.z(first + k) : -__builtin_inff();
      stays[k] = k < n && row.has(kept, z[k], first + k) ? z[k] : -__builtin_inff();
      here += stays[k] > -__builtin_inff();
    }
    if (here > 0) score_four(row, stays, first, best);
    count += here;
    if (row.p.wants_logp()) of_kept = joined(of_kept, tile_part(stays, row.r.c), row.r.c);
    if (row.p.wants_raw()) of_all = joined(of_all, tile_part(z, row.r.raw_c), row.r.raw_c);
  });
  for (int step = 1; step < kLanes; step *= 2) {
    const float other = __shfl_xor(best.score, step, kLanes);
    best.take(other, __shfl_xor(best.id, step, kLanes));
  }
  count = group_total(count);
  if (lane() == 0) {
    s.score[group()] = best.score, s.id[group()] = best.id, s.count[group()] = count;
    s.kept[group()] = of_kept, s.all[group()] = of_all;
  }
  __syncthreads();
  return joined_groups(row, s);
}

__global__ void __launch_bounds__(kThreads) draw(Problem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t at = blockIdx.x;
  Reader row{p, parameters_of(p, at), p.logits_of(at)};
  row.most = largest(row, s);
  const bool there = row.r.valid && row.most == row.most;
  Drawn d;
  Kept kept;
  if (there) {
    kept = filtered(row, s);
    d = drawn(row, s, kept);
  }
  if (p.keep)
    for (std::int64_t w = threadIdx.x; 32 * w < p.vocab; w += kThreads) {
      std::uint32_t bits = 0;
      for (std::int64_t i = 32 * w; there && i < 32 * w + 32 && i < p.vocab; ++i)
        bits |= std::uint32_t{row.has(kept, row.z(i), i)} << (i - 32 * w);
      p.keep[at * p.keep_stride + w] = static_cast<std::int32_t>(bits);
    }
  if (threadIdx.x != 0) return;
  if (p.recorded)
    if (const std::int64_t id = p.recorded[at]; there && id >= 0 && id < p.vocab)
      d.recorded_kept = row.has(kept, row.z(id), id);
  write(p, at, d);
}

// Rows without a token.
__global__ void __launch_bounds__(kThreads) count_bad(Problem p) {
  std::int32_t* counts = dynamic_shared<std::int32_t>();
  std::int32_t bad = 0;
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kThreads) bad += p.token.none(row);
  counts[threadIdx.x] = bad;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int t = 1; t < kThreads; ++t) bad += counts[t];
  *p.bad_count = bad;
}

inline void launch(const Problem& p, hipStream_t stream) {
  if (p.rows > 0)
    hipLaunchKernelGGL(draw, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared), stream, p);
  if (p.bad_count)
    hipLaunchKernelGGL(count_bad, dim3(1), dim3(kThreads), kThreads * sizeof(std::int32_t), stream, p);
}

}  // namespace rlk::simt::sample
