// What producer and consumers of attention's backward share: which rows a block has, and its shared memory.
//
// An item has 128 rows still, keys or queries, and walks over the other side in tiles of 64 or 128:
//
//   still        moving       sums
//   k, v         q, d_out     d_k, d_v of one query head, or of some that share keys one after another
//   q, d_out     k, v         d_q
//
// An SM's block takes one item after another, whichever no block has taken yet, and its producer brings the next one's still
// rows while one ends. Who takes which moves no sum.
#pragma once

#include "cuda/attention/block.cuh"
#include "cuda/attention/bwd.h"

namespace rlk::cuda::attention {

enum class Side { keys, queries, neither };

struct BackwardJob {
  Backward g;
  Gathered gathered;
  CUtensorMap maps[2][2];  // of keys' tensors and of queries', as all that has two places here
  bool mapped[2];          // else threads copy
  int pairs[2];       // of a sequence and query head, or packed of heads alone, whose items come side by side
  unsigned items[2];  // of either side, which blocks take in order, those of keys first
};

// How the steps of a tile follow each other.
// turns   one after the other
// late    products are handed over a few at a time, dP's between pieces of P, d_k's or d_q's, with d_v's, between pieces of dS
// ahead   the scores of the next tile come before d_k's or d_q's products of this one, which run beside the next tile's P
// shared  of more than 128 channels: the warpgroups have the same still rows, each P and dS of half the tile's rows and, when
//         both have left these in shared memory, sums of half the channels; the next tile's products follow at once
enum class Steps { turns, late, ahead, shared };
// What a kernel may do in one way or another with the same bits.
struct Form {
  Steps steps = Steps::turns;
  int moving = 64;  // rows of a tile of the moving side
};
// As measured. Scores that are capped are wanted again after dP.
constexpr Form form_of(int width, bool capped, bool unit) {
  if (width > kNarrow) return {Steps::shared};
  if (capped) return {};
  if (width > 64) return {Steps::ahead};
  return unit ? Form{Steps::late, 128} : Form{};
}

inline constexpr int kWorkBytes = 96;  // of an item's description

// Unit: P by the special function units' ex2. Prefixed: sequences may have the keys of another first.
template <class T, int Width, int ValueWidth, bool Capped, bool Unit, bool Prefixed,
          Form F = form_of(Width, Capped, Unit)>
struct BackwardShape {
  using Element = T;
  static constexpr int kChannels = Width;  // that are multiplied; there is room for whole lines of 64
  static constexpr int kWidth = (Width + 63) / 64 * 64, kValueWidth = (ValueWidth + 63) / 64 * 64;
  static constexpr bool kCapped = Capped, kUnit = Unit, kPrefixed = Prefixed;
  static constexpr Steps kSteps = F.steps;
  static constexpr bool kShared = kSteps == Steps::shared;
  static constexpr int kStill = kShared ? 64 : 128, kMoving = F.moving;  // rows
  static constexpr int kConsumers = 256, kThreads = kConsumers + 128;
  static constexpr int kStages = Width > 192 ? 2 : 3;  // tiles that wait in shared memory
  static constexpr int kItems = kShared ? 1 : 2;       // whose still rows are in shared memory
  // Of the first or the second tensor of either side.
  __host__ __device__ static constexpr int width(int tensor) { return tensor == 0 ? kWidth : kValueWidth; }
  __host__ __device__ static constexpr int still_bytes(int tensor) { return kStill * width(tensor) * 2; }
  __host__ __device__ static constexpr int moving_bytes(int tensor) { return kMoving * width(tensor) * 2; }
  // Of P or dS, as one warpgroup leaves half of it for both; those of two tiles, so that they wait for each other once a tile.
  static constexpr int kSlopeBytes = kShared ? kStill * kMoving * 2 : 0;
  static constexpr int kStatBytes = kStages * kMoving * 8;
  static constexpr int kBytes = kItems * (still_bytes(0) + still_bytes(1)) +
                                kStages * (moving_bytes(0) + moving_bytes(1)) + 4 * kSlopeBytes + kStatBytes +
                                2 * (kStages + kItems) * 8 + kItems * kWorkBytes + 4;
  static_assert(kBytes <= 227 * 1024, "of a block");
  // Of still rows, 16 channels each, that a thread holds as left operands.
  __host__ __device__ static constexpr int held(int tensor) {
    return Width > 192 ? (tensor == 0 ? 8 : 1) : (tensor == 0 ? 12 : 2);
  }
  // Channels of a tensor's sums that a warpgroup has, of the shared ones whole lines of 64.
  __host__ __device__ static constexpr int sums_of(int tensor) {
    return kShared ? (width(tensor) + 127) / 128 * 64 : tensor == 0 ? Width : ValueWidth;
  }
};

// Of sequence n: rows [first, first + count) of the still side of query head `head`, the place-th of its block's, and tiles
// [begin, end) of the other side, those before by_tma by TMA, of whose rows [all_from, all_to) are seen by, or see, all of them.
// Key j lies in row k_begin + j, beside queries one of the first `shared` in row shared_begin + j. Keys that come first in
// several sequences are an item with each one's queries, whose sums go on from item to item.
struct BackwardWork {
  std::int64_t n = 0, q_begin = 0, k_begin = 0, row_begin = 0;  // the last: of stats
  Side still = Side::neither;                                   // no more items
  int head = 0, kv_head = 0, first = 0, count = 0, queries = 0, keys = 0, begin = 0, end = 0, all_from = 0,
      all_to = 0, by_tma = 0, place = 0, shared = 0, shared_begin = 0;
  bool goes_on = false, ends = true;  // the sums of the item before; with this one
};
static_assert(sizeof(BackwardWork) <= kWorkBytes);

// Whether a sequence's rows of a side are the last ones of the tensor's, behind which TMA reads zeros.
__device__ __forceinline__ bool ends_tensor(const Problem& p, const BackwardWork& w, bool keys) {
  return keys ? !p.cu_k && w.keys == p.room : !p.cu_q;
}

// Keys of sequence n, and how many of them are its own.
template <class S>
__device__ __forceinline__ std::int64_t all_keys(const Problem& p, std::int64_t n) {
  return S::kPrefixed ? p.kv_count(n) : p.own_count(n);
}
template <class S>
__device__ __forceinline__ std::int64_t own_keys(const Backward& g, std::int64_t n) {
  if (!S::kPrefixed) return g.p.own_count(n);
  const attn128::Visible own = g.own_keys(n);
  return own.last - own.first;
}

// What the still rows of an item see of sequence n, or see them.
template <class S, bool Keys>
__device__ inline void find_moving(const BackwardJob& job, BackwardWork& w) {
  const Backward& g = job.g;
  const Problem& p = g.p;
  w.q_begin = p.q_begin(w.n), w.row_begin = g.row(w.n, 0);
  w.queries = static_cast<int>(p.q_len(w.n)), w.keys = static_cast<int>(all_keys<S>(p, w.n));
  const auto row_sees = [&](std::int64_t i) {
    return Keys ? g.queries(w.queries, w.keys, i, i + 1) : p.visible(w.keys - w.queries + i, w.keys);
  };
  const attn128::Visible top = row_sees(w.first), bottom = row_sees(w.first + w.count - 1);
  // Later rows begin and end later. What a causal row behind all keys or a first one before them sees is empty.
  const attn128::Visible seen{top.first, bottom.last};
  const bool whole = w.count == S::kStill;
  w.all_from = whole ? static_cast<int>(bottom.first) : 0, w.all_to = whole ? static_cast<int>(top.last) : 0;
  w.begin = static_cast<int>(seen.first / S::kMoving), w.end = tiles_of(seen.last, S::kMoving);
  // Threads bring the others: what is behind the sequence's end has to be zeros.
  w.by_tma = !job.mapped[Keys]          ? 0
             : ends_tensor(p, w, !Keys) ? w.end
                                        : (Keys ? w.queries : w.keys) / S::kMoving;
}

// What an item is; false: nothing. Pairs of a sequence and head come a few at a time, of them the items with the most to do
// first: a causal sequence's first keys are seen by the most queries, its last queries see the most keys.
template <class S, bool Keys>
__device__ inline bool find_work(const BackwardJob& job, unsigned item, BackwardWork& w) {
  const Backward& g = job.g;
  const Problem& p = g.p;
  const bool packed = Keys ? static_cast<bool>(p.cu_k) : static_cast<bool>(p.cu_q);
  const auto together = static_cast<unsigned>(Keys ? job.gathered.together : 1),
             heads = static_cast<unsigned>(g.all_heads()) / together,
             abreast = static_cast<unsigned>(job.pairs[!Keys]);
  const unsigned pairs = packed ? heads : heads * static_cast<unsigned>(p.sequences),
                 tiles = job.items[!Keys] / pairs;
  const unsigned first = item / (abreast * tiles) * abreast, rest = item - first * tiles;
  const unsigned here = min(abreast, pairs - first), pair = first + rest % here, at = rest / here;
  int tile = static_cast<int>(Keys ? at : tiles - 1 - at);
  w.head = static_cast<int>(pair % heads * together), w.kv_head = w.head / p.group, w.n = pair / heads;
  if (packed) {
    const auto tiles_in = [&](std::int64_t i) {
      return tiles_of(Keys ? own_keys<S>(g, i) : p.q_len(i), S::kStill);
    };
    Seek seek;
    if (!find_place(p.sequences, tiles_in, seek, w.n, tile)) return false;
  }
  w.still = Keys ? Side::keys : Side::queries;
  w.k_begin = p.k_begin(w.n), w.first = tile * S::kStill;
  if constexpr (S::kPrefixed) {
    const attn128::KeyRows rows = p.key_rows(w.n);
    w.k_begin -= rows.shared;
    if (Keys)
      w.first += static_cast<int>(rows.shared);
    else
      w.shared = static_cast<int>(rows.shared), w.shared_begin = static_cast<int>(rows.shared_begin);
  }
  w.count = min(static_cast<int>(Keys ? all_keys<S>(p, w.n) : p.q_len(w.n)) - w.first, S::kStill);
  if (w.count <= 0) return false;
  find_moving<S, Keys>(job, w);
  return true;
}

// It starts on 1024 bytes, as tiles have to.
template <class S>
struct BackwardShared {
  unsigned char *still[2], *moving[2];  // k and v, or q and d_out; of items and of tiles in turn
  unsigned char* slopes;                // Steps::shared: P and dS of two tiles in turn
  float* stats;                         // [kStages][2][kMoving]: base, then delta, of moving queries
  std::uint64_t *full, *empty;          // of tiles
  std::uint64_t *item_full, *item_empty;
  BackwardWork* work;  // of items in turn
  unsigned* item;      // that the producer takes

  __device__ explicit BackwardShared(unsigned char* raw) {
    still[0] = raw, still[1] = still[0] + S::kItems * S::still_bytes(0);
    moving[0] = still[1] + S::kItems * S::still_bytes(1);
    moving[1] = moving[0] + S::kStages * S::moving_bytes(0);
    slopes = moving[1] + S::kStages * S::moving_bytes(1);
    unsigned char* const rest = slopes + 4 * S::kSlopeBytes;
    stats = reinterpret_cast<float*>(rest);
    full = reinterpret_cast<std::uint64_t*>(rest + S::kStatBytes), empty = full + S::kStages;
    item_full = empty + S::kStages, item_empty = item_full + S::kItems;
    work = reinterpret_cast<BackwardWork*>(item_empty + S::kItems);
    item = reinterpret_cast<unsigned*>(reinterpret_cast<unsigned char*>(work) + S::kItems * kWorkBytes);
  }
  __device__ void init() const {
    for (int i = 0; i < S::kStages; ++i) barrier_init(full + i, 128), barrier_init(empty + i, S::kConsumers);
    for (int i = 0; i < S::kItems; ++i)
      barrier_init(item_full + i, 128 + 1), barrier_init(item_empty + i, S::kConsumers);
    fence_barrier_init();
  }
};

// Row i of the sequence, of one side's two tensors.
template <class S, bool OfKeys>
__device__ __forceinline__ const void* row_of(const Backward& g, const BackwardWork& w, int tensor, int i) {
  if constexpr (OfKeys) {
    const std::int64_t begin = S::kPrefixed && i < w.shared ? w.shared_begin : w.k_begin;
    return (tensor == 0 ? g.p.k : g.p.v).at(w.n, begin + i, w.kv_head);
  }
  return (tensor == 0 ? g.p.q : g.d_out).at(w.n, w.q_begin + i, w.head);
}

}  // namespace rlk::cuda::attention
