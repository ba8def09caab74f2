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

// What a launch needs beside the problem.
struct Job {
  Problem p;
  Maps maps;
  float* parts;  // Spread: [row, split] of m, l and O; kTotalsApart: every block's sums of other splits
  int splits;
  bool values_in_keys;        // v is the first channels of k
  int pairs = 1;              // of a sequence and key head, or of heads alone, whose items come side by side
  int items = 0;              // which blocks take one after another, if all sequences are alike
  unsigned run = 0;           // Spread: keys of an item's splits; 0: all
  unsigned* taken = nullptr;  // items, beside the blocks' first ones; null: a block takes one of every round
};

// Width, ValueWidth: the channels of q and k, and of v, that there is room for. Spread: an item has some splits and leaves their
// sums in memory. Prefixed: sequences may have the keys of another first. F8: keys and values are fp8, which the producer widens.
template <class T, int Width, int ValueWidth, bool Capped, bool Spread, bool Prefixed, bool F8 = false>
struct Shape {
  using Element = T;
  static constexpr int kWidth = Width, kValueWidth = ValueWidth;
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
  static constexpr int kKeyBytes = kTile * Width * 2, kValueBytes = kLatent ? 0 : kTile * ValueWidth * 2;
  static constexpr int kQueryBytes = kRows * Width * 2,
                       kTotalBytes = Spread || kTotalsApart ? 0 : kRows * ValueWidth * 4;
  // What there is room for.
  static constexpr int kKeyStages = Width > 192 ? 1 : Width > kNarrow || !Spread ? 2 : 3;
  static constexpr int kValueStages = Width > 192 ? 1 : Width <= 128 && Spread ? 3 : 2;
  static constexpr int kRingBytes = kKeyStages * kKeyBytes + kValueStages * kValueBytes;
  static constexpr int kPlaceBytes = kTile * 8;
  static constexpr int kBarriers = 2 * (kKeyStages + kValueStages + kGroups);
  static constexpr int kWorkBytes = 2 * 64 + kRows * 8 + 2 * 4;
  static constexpr int kBytes =
      kQueryBytes + kRingBytes + kTotalBytes + kPlaceBytes + kBarriers * 8 + kWorkBytes;
  static_assert(kBytes <= 227 * 1024, "of a block");
};

// Rows [first, first + count) of sequence n and key head h: the queries of the heads that share keys, those of a query
// side by side. They see keys of tiles [begin, end). Keys are counted from the first one here, where a split begins, and
// `offset` is the first query's position among them, which of attention_part may lie before or behind them all. Key j lies in
// row k_begin + j, one of the first `shared` in row shared_begin + j.
struct Work {
  std::int64_t n = 0, q_begin = 0, k_begin = 0;
  int h = 0, first = 0, count = 0, offset = 0, keys = 0, begin = 0, end = 0, shared = 0, shared_begin = 0;
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

__device__ __forceinline__ int tiles_of(std::int64_t rows, int height) {
  return static_cast<int>((rows + height - 1) / height);
}

// How far a search among sequences has come: those before `base` have `before` of what is counted.
struct Seek {
  std::int64_t base = 0;
  int before = 0;
};
// The sequence n that number `at` of all belongs to, where sequence i has of(i) of them; `at` becomes one of its own. Every lane
// asks alike. A search goes on where the last one ended, if that is not too far.
template <class Of>
__device__ inline bool find_place(std::int64_t sequences, Of of, Seek& seek, std::int64_t& n, int& at) {
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

// Where the first of a sequence's queries is among its keys, which are `keys`. Those of a rank may lie far from it: a position
// from which every query sees none of them, or all, stands for those further on.
template <class S>
__device__ __forceinline__ int offset_of(const Problem& p, std::int64_t n, std::int64_t queries,
                                         std::int64_t keys) {
  if constexpr (S::kSpread) {
    if (p.k_first) {
      constexpr std::int64_t kFirst = -(std::int64_t{1} << 30), kLast = INT_MAX;
      const std::int64_t at = p.keys(n) - queries - p.here(n).first;
      return static_cast<int>(at < kFirst ? kFirst : at > kLast ? kLast : at);
    }
  }
  return static_cast<int>(keys - queries);
}
template <class S>
__device__ __forceinline__ std::int64_t keys_of(const Problem& p, std::int64_t n) {
  if constexpr (S::kSpread) {
    const attn128::Visible here = p.here(n);
    return here.last - here.first;
  } else {
    return S::kPrefixed ? p.kv_count(n) : p.own_count(n);
  }
}

// What query i of an item's sequence sees of its keys.
template <class S>
__device__ __forceinline__ attn128::Visible seen_by(const Problem& p, const Work& w, int i,
                                                    std::int64_t keys) {
  if constexpr (S::kSpread) {
    const attn128::Visible seen = p.visible(std::int64_t{w.offset} + i, keys);
    return {seen.first < keys ? seen.first : keys, seen.last < keys ? seen.last : keys};
  } else {
    return p.visible(w.offset + i, keys);
  }
}

// Items of a sequence and a key head: groups of its rows, or, Spread, runs of these rows' splits.
template <class S>
struct Items {
  const Job& job;
  __device__ __forceinline__ unsigned tiles(std::int64_t n) const {
    return (static_cast<unsigned>(job.p.q_len(n)) * static_cast<unsigned>(job.p.group) + S::kRows - 1) /
           S::kRows;
  }
  __device__ __forceinline__ unsigned runs(std::int64_t n) const {
    if (!S::kSpread || job.run == 0) return 1;
    return (static_cast<unsigned>(keys_of<S>(job.p, n)) + job.run - 1) / job.run;
  }
  __device__ __forceinline__ int operator()(std::int64_t n) const {
    return static_cast<int>(tiles(n) * runs(n));
  }
  // Whether sequences have different numbers of them.
  __device__ __forceinline__ bool differ() const {
    return job.p.cu_q || (S::kSpread && (job.p.cu_k || job.p.kv_len));
  }
  __device__ __forceinline__ int all() const {
    if (!differ()) return job.items;
    int items = 0;
    for (std::int64_t n = threadIdx.x % 32; n < job.p.sequences; n += 32) items += (*this)(n);
    return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(items))) * job.p.heads;
  }
};

// What one of `all` items is; false: nothing. Pairs of a sequence and head come a few at a time, of them the last rows, which see
// the most keys, first or last by turns: so items next to each other have about the same size, and the last ones are small.
template <class S>
__device__ inline bool find_work(const Job& job, int all, unsigned item, Seek& seek, Work& w) {
  const Problem& p = job.p;
  const Items<S> items{job};
  const bool differ = items.differ();
  const auto heads = static_cast<unsigned>(p.heads), abreast = static_cast<unsigned>(job.pairs);
  const unsigned pairs = differ ? heads : heads * static_cast<unsigned>(p.sequences),
                 of_pair = static_cast<unsigned>(all) / pairs;
  const unsigned turn = item / (abreast * of_pair), first = turn * abreast, rest = item - first * of_pair;
  const unsigned here = min(abreast, pairs - first), pair = first + rest % here;
  int at = static_cast<int>(rest / here);
  w.h = static_cast<int>(pair % heads), w.n = pair / heads;
  if (differ && !find_place(p.sequences, items, seek, w.n, at)) return false;
  const bool down = ((pairs - 1) / abreast - turn) % 2 == 0;
  const auto tiles = static_cast<int>(items.tiles(w.n));
  const int tile = down ? tiles - 1 - at % tiles : at % tiles;
  const std::int64_t queries = p.q_len(w.n), rows = queries * p.group, keys = keys_of<S>(p, w.n);
  w.q_begin = p.q_begin(w.n), w.k_begin = p.k_begin(w.n);
  if constexpr (S::kPrefixed) {
    const attn128::KeyRows rows = p.key_rows(w.n);
    w.k_begin -= rows.shared;
    w.shared = static_cast<int>(rows.shared), w.shared_begin = static_cast<int>(rows.shared_begin);
  }
  w.first = tile * S::kRows;
  w.count = static_cast<int>(rows - w.first < S::kRows ? rows - w.first : S::kRows);
  w.keys = static_cast<int>(keys), w.offset = offset_of<S>(p, w.n, queries, keys);
  const attn128::Visible top = seen_by<S>(p, w, w.first / p.group, keys),
                         last = seen_by<S>(p, w, (w.first + w.count - 1) / p.group, keys);
  w.begin = static_cast<int>(top.first / kTile);
  w.end = static_cast<int>((last.last + kTile - 1) / kTile);
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

// Queries [first, first + 64) of an item's, by `Threads` threads of which this is the `thread`-th. Rows that are not there are
// copies of the last one.
template <class S, int Threads>
__device__ __forceinline__ void copy_queries(const Problem& p, const Work& w, unsigned char* to, int first,
                                             int thread) {
  constexpr int kPieces = S::kWidth / 8;
  // Copies do not wait for one another, and a loop is less code to bring than its turns.
#pragma unroll 1
  for (int i = thread; i < 64 * kPieces; i += Threads) {
    const int row = first + i / kPieces, piece = i % kPieces, at = w.first + min(row, w.count - 1);
    const auto* q =
        static_cast<const uint4*>(p.q.at(w.n, w.q_begin + at / p.group, w.h * p.group + at % p.group));
    const bool there = piece * 8 < p.width;
    copy16(to + swizzled(S::kRows, row, piece), there ? q + piece : q, there ? 16 : 0);
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
  Work* work;                       // of two items, in turn
  int2* seen;                       // the keys that each row sees, [first, last)
  int* item;                        // that the producer has taken, of two in turn

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
    seen = reinterpret_cast<int2*>(work + 2);
    item = reinterpret_cast<int*>(seen + S::kRows);
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

}  // namespace rlk::cuda::attention
