// The producer of the attention kernel: a warpgroup that brings queries and tiles of keys and values, from wherever they lie.
#pragma once

#include "cuda/attention/block.cuh"
#include "cuda/attention/fp8.cuh"

namespace rlk::cuda::attention {

// Rows that are not there, and channels behind the last, are zeros: 0 * NaN would be NaN.
template <int Pieces>
__device__ __forceinline__ void copy_tile(unsigned char* to, const unsigned char* const* places,
                                          const void* anywhere, int pieces, int thread) {
#pragma unroll 4
  for (int i = 0; i < Pieces; ++i) {
    const int at = thread + i * 128, row = at / Pieces, piece = at % Pieces;
    const unsigned char* from = places[row];
    const bool there = from != nullptr && piece < pieces;
    copy16(to + swizzled(kTile, row, piece), there ? static_cast<const void*>(from + piece * 16) : anywhere,
           there ? 16 : 0);
  }
}

// Where the box of `rows` rows from row `at` of a tile on lies, as TMA counts: a tile is one box, or pages that fill it.
struct Piece {
  int head, token, outer;
};
template <class S>
__device__ __forceinline__ Piece piece_of(const Job& job, const Work& w, int tile, int at) {
  const Problem& p = job.p;
  const int j = tile * kTile + at;
  const int begin = S::kPrefixed && j < w.shared ? w.shared_begin : w.k_begin;
  Piece piece{w.h, begin + j, p.cu_k ? 0 : w.n};
  if (p.block_table && at < kTile) {
    const int size = static_cast<int>(p.page_size);
    // Behind the last page, whose keys nobody sees, its own once more.
    const int page = min(j, w.keys - 1) / size;
    piece.outer = static_cast<int>(Problem::held(p.block_table.get(w.n, page), p.pages - 1));
    piece.token = j % size;
  }
  return piece;
}
// Such a box; its bytes are announced.
template <int Width>
__device__ __forceinline__ void order_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t full,
                                          const Piece& piece) {
#pragma unroll
  for (int x = 0; x < Width; x += 64)
    tma_load(to + x / 64 * (kTile * 128), map, full, x, piece.head, piece.token, piece.outer);
}

// Computed by here, and never anew.
template <class T>
__device__ __forceinline__ T at_hand(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class S>
__device__ __forceinline__ void copy_places(const Problem& p, const attn128::Tensor& of, const Work& w,
                                            int tile, const unsigned char** places, int thread) {
  const int j = tile * kTile + thread;
  role_sync(1, 128);  // nobody reads those of the tile before any more
  attn128::KeyRows rows{w.k_begin, 0, 0};
  if (S::kPrefixed) rows = attn128::KeyRows{w.k_begin + w.shared, w.shared, w.shared_begin};
  places[thread] = j < w.keys ? static_cast<const unsigned char*>(p.key(of, w.n, rows, j, w.h)) : nullptr;
  role_sync(1, 128);
}

template <class S>
class Producer {
 public:
  __device__ __forceinline__ Producer(const Job& job, const Shared<S>& s)
      : job_(job),
        p_(job.p),
        s_(s),
        thread_(at_hand(static_cast<int>(threadIdx.x) % 128)),
        warp_(uniform(thread_ / 32)),
        lane_(at_hand(thread_ % 32)) {}

  // A block's items one after another, and one without rows that says there are no more. The second warp finds out what an item
  // is, mostly while the first one is busy with the tiles of the item before. Its place is written again when all consumers have
  // begun the last item but one: so the warps on whose arrival these waited have read it.
  __device__ __forceinline__ void run() {
    if (finds()) of_pair_ = Items<S>{job_}.of_pair();
    int item = static_cast<int>(blockIdx.x);
    for (;;) {
      if (finds())
        find(item);
      else
        role_sync(2 + items_.phase, 128);
      const Work& w = s_.work[works_.stage];
      works_.next();
      bring(w);
      if (w.count == kNoMore) break;
      if (finds()) item = next_item(w);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  __device__ __forceinline__ bool orders() const { return warp_ == 0; }
  __device__ __forceinline__ bool finds() const { return warp_ == 1; }
  static constexpr bool kAhead = !S::kOneByOne && S::kKeyStages >= S::kValueStages;
  // An item, or one that is nothing, without rows. The first warp orders all that TMA brings, the others say what an item's rows
  // see and bring queries that it does not, and all of them such keys and values. Values are wanted later than the next tile's
  // keys, which come first unless values have more room, or a place for keys is free only after one for values is.
  __device__ __forceinline__ void bring(const Work& w) {
    const int tma = tiles_by_tma(w.keys, job_.maps.box);
    int from = w.begin;  // of this warp's tiles
    if (!orders() && (!S::kPrefixed || w.shared == 0)) from = max(min(tma, w.end), w.begin);
    keys_.skip(from - w.begin), values_.skip(from - w.begin);
    // Queries come behind the first keys, or before those that wait for the first warp's.
    const int start = from == w.begin ? from : from - 1;
    const bool boxes = kBoxes && orders() && job_.maps.box == kTile && !p_.block_table;
    const int late = orders() && is_long(w) ? w.end - kLate : w.begin - 1,
              last = boxes ? max(min(w.end, tma), start) : start - 1;
    for (int tile = start;; ++tile) {
      if (tile <= last) {
        tile = order_tiles(w, tile, tile == start ? start : tile <= late ? late : last);
      } else {
        if (!kAhead && tile > from) bring_values(w, tile - 1);
        if (tile >= from && tile < w.end) bring_keys(w, tile);
        if (kAhead && tile > from) bring_values(w, tile - 1);
      }
      if (tile == start) {
        bring_queries(w);
        if (finds() && job_.taken != nullptr && w.count != kNoMore && !is_long(w)) take();
      }
      if (tile == late) role_arrive(7, 64);
      if (tile >= w.end) break;
    }
  }
  static constexpr bool kBoxes = !S::kLatent && !S::kPrefixed && !S::kF8;
  // Where tiles are one box each, the first warp brings the keys of tiles [tile, to] and the values before each: in a short loop,
  // which does not drive the consumers' from the instruction cache.
  __device__ __forceinline__ int order_tiles(const Work& w, int tile, int to) {
    const int head = w.h, begin = w.k_begin, outer = p_.cu_k ? 0 : w.n, first = w.begin, end = w.end;
    if (lane_ == 0) {
      Turn<S::kKeyStages> k = keys_;
      Turn<S::kValueStages> v = values_;
      const auto keys = [&](int at) {
        order_tile<S::kWidth>(s_.k + k.stage * S::kKeyBytes, &job_.maps.k, s_.k_full + k.stage,
                              s_.k_empty + k.stage, k.phase ^ 1, {head, begin + at * kTile, outer});
        k.next();
      };
#pragma unroll 1
      for (int at = tile; at <= to; ++at) {
        if (kAhead && at < end) keys(at);
        if (at > first) {
          order_tile<S::kValueWidth>(s_.v + v.stage * S::kValueBytes, &job_.maps.v, s_.v_full + v.stage,
                                     s_.v_empty + v.stage, v.phase ^ 1,
                                     {head, begin + (at - 1) * kTile, outer});
          v.next();
        }
        if (!kAhead && at < end) keys(at);
      }
    }
    __syncwarp();
    keys_.skip(min(to, end - 1) - tile + 1), values_.skip(to - max(tile - 1, first));
    return to;
  }
  template <int Width>
  __device__ __forceinline__ static void order_tile(unsigned char* to, const CUtensorMap* map,
                                                    std::uint64_t* full, std::uint64_t* empty, int phase,
                                                    const Piece& piece) {
    const std::uint32_t place = shared_address(to), bar = shared_address(full);
    barrier_wait(empty, phase);
    barrier_expect(bar, kTile * Width * 2);
    order_box<Width>(place, map, bar, piece);
    barrier_arrive(bar, 127);
  }
  __device__ __forceinline__ void find(int item) {
    Work w;
    if (static_cast<unsigned>(item) >= of_pair_ * Items<S>{job_}.pairs())
      w.count = kNoMore;
    else if (!find_work<S>(job_, of_pair_, item, seek_, w))
      w = Work{};
    if (lane_ == 0) s_.work[works_.stage] = w;
    __syncwarp();
    role_arrive(2 + items_.phase, 128);
  }
  // By the counter the item behind a short one is taken at once, so that nobody waits for it; behind a long one when its last tiles
  // are ordered, so that whoever is free has what is left.
  static constexpr int kLong = 8, kLate = 3;  // tiles
  __device__ __forceinline__ bool is_long(const Work& w) const {
    return job_.taken != nullptr && w.end - w.begin > kLong;
  }
  __device__ __forceinline__ void take() {
    taken_ = 0;
    if (lane_ != 0) return;
    asm volatile("griddepcontrol.wait;" ::: "memory");  // what clears it may still run
    taken_ = static_cast<int>(gridDim.x + atomicAdd(job_.taken, 1u));
  }
  __device__ __forceinline__ int next_item(const Work& w) {
    if (job_.taken == nullptr) return item_of(round_++);
    if (is_long(w)) {
      role_sync(7, 64);
      take();
    }
    return uniform(taken_);
  }
  __device__ __forceinline__ void bring_keys(const Work& w, int tile) {
    bring_tile<true>(p_.k, &job_.maps.k, s_.k + keys_.stage * S::kKeyBytes, s_.k_full + keys_.stage,
                     s_.k_empty + keys_.stage, keys_.phase ^ 1, w, tile);
    keys_.next();
  }
  // Latent heads: in the place of keys, when their scores are there.
  __device__ __forceinline__ void bring_values(const Work& w, int tile) {
    if (S::kLatent && job_.values_in_keys) return;
    bring_tile<false>(p_.v, &job_.maps.v, s_.v + values_.stage * S::kValueBytes, s_.v_full + values_.stage,
                      s_.v_empty + values_.stage, S::kLatent ? values_.phase : values_.phase ^ 1, w, tile);
    values_.next();
  }
  // By TMA the first warp orders a tile for all threads, of keys also one that goes on behind their end, where nobody sees them.
  template <bool Keys>
  __device__ __forceinline__ void bring_tile(const attn128::Tensor& of, const CUtensorMap* map,
                                             unsigned char* to, std::uint64_t* full, std::uint64_t* empty,
                                             int phase, const Work& w, int tile) {
    constexpr int kWidth = Keys ? S::kWidth : S::kValueWidth;
    const bool whole = (Keys && !S::kLatent) || tile < w.keys / kTile;
    const int width = Keys ? p_.width : p_.value_width;
    if (job_.maps.box == 0 || (S::kLatent && !whole) || (S::kPrefixed && is_seam(w.shared, tile, kTile))) {
      copy_places<S>(p_, of, w, tile, s_.places, thread_);
      barrier_wait(empty, phase);
      if constexpr (S::kF8) {
        const attn128::Factors& factors = Keys ? p_.k_scale : p_.v_scale;
        widen_tile<typename S::Element, kWidth>(to, s_.places, width, factors.of(w.h));
        fence_async_proxy();
        barrier_arrive(full);
      } else {
        copy_tile<kWidth / 8>(to, s_.places, of.data, width / 8, thread_);
        copy_arrive(full);
      }
    } else if (whole) {
      if (!orders()) return;
      const int rows = job_.maps.box;
      Piece piece = piece_of<S>(job_, w, tile, lane_ * rows);
      // Nothing but orders behind the barrier.
      piece = {at_hand(piece.head), at_hand(piece.token), at_hand(piece.outer)};
      const std::uint32_t box = at_hand(shared_address(to) + lane_ * rows * 128),
                          bar = at_hand(shared_address(full));
      barrier_wait(empty, phase);
      if (lane_ == 0) barrier_expect(bar, kTile * kWidth * 2);
      __syncwarp();
      if (lane_ * rows < kTile) order_box<kWidth>(box, map, bar, piece);
      if (lane_ == 1) barrier_arrive(bar, 127);
    } else if constexpr (!Keys && !S::kLatent && !S::kF8) {
      role_sync(1, 128);  // the first warp has ordered the tiles before, or phases would be mistaken
      barrier_wait(empty, phase);
      bring_end<kWidth>(of, width, to, full, w, tile);
    }
  }
  // A sequence's last values: whole boxes of rows by TMA, the rest and zeros behind them by all threads.
  template <int Width>
  __device__ __forceinline__ void bring_end(const attn128::Tensor& of, int width, unsigned char* to,
                                            std::uint64_t* full, const Work& w, int tile) {
    constexpr int kPieces = Width / 8;
    const int boxes = (w.keys - tile * kTile) / kBoxRows;
    if (orders()) {
      if (lane_ == 0) barrier_announce(full, boxes * kBoxRows * Width * 2);
      __syncwarp();
      const std::uint32_t box = shared_address(to) + lane_ * (kBoxRows * 128);
      if (lane_ < boxes)
        order_box<Width>(box, &job_.maps.v_rows, shared_address(full),
                         piece_of<S>(job_, w, tile, lane_ * kBoxRows));
    }
    attn128::KeyRows rows{w.k_begin, 0, 0};
    if (S::kPrefixed) rows = attn128::KeyRows{w.k_begin + w.shared, w.shared, w.shared_begin};
#pragma unroll 1
    for (int i = boxes * kBoxRows * kPieces + thread_; i < kTile * kPieces; i += 128) {
      const int row = i / kPieces, piece = i % kPieces, j = tile * kTile + row;
      const bool there = j < w.keys && piece < width / 8;
      const void* from =
          there ? static_cast<const unsigned char*>(p_.key(of, w.n, rows, j, w.h)) + piece * 16 : of.data;
      copy16(to + swizzled(kTile, row, piece), from, there ? 16 : 0);
    }
    copy_arrive(full);
  }
  // Each warpgroup's queries, when it has the last scores of those before, which they are and what they see.
  __device__ __forceinline__ void bring_queries(const Work& w) {
    await_places();
    if (!orders()) {
      describe(w);
    } else {
      if (job_.maps.queries != 0) order_queries(w);
      __syncwarp();
      if (lane_ == 0)  // this warp has read what the item is
        for (int g = 0; g < S::kGroups; ++g) barrier_arrive(s_.q_full + g);
    }
    items_.next();
  }
  __device__ __forceinline__ void await_places() const {
    for (int g = 0; g < S::kGroups; ++g) barrier_wait(s_.q_empty + g, items_.phase ^ 1);
  }
  __device__ __forceinline__ void describe(const Work& w) const {
    const int thread = thread_ - 32;
#pragma unroll 1
    for (int row = thread; w.count > 0 && row < S::kRows; row += kQueryThreads) {
      s_.seen[row] = seen_by<S>(job_, w, (w.first + min(row, w.count - 1)) / p_.group);
    }
    for (int g = 0; g < S::kGroups; ++g) {
      if (job_.maps.queries == 0) {
        if (w.begin < w.end) copy_queries<S>(p_, w, s_.q, 64 * g, thread);
        copy_arrive(s_.q_full + g);
      }
      barrier_arrive(s_.q_full + g);
    }
  }
  // Rows that are not there are whatever lies behind the others.
  __device__ __forceinline__ void order_queries(const Work& w) const {
    if (lane_ != 0) return;
    for (int g = 0; g < S::kGroups; ++g) {
      std::uint64_t* const full = s_.q_full + g;
      barrier_arrive(full, kQueryThreads - 1);
      if (w.begin >= w.end) {
        barrier_arrive(full);
        continue;
      }
      barrier_expect(full, 64 * S::kWidth * 2);
#pragma unroll
      for (int x = 0; x < S::kWidth; x += 64)
        tma_load(s_.q + (x / 64 * S::kRows + 64 * g) * 128, &job_.maps.q, full, x, w.h * p_.group,
                 w.q_begin + w.query + g * job_.maps.queries, p_.cu_q ? 0 : w.n);
    }
  }

  const Job& job_;
  const Problem& p_;
  const Shared<S>& s_;
  const int thread_, warp_, lane_;
  Turn<S::kKeyStages> keys_;
  Turn<S::kValueStages> values_;
  Turn<1> items_;
  Turn<kWorks> works_;
  unsigned of_pair_ = 0;  // finds(): items of a pair
  int round_ = 1, taken_ = 0;
  Seek seek_;
};

}  // namespace rlk::cuda::attention
