// A row of sample as a block of threads has it, and what the filters leave of it: for the kernels of sample.
//
// What is kept is the beginning of an order, so a filter is a search for where it ends. Mostly few entries can be the last one,
// and these are listed and compared with each other; a radix select counts where they are too many.
//   top_k   k threads have an entry of at least the k-th largest of all threads' maxima: the end is among what is not below it
//   top_p   the list of top_k, or the entries of one bin of a histogram of masses over the upper half of an entry's bits
#pragma once

#include "arithmetic/sample/sample.hpp"
#include "simt/logp/plain.hpp"
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
inline constexpr int kListed = 2048;   // entries that a select keeps
inline constexpr int kCompared = 512;  // of these as many as are compared with each other
inline constexpr int kWaves = kThreads / kWave;

using Mass = unsigned long long;

struct Shared {
  Mass bins[kBins];
  std::uint64_t listed[kListed];
  Mass sums[kWaves];
  Mass before;  // what lies above the cut's bin
  unsigned bin;
  std::int32_t list;
  std::uint64_t last;  // the entry at which a target is reached
  bool reached;
  unsigned score_reached;  // by any entry so far, of order_of()
  float peaks[kThreads], peak;
  float score[kWaves], most[kWaves];
  std::int32_t id[kWaves], count[kWaves];
  State tiles[2][2][kLeaves][kWave];  // of two sums, in turn
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

// weight() where it is rare, and by fewer instructions where that gives the same bits.
RLK_DEVICE_CALL float exact_weight(float z, float most, float c) { return weight(z, most, c); }
__device__ __forceinline__ float weight_of(float z, float most, float c) {
  const float x = (z - most) * c;
  return x >= logp::kPlain && x <= 0 ? logp::plain_exp2(x) : exact_weight(z, most, c);
}

// Rows of bf16 that lie in whole packs and that nothing rounds or bends: Reader<Whole>.
using rows::Whole;
inline bool takes_whole(const Problem& p) {
  return p.type == Type::bf16 && p.round != Type::f16 && !(p.softcap > 0) && p.stride % kPack == 0 &&
         p.vocab % kPack == 0 && reinterpret_cast<std::uintptr_t>(p.logits) % sizeof(rows::Bytes16) == 0;
}
// Of a multiprocessor.
template <class T>
inline constexpr int kBlocks = __is_same(T, Whole) ? 2 : 1;
// Two of -inf.
inline constexpr std::uint32_t kAbsentPair = 0xff80ff80u;

// The block's view of its row.
template <class T>
struct Reader {
  static constexpr bool kWhole = __is_same(T, Whole);
  const Problem& p;
  const sampling::Parameters r;
  const void* logits;
  float most = -__builtin_inff(), peak = -__builtin_inff();  // of the row, of what this thread reads
  std::int64_t begin = 0, end = p.vocab;                     // of what the block reads
  float log_least = r.least > 0 ? rough_log2(r.least) : 0;

  __device__ float z(std::int64_t i) const {
    return capped(rows::round_to(p.round, rows::load(p.type, logits, i)), p.softcap);
  }
  // Whether an entry weighs at least r.least, which is above 0. Its logarithm tells, unless that is so close to the edge's that a
  // thousandth, a thousand times what either is off by, is between them.
  __device__ __forceinline__ bool weighs(float x) const {
    constexpr float kMargin = 0.001f;
    const float above = (x - most) * r.c - log_least;
    return above > kMargin || (above > -kMargin && exact_weight(x, most, r.c) >= r.least);
  }
  __device__ __forceinline__ bool has(const Kept& k, float x, std::int64_t i) const {
    return k.has(x, static_cast<std::int32_t>(i)) && (k.least <= 0 || weighs(x));
  }
  __device__ __forceinline__ rows::Raw<T> fetch(std::int64_t i, std::int64_t end) const {
    if constexpr (kWhole) {
      rows::Raw<T> raw{{{kAbsentPair, kAbsentPair, kAbsentPair, kAbsentPair}}};
      if (i < end)
        raw.part[0] = *reinterpret_cast<const rows::Bytes16*>(static_cast<const std::uint16_t*>(logits) + i);
      return raw;
    } else {
      return rows::fetch_pack<T>(p.type, logits, i, rows::pack_at(i, end));
    }
  }
  // Absent entries are -inf.
  __device__ __forceinline__ void unpack(const rows::Raw<T>& raw, int n, float (&z)[kPack]) const {
    rows::unpack<T>(p.type, raw, z);
    if constexpr (kWhole) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) z[k] += 0.0f;  // one zero
      return;
    }
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
  // body(first id, how many, pack) for all packs from begin to end, in no order.
  template <class Body>
  __device__ __forceinline__ void for_raw(Body body) const {
    for (std::int64_t at = begin + std::int64_t{threadIdx.x} * kPack; at < end;
         at += kPacks * kThreads * kPack) {
      rows::Raw<T> raw[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) raw[i] = fetch(at + i * kThreads * kPack, end);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const std::int64_t first = at + i * kThreads * kPack;
        if (first < end) body(first, kWhole ? kPack : rows::pack_at(first, end), raw[i]);
      }
    }
  }
  // body(first id, how many, entries).
  template <class Body>
  __device__ __forceinline__ void for_packs(Body body) const {
    for_raw([&](std::int64_t first, int n, const rows::Raw<T>& raw) {
      float z[kPack];
      unpack(raw, n, z);
      body(first, n, z);
    });
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

// The largest entry of what the thread reads; whether one is NaN or +inf.
template <class T>
__device__ __forceinline__ bool look_through(Reader<T>& row) {
  float most = -__builtin_inff();
  bool bad = false;
  const auto take = [&](float z) {
    most = z > most ? z : most;
    bad = bad || !(z < __builtin_inff());
  };
  if constexpr (Reader<T>::kWhole) {
    std::uint32_t pair = kAbsentPair;
    row.for_raw([&](std::int64_t, int, const rows::Raw<T>& raw) {
#pragma unroll
      for (const std::uint32_t word : raw.part[0].word) pair = rows::larger_pair(pair, word);
    });
    take(bits_float(pair << 16) + 0.0f), take(bits_float(pair & 0xffff0000u) + 0.0f);
  } else {
    row.for_packs([&](std::int64_t, int, const float(&z)[kPack]) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) take(z[k]);
    });
  }
  row.peak = most;
  return bad;
}

// The largest entry of what the block reads; NaN where an entry is NaN or +inf.
template <class T>
__device__ __forceinline__ float largest(Reader<T>& row, Shared& s) {
  std::int32_t bad = look_through(row) ? 1 : 0;
  float most = wave_max(row.peak);
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

// Adds to a number in shared memory by its halves: atomic addition of 64 bits is a loop there.
__device__ __forceinline__ void add(Mass& bin, Mass v) {
  unsigned* const halves = reinterpret_cast<unsigned*>(&bin);
  const auto low = static_cast<unsigned>(v);
  const unsigned carry = low != 0 && atomicAdd(halves, low) + low < low ? 1 : 0;
  if (const unsigned high = static_cast<unsigned>(v >> 32) + carry; high != 0) atomicAdd(halves + 1, high);
}

__device__ __forceinline__ std::uint64_t key_of(float z, std::int64_t id) {
  return std::uint64_t{place(z)} << 32 | static_cast<std::uint64_t>(id);
}
__device__ __forceinline__ float entry_of(std::uint64_t key) {
  return at_place(static_cast<std::uint32_t>(key >> 32));
}
__device__ __forceinline__ std::int64_t id_of(std::uint64_t key) {
  return static_cast<std::int64_t>(key & 0xffffffffu);
}
__device__ __forceinline__ void end_at(std::uint64_t key, Kept& kept) {
  kept.cut = entry_of(key), kept.last = static_cast<std::int32_t>(id_of(key));
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
      const Mass v = value(z, id_of(key));
      if (v != 0) add(s.bins[key >> (64 - known - bits) & ((1u << bits) - 1)], v);
      return v != 0;
    };
    if (listed) {
      for (int i = static_cast<int>(threadIdx.x); i < s.list; i += kThreads)
        count(s.listed[i], entry_of(s.listed[i]));
    } else {
      row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          const std::uint64_t key = key_of(z[k], first + k);
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
  end_at(prefix, kept);
  return true;
}

// The sum over all threads.
__device__ __forceinline__ Mass total(Shared& s, Mass sum) {
  sum = wave_total(sum);
  if (lane() == 0) s.sums[wave()] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWaves; ++w) sum += s.sums[w];
  __syncthreads();
  return sum;
}

// Lists the entries that are there and of which wanted(z) is so. False where they are too many to be compared.
template <class T, class Value, class Wanted>
__device__ __forceinline__ bool list(const Reader<T>& row, Shared& s, Value value, Wanted wanted) {
  if (threadIdx.x == 0) s.list = 0;
  __syncthreads();
  row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k >= n || !wanted(z[k]) || value(z[k], first + k) == 0) continue;
      if (const std::int32_t at = atomicAdd(&s.list, 1); at < kListed) s.listed[at] = key_of(z[k], first + k);
    }
  });
  __syncthreads();
  const bool few = s.list <= kCompared;
  __syncthreads();
  return few;
}

// Where the listed entries' values, with `before`, add up to `target`; false where they do not.
template <class Value>
__device__ __forceinline__ bool reach(Shared& s, Value value, Mass before, Mass target, Kept& kept) {
  const int thread = static_cast<int>(threadIdx.x), n = s.list;
  if (thread == 0) s.reached = false;
  if (thread < n) s.bins[thread] = value(entry_of(s.listed[thread]), id_of(s.listed[thread]));
  __syncthreads();
  if (thread < n) {
    for (int i = 0; i < n; ++i)
      if (s.listed[i] < s.listed[thread]) before += s.bins[i];
    if (before < target && before + s.bins[thread] >= target) s.last = s.listed[thread], s.reached = true;
  }
  __syncthreads();
  const bool reached = s.reached;
  if (reached) end_at(s.last, kept);
  __syncthreads();
  return reached;
}
static_assert(kCompared <= kThreads && kCompared <= kListed && kCompared <= kBins);

// The k-th largest of all threads' maxima.
__device__ __forceinline__ float kth_peak(Shared& s, float mine, std::int64_t k) {
  const int thread = static_cast<int>(threadIdx.x);
  s.peaks[thread] = mine;
  __syncthreads();
  int larger = 0;
  for (int i = 0; i < kThreads; ++i)
    larger += s.peaks[i] > mine || (s.peaks[i] == mine && i < thread) ? 1 : 0;
  if (larger == k - 1) s.peak = mine;
  __syncthreads();
  return s.peak;
}

// top_k where the entries that may be the last are listed, or are not but `few`; whether what is kept is in the list.
template <class T, class There>
__device__ __forceinline__ bool end_of_list(const Reader<T>& row, Shared& s, bool few, float least,
                                            There there, Kept& kept) {
  const auto k = static_cast<Mass>(row.r.top_k);
  // Fewer than k are enough only if they are all.
  if (few && (reach(s, there, 0, k, kept) || least == -__builtin_inff())) return true;
  cut(row, s, there, k, kept);
  return false;
}

inline constexpr int kHalf = 16;  // lower bits of a place, for which a histogram has one bin

template <class T>
__device__ __forceinline__ std::uint32_t half_bin(const Reader<T>& row, float z) {
  return (place(z) >> kHalf) - (place(row.most) >> kHalf);
}
// The bf16 whose place begins with this.
__device__ __forceinline__ float number_at(std::uint32_t half) {
  return bits_float((half >> 15 != 0 ? half : half ^ 0x7fffu) << kHalf);
}
// Where negative numbers begin that may weigh something beside a positive largest entry: two octaves above it and 14 below.
__device__ __forceinline__ std::uint32_t negative_half(float most) {
  const std::uint32_t half = float_bits(most) >> kHalf, octave = half >> 7;
  return half >> 15 != 0 ? half + kBins : 0x8000u + (octave > 14 ? (octave - 14) << 7 : 0);
}
// A histogram of the masses that the block reads, in s.bins, and the sum of all. Equal numbers weigh the same, so a bin of bf16 is
// a count first; the other half of the counts has negative numbers, for the sum alone. What is in neither adds its own mass.
template <class T, class Value>
__device__ __forceinline__ Mass count_numbers(const Reader<T>& row, Shared& s, Value value) {
  unsigned* const counts = reinterpret_cast<unsigned*>(s.bins);
  const std::uint32_t high = place(row.most) >> kHalf, low = negative_half(row.most);
  for (unsigned b = threadIdx.x; b < 2 * kBins; b += kThreads) counts[b] = 0;
  __syncthreads();
  Mass sum = 0;
  row.for_packs([&](std::int64_t first, int, const float(&z)[kPack]) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (!value.there(z[k], first + k)) continue;
      const std::uint32_t half = place(z[k]) >> kHalf;
      if (half - high < kBins)
        atomicAdd(counts + (half - high), 1u);
      else if (half - low < kBins)
        atomicAdd(counts + kBins + (half - low), 1u);
      else
        sum += value.of(z[k]);
    }
  });
  __syncthreads();
  Mass masses[kBinsOfThread];
#pragma unroll
  for (int k = 0; k < kBinsOfThread; ++k) {
    const unsigned b = threadIdx.x * kBinsOfThread + static_cast<unsigned>(k);
    masses[k] = counts[b] == 0 ? 0 : counts[b] * value.of(number_at(high + b));
    sum += masses[k];
    if (counts[kBins + b] != 0) sum += counts[kBins + b] * value.of(number_at(low + b));
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kBinsOfThread; ++k) s.bins[threadIdx.x * kBinsOfThread + k] = masses[k];
  return total(s, sum);
}
// The same of entries of any type.
template <class T, class Value>
__device__ __forceinline__ Mass count_entries(const Reader<T>& row, Shared& s, Value value) {
  for (unsigned b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
  __syncthreads();
  Mass sum = 0;
  row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k >= n) continue;
      const Mass v = value(z[k], first + k);
      sum += v;
      if (const std::uint32_t bin = half_bin(row, z[k]); bin < kBins && v != 0) add(s.bins[bin], v);
    }
  });
  return total(s, sum);
}
template <class T, class Value>
__device__ __forceinline__ Mass count_masses(const Reader<T>& row, Shared& s, Value value) {
  if constexpr (Reader<T>::kWhole)
    return count_numbers(row, s, value);
  else
    return count_entries(row, s, value);
}

// The searches of a block that has the whole row.
struct Alone {
  // top_k; whether what is kept is in the list.
  template <class T, class There>
  __device__ __forceinline__ bool first_entries(const Reader<T>& row, Shared& s, There there,
                                                Kept& kept) const {
    if (row.r.top_k > kThreads) return end_of_list(row, s, false, 0, there, kept);
    const float least = kth_peak(s, row.peak, row.r.top_k);
    const bool few = list(row, s, there, [&](float z) { return z >= least; });
    return end_of_list(row, s, few, least, there, kept);
  }
  // top_p of all entries that are there.
  template <class T, class Value>
  __device__ __forceinline__ void first_masses(const Reader<T>& row, Shared& s, Value value,
                                               Kept& kept) const {
    const Mass target = wanted(row.r.top_p, count_masses(row, s, value));
    find_bin(s, 0, target);
    const std::uint32_t bin = s.bin;
    const Mass before = s.before;
    __syncthreads();
    if (bin < kBins && list(row, s, value, [&](float z) { return half_bin(row, z) == bin; }))
      reach(s, value, before, target, kept);
    else
      cut(row, s, value, target, kept);
  }
};

// Entries that are there, and their masses, where `before` is kept.
template <class T>
struct There {
  const Reader<T>& row;
  const Kept before;
  __device__ __forceinline__ Mass operator()(float z, std::int64_t i) const { return row.has(before, z, i); }
};
template <class T>
struct Masses {
  const Reader<T>& row;
  const Kept before;
  __device__ __forceinline__ bool there(float z, std::int64_t i) const { return row.has(before, z, i); }
  __device__ __forceinline__ Mass of(float z) const { return mass(weight_of(z, row.most, row.r.c)); }
  __device__ __forceinline__ Mass operator()(float z, std::int64_t i) const {
    return there(z, i) ? of(z) : Mass{0};
  }
};
template <class T>
__device__ __forceinline__ Kept unfiltered(const Reader<T>& row) {
  Kept kept;
  if (row.p.min_p_first) kept.least = row.r.least;
  return kept;
}

template <class T, class Search>
__device__ __forceinline__ Kept filtered(const Reader<T>& row, Shared& s, const Search& search) {
  Kept kept = unfiltered(row);
  const bool listed = row.r.top_k > 0 && search.first_entries(row, s, There<T>{row, kept}, kept);
  if (row.r.top_p < 1) {
    const Masses<T> value{row, kept};
    if (listed) {
      Mass sum = 0;
      if (const int i = static_cast<int>(threadIdx.x); i < s.list)
        sum = value(entry_of(s.listed[i]), id_of(s.listed[i]));
      reach(s, value, 0, wanted(row.r.top_p, total(s, sum)), kept);
    } else {
      search.first_masses(row, s, value, kept);
    }
  }
  kept.least = row.r.least;
  return kept;
}

}  // namespace rlk::simt::sample
