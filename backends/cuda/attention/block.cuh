// What producer and consumers of the attention kernel share: which rows and keys a block has, and its shared memory.
#pragma once

#include <climits>

#include "cuda/attention/maps.h"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/copy.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace rlk::cuda::attention {

using namespace hopper;

inline constexpr int kMostKeys = 1 << 30;  // of a sequence, as what describes an item counts them

// What a launch needs beside the problem.
struct Job {
  Problem p;
  Maps maps;
  float* parts;  // Spread: [row, split] of m, l and O; kTotalsApart: every block's sums of other splits
  int splits;
  bool values_in_keys;        // v is the first channels of k
  int pairs = 1;              // of a sequence and key head, or of heads alone, whose items come side by side
  bool differ = false;        // sequences have different numbers of items
  int items = 0;              // of a pair, if they have not
  int window = kMostKeys;     // keys up to its own that a query sees
  unsigned run = 0;           // Spread: keys of an item's splits; 0: all
  unsigned* taken = nullptr;  // items, beside the blocks' first ones; null: a block takes one of every round
};

inline constexpr int kWorks = 3;  // items that are known at a time: one that ends, one at hand, and the next

// Width, ValueWidth: the channels of q and k, and of v, that are multiplied; there is room for whole lines of 64. Spread: an item
// has some splits and leaves their sums in memory. Prefixed: sequences may have the keys of another first. F8: keys and values are
// fp8, which the producer widens.
template <class T, int Width, int ValueWidth, bool Capped, bool Spread, bool Prefixed, bool F8 = false>
struct Shape {
  using Element = T;
  static constexpr int kChannels = Width;
  static constexpr int kWidth = (Width + 63) / 64 * 64, kValueWidth = (ValueWidth + 63) / 64 * 64;
  static constexpr bool kCapped = Capped, kSpread = Spread, kPrefixed = Prefixed, kF8 = F8;
  // One tile of keys is all there is room for: its values are their first channels, or take their place.
  static constexpr bool kLatent = Width > 256;
  static_assert(!kLatent || Spread, "there is no room for sums of other splits");
  // Registers do not hold the scores of a tile beside its weights.
  static constexpr bool kOneByOne = kLatent || (Width > kNarrow && Capped) || Width > 192;
  // Sums of other splits are in memory, where shared memory has no room for them beside two stages of keys or rows.
  static constexpr bool kTotalsApart = !Spread && Width > kNarrow;
  // Warpgroups: of 64 rows each, as many as registers hold, or, where a thread cannot hold a row's sums, of the same rows and
  // a part of the values' channels each.
  static constexpr int kGroups = kLatent ? 1 : Width > 64 || Spread ? 2 : 3, kParts = kLatent ? 2 : 1;
  static constexpr int kRows = 64 * kGroups, kConsumers = 128 * kGroups * kParts, kThreads = kConsumers + 128;
  static constexpr int kPartWidth = ValueWidth / kParts;
  static constexpr int kKeyBytes = kTile * kWidth * 2, kValueBytes = kLatent ? 0 : kTile * kValueWidth * 2;
  static constexpr int kQueryBytes = kRows * kWidth * 2,
                       kTotalBytes = Spread || kTotalsApart ? 0 : kRows * ValueWidth * 4;
  // What there is room for.
  static constexpr int kKeyStages = Width > 192 ? 1 : Width > kNarrow || !Spread ? 2 : 3;
  static constexpr int kValueStages = Width > 192 ? 1 : Width <= 128 && Spread ? 3 : 2;
  static constexpr int kRingBytes = kKeyStages * kKeyBytes + kValueStages * kValueBytes;
  static constexpr int kPlaceBytes = kTile * 8;
  static constexpr int kBarriers = 2 * (kKeyStages + kValueStages + kGroups);
  static constexpr int kWorkBytes = kWorks * 64 + kRows * 8;
  static constexpr int kBytes =
      kQueryBytes + kRingBytes + kTotalBytes + kPlaceBytes + kBarriers * 8 + kWorkBytes;
  static_assert(kBytes <= 227 * 1024, "of a block");
};

// Rows [first, first + count) of sequence n and key head h: the queries of the heads that share keys, those of a query
// side by side, from `query` on. They see keys of tiles [begin, end). Keys are counted from the first one here, where a split
// begins, and `offset` is the first query's position among them, which of attention_part may lie before or behind them all. Key j
// lies in row k_begin + j, one of the first `shared` in row shared_begin + j.
struct alignas(16) Work {
  int n = 0, q_begin = 0, k_begin = 0;
  int h = 0, first = 0, query = 0, count = 0, offset = 0, keys = 0, begin = 0, end = 0, shared = 0,
      shared_begin = 0;
};
static_assert(sizeof(Work) <= 64);
inline constexpr int kNoMore = -1;  // rows of what comes behind a block's last item

// The item that a block takes in a round; every other round goes backwards, so that those of all blocks take about the same
// time where they come in the order of their size.
__device__ __forceinline__ int item_of(int round) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// All lanes have the same; so that the compiler sees that a warp stays together.
__device__ __forceinline__ int uniform(int x) {
  return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(x)));
}

// Tiles whose values TMA brings; of the others threads bring some or all: what is behind the sequence's end has to be zeros.
__device__ __forceinline__ int tiles_by_tma(int keys, int box) { return box == 0 ? 0 : keys / kTile; }
// And that one of `height` keys which has keys of two sequences.
__device__ __forceinline__ bool is_seam(int shared, int tile, int height) {
  return shared > tile * height && shared < (tile + 1) * height;
}

template <class Rows>
__device__ __forceinline__ int tiles_of(Rows rows, int height) {
  return static_cast<int>((rows + height - 1) / height);
}

// How far a search among sequences has come: those before `base` have `before` of what is counted.
struct Seek {
  int base = 0, before = 0;
};
// The sequence n that number `at` of all belongs to, where sequence i has of(i) of them; `at` becomes one of its own. Every lane
// asks alike; lane n - seek.base is the one that asked about n. A search goes on where the last one ended, if that is not too far.
template <class Index, class Of>
__device__ inline bool find_place(Index sequences, Of of, Seek& seek, Index& n, int& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (at < seek.before) seek = Seek{};
  at -= seek.before;
  while (seek.base < sequences) {
    const int own = seek.base + lane < sequences ? of(seek.base + lane) : 0;
    int upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += before;
    }
    if (const unsigned hit = __ballot_sync(~0u, at < upto); hit != 0) {
      const int from = __ffs(static_cast<int>(hit)) - 1;
      n = seek.base + from;
      at -= __shfl_sync(~0u, upto - own, from);
      return true;
    }
    const int here = __shfl_sync(~0u, upto, 31);
    at -= here, seek.before += here, seek.base += 32;
  }
  return false;
}

// Number n of a list, held to [0, most].
__device__ __forceinline__ int bound(const attn128::Integers& of, int n, int most) {
  const std::int64_t at = n * of.stride[0];
  if (of.wide) return static_cast<int>(Problem::held(static_cast<const std::int64_t*>(of.data)[at], most));
  return min(max(static_cast<const std::int32_t*>(of.data)[at], 0), most);
}
// Rows of a sequence, whose items are described in 32 bits: as many are all that the kernel takes.
struct Range {
  int begin, count;
};
__device__ __forceinline__ Range range(const attn128::Integers& of, int n, int most) {
  if (!of) return {0, most};
  const int begin = bound(of, n, most);
  return {begin, max(bound(of, n + 1, most) - begin, 0)};
}
__device__ __forceinline__ Range queries_of(const Problem& p, int n) {
  return range(p.cu_q, n, static_cast<int>(p.queries));
}
template <class S>
__device__ __forceinline__ Range keys_of(const Problem& p, int n) {
  if constexpr (S::kSpread) {
    if (p.k_first) {
      const attn128::Visible here = p.here(n);
      return {static_cast<int>(p.k_begin(n)), static_cast<int>(here.last - here.first)};
    }
  }
  if (S::kPrefixed) return {static_cast<int>(p.k_begin(n)), static_cast<int>(p.kv_count(n))};
  Range keys = range(p.cu_k, n, static_cast<int>(p.room));
  if (p.kv_len) keys.count = bound(p.kv_len, n, keys.count);
  return keys;
}

// Where the first of a sequence's queries is among its keys, which are `keys`. Those of a rank may lie far from it: a position
// from which every query sees none of them, or all, stands for those further on.
template <class S>
__device__ __forceinline__ int offset_of(const Problem& p, int n, int queries, int keys) {
  if constexpr (S::kSpread) {
    if (p.k_first) {
      constexpr std::int64_t kFirst = -(std::int64_t{1} << 30), kLast = INT_MAX;
      const std::int64_t at = p.keys(n) - queries - p.here(n).first;
      return static_cast<int>(at < kFirst ? kFirst : at > kLast ? kLast : at);
    }
  }
  return keys - queries;
}
// What query i of an item's sequence sees of its keys: [x, y).
template <class S>
__device__ __forceinline__ int2 seen_by(const Job& job, const Work& w, int i) {
  if constexpr (S::kSpread) {
    const attn128::Visible seen = job.p.visible(std::int64_t{w.offset} + i, w.keys);
    return {static_cast<int>(seen.first < w.keys ? seen.first : w.keys),
            static_cast<int>(seen.last < w.keys ? seen.last : w.keys)};
  } else {
    const int upto = w.offset + i + 1, first = max(upto - job.window, 0);
    return {first, max(job.p.causal ? min(upto, w.keys) : w.keys, first)};
  }
}

// Items of a pair of a sequence and a key head: groups of its rows, or, Spread, runs of these rows' splits. Where sequences differ
// a pair is a head, and has those of all sequences.
template <class S>
struct Items {
  const Job& job;
  __device__ __forceinline__ unsigned tiles(int queries) const {
    return (static_cast<unsigned>(queries) * static_cast<unsigned>(job.p.group) + S::kRows - 1) / S::kRows;
  }
  __device__ __forceinline__ int of(int n, int queries) const {
    unsigned runs = 1;
    if (S::kSpread && job.run != 0)
      runs = (static_cast<unsigned>(keys_of<S>(job.p, n).count) + job.run - 1) / job.run;
    return static_cast<int>(tiles(queries) * runs);
  }
  __device__ __forceinline__ unsigned pairs() const {
    return static_cast<unsigned>(job.p.heads) * (job.differ ? 1 : static_cast<unsigned>(job.p.sequences));
  }
  __device__ __forceinline__ unsigned of_pair() const {
    if (!job.differ) return static_cast<unsigned>(job.items);
    int items = 0;
    for (int n = static_cast<int>(threadIdx.x) % 32; n < job.p.sequences; n += 32)
      items += of(n, queries_of(job.p, n).count);
    return __reduce_add_sync(~0u, static_cast<unsigned>(items));
  }
};

// What an item is; false: nothing. Pairs of a sequence and head come a few at a time, of them the last rows, which see the most
// keys, first or last by turns: so items next to each other have about the same size, and the last ones are small.
template <class S>
__device__ inline bool find_work(const Job& job, unsigned of_pair, unsigned item, Seek& seek, Work& w) {
  const Problem& p = job.p;
  const Items<S> items{job};
  const unsigned pairs = items.pairs(), abreast = static_cast<unsigned>(job.pairs);
  unsigned turn = 0, turns = 1;
  if (abreast < pairs) turn = item / (abreast * of_pair), turns = (pairs + abreast - 1) / abreast;
  const unsigned first = turn * abreast, rest = item - first * of_pair, here = min(abreast, pairs - first),
                 pair = first + rest % here;
  int at = static_cast<int>(rest / here);
  Range queries;
  if (job.differ) {
    w.h = static_cast<int>(pair);
    const auto of = [&](int n) { return queries = queries_of(p, n), items.of(n, queries.count); };
    if (!find_place(static_cast<int>(p.sequences), of, seek, w.n, at)) return false;
    queries = {__shfl_sync(~0u, queries.begin, w.n - seek.base),
               __shfl_sync(~0u, queries.count, w.n - seek.base)};
  } else {
    w.h = static_cast<int>(pair % static_cast<unsigned>(p.heads));
    w.n = static_cast<int>(pair / static_cast<unsigned>(p.heads));
    queries = queries_of(p, w.n);
  }
  const auto tiles = static_cast<int>(items.tiles(queries.count));
  const int of_rows = S::kSpread ? at % tiles : at,
            tile = (turns - turn) % 2 != 0 ? tiles - 1 - of_rows : of_rows;
  const Range keys = keys_of<S>(p, w.n);
  w.q_begin = queries.begin, w.k_begin = keys.begin, w.keys = keys.count;
  if constexpr (S::kPrefixed) {
    const attn128::KeyRows rows = p.key_rows(w.n);
    w.k_begin -= static_cast<int>(rows.shared);
    w.shared = static_cast<int>(rows.shared), w.shared_begin = static_cast<int>(rows.shared_begin);
  }
  w.first = tile * S::kRows, w.query = w.first / p.group;
  w.count = min(queries.count * p.group - w.first, S::kRows);
  w.offset = offset_of<S>(p, w.n, queries.count, w.keys);
  w.begin = seen_by<S>(job, w, w.query).x / kTile;
  w.end = tiles_of(seen_by<S>(job, w, (w.first + w.count - 1) / p.group).y, kTile);
  if constexpr (S::kSpread) {
    if (job.run == 0) return w.begin < w.end;
    // The first splits first, of which all rows see all.
    const int of_run = static_cast<int>(job.run) / kTile, begin = at / tiles * of_run;
    w.begin = max(w.begin, begin), w.end = min(w.end, begin + of_run);
    return w.begin < w.end;
  }
  return true;
}

// Where 16 bytes of a tile's row lie: tiles are rows of 128 bytes, [Width / 64][rows][64], their pieces swizzled as TMA and
// wgmma have it.
__device__ __forceinline__ int swizzled(int rows, int row, int piece) {
  return piece / 8 * rows * 128 + row * 128 + ((piece % 8) ^ (row % 8)) * 16;
}

// Of the producer: all but its first warp say what rows see and bring queries.
inline constexpr int kQueryThreads = 96;

// Queries [first, first + 64) of an item's, by those threads of which this is the `thread`-th. Rows that are not there are copies
// of the last one.
template <class S>
__device__ __forceinline__ void copy_queries(const Problem& p, const Work& w, unsigned char* to, int first,
                                             int thread) {
  constexpr int kPieces = S::kWidth / 8, kWarps = kQueryThreads / 32, kOwn = (64 + kWarps - 1) / kWarps;
  // A lane finds one of its warp's rows, every kWarps-th.
  const int lane = thread % 32, warp = thread / 32,
            at = w.first + min(first + warp + kWarps * lane, w.count - 1);
  const auto row_at = reinterpret_cast<unsigned long long>(
      p.q.at(w.n, w.q_begin + at / p.group, w.h * p.group + at % p.group));
  // Copies do not wait for one another, and a loop is less code to bring than its turns.
#pragma unroll 1
  for (int i = lane; i < kOwn * kPieces + lane; i += 32) {
    const int row = warp + kWarps * (i / kPieces), piece = i % kPieces;
    const auto* q = reinterpret_cast<const uint4*>(__shfl_sync(~0u, row_at, i / kPieces));
    const bool there = piece * 8 < p.width;
    if (row < 64) copy16(to + swizzled(S::kRows, first + row, piece), there ? q + piece : q, there ? 16 : 0);
  }
}

// It starts on 1024 bytes, as tiles have to.
template <class S>
struct Shared {
  unsigned char *q, *k, *v;
  float4* total;
  const unsigned char** places;  // [kTile] where the keys or values of a tile lie; null: nowhere
  std::uint64_t *k_full, *k_empty, *v_full, *v_empty;
  std::uint64_t *q_full, *q_empty;  // of every 64 rows
  Work* work;                       // of kWorks items, in turn
  int2* seen;                       // the keys that each row sees, [first, last)

  __device__ explicit Shared(unsigned char* raw) {
    q = raw;
    k = q + S::kQueryBytes;
    v = S::kLatent ? k : k + S::kKeyStages * S::kKeyBytes;
    unsigned char* const rest = k + S::kRingBytes;
    total = reinterpret_cast<float4*>(rest);
    places = reinterpret_cast<const unsigned char**>(rest + S::kTotalBytes);
    k_full = reinterpret_cast<std::uint64_t*>(rest + S::kTotalBytes + S::kPlaceBytes);
    k_empty = k_full + S::kKeyStages, v_full = k_empty + S::kKeyStages, v_empty = v_full + S::kValueStages;
    q_full = v_empty + S::kValueStages, q_empty = q_full + S::kGroups;
    work = reinterpret_cast<Work*>(q_empty + S::kGroups);
    seen = reinterpret_cast<int2*>(work + kWorks);
  }
  __device__ void init() const {
    for (int i = 0; i < S::kKeyStages; ++i)
      barrier_init(k_full + i, 128), barrier_init(k_empty + i, S::kConsumers / 32);
    for (int i = 0; i < S::kValueStages; ++i)
      barrier_init(v_full + i, 128), barrier_init(v_empty + i, S::kConsumers / 32);
    for (int i = 0; i < S::kGroups; ++i)
      barrier_init(q_full + i, 2 * kQueryThreads + 1), barrier_init(q_empty + i, S::kConsumers / S::kGroups);
    fence_barrier_init();
  }
};

// Stages are used in turn; a barrier's phase turns each time round.
template <int Stages>
struct Turn {
  int stage = 0, phase = 0;
  __device__ void next() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
  __device__ void skip(int turns) {
    stage += turns;
    phase ^= stage / Stages & 1, stage %= Stages;
  }
};

// One lane of a warp that stays together.
__device__ __forceinline__ bool elected() {
  int yes;
  asm volatile(
      "{.reg .pred yes;\n"
      "elect.sync _|yes, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, yes;}"
      : "=r"(yes));
  return yes;
}

// Waits for other threads of the same role.
__device__ __forceinline__ void role_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Lets them go on, and does not wait.
__device__ __forceinline__ void role_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace rlk::cuda::attention
