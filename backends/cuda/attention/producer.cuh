// The producer of the attention kernel: a warpgroup that brings queries and tiles of keys and values, from wherever they lie.
#pragma once

#include "cuda/attention/block.cuh"
#include "cuda/attention/fp8.cuh"

namespace rlk::cuda::attention {

// Rows that are not there, and channels behind the last, are zeros: 0 * NaN would be NaN.
template <int Pieces>
__device__ __forceinline__ void copy_tile(unsigned char* to, const unsigned char* const* places,
                                          const void* anywhere, int pieces) {
  const int t = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 4
  for (int i = 0; i < Pieces; ++i) {
    const int at = t + i * 128, row = at / Pieces, piece = at % Pieces;
    const unsigned char* from = places[row];
    const bool there = from != nullptr && piece < pieces;
    copy16(to + swizzled(kTile, row, piece), there ? static_cast<const void*>(from + piece * 16) : anywhere,
           there ? 16 : 0);
  }
}

// Where a lane's box of `rows` rows of a tile's first `most` lies, as TMA counts: a tile is one box, or pages that fill it.
struct Piece {
  int token, outer;
  bool there;
};
template <class S>
__device__ __forceinline__ Piece piece_of(const Job& job, const Work& w, int tile, int rows, int most) {
  const Problem& p = job.p;
  const int at = static_cast<int>(threadIdx.x) % 32 * rows, j = tile * kTile + at;
  const int begin = S::kPrefixed && j < w.shared ? w.shared_begin : static_cast<int>(w.k_begin);
  Piece piece{begin + j, p.cu_k ? 0 : static_cast<int>(w.n), at < most};
  if (p.block_table && piece.there) {
    const int size = static_cast<int>(p.page_size);
    // Behind the last page, whose keys nobody sees, its own once more.
    const int page = min(j, w.keys - 1) / size;
    piece.outer = static_cast<int>(Problem::held(p.block_table.get(w.n, page), p.pages - 1));
    piece.token = j % size;
  }
  return piece;
}
// Such boxes, by the first warp; their bytes are announced.
template <int Width>
__device__ __forceinline__ void order_boxes(unsigned char* to, const CUtensorMap* map, std::uint64_t* full,
                                            int head, const Piece& piece, int rows) {
  if (!piece.there) return;
  unsigned char* const box = to + threadIdx.x % 32 * (rows * 128);
#pragma unroll
  for (int x = 0; x < Width; x += 64)
    tma_load(box + x / 64 * (kTile * 128), map, full, x, head, piece.token, piece.outer);
}

template <class S>
__device__ __forceinline__ void copy_places(const Problem& p, const attn128::Tensor& of, const Work& w,
                                            int tile, const unsigned char** places) {
  const int t = static_cast<int>(threadIdx.x) % 128, j = tile * kTile + t;
  role_sync(1, 128);  // nobody reads those of the tile before any more
  attn128::KeyRows rows{w.k_begin};
  if (S::kPrefixed) rows = {w.k_begin + w.shared, w.shared, w.shared_begin};
  places[t] = j < w.keys ? static_cast<const unsigned char*>(p.key(of, w.n, rows, j, w.h)) : nullptr;
  role_sync(1, 128);
}

template <class S>
class Producer {
 public:
  __device__ __forceinline__ Producer(const Job& job, const Shared<S>& s) : job_(job), p_(job.p), s_(s) {}

  // A block's items one after another, and one without rows that says there are no more. Each warp finds out what an item is.
  __device__ __forceinline__ void run() {
    const int items = Items<S>{job_}.all();
    int item = static_cast<int>(blockIdx.x);
    for (int round = 1; item < items; ++round) {
      Work w;
      if (!find_work<S>(job_, items, item, seek_, w)) w = Work{};
      bring(w);
      item = job_.taken != nullptr ? taken_item(w) : item_of(round);
    }
    Work none;
    none.count = kNoMore;
    bring(none);
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  // An item, or one that is nothing, without rows. The first warp orders all that TMA brings, the others say what an item's rows
  // see and bring queries that it does not, and all of them such keys and values. Values are wanted later than the next tile's
  // keys, which come first unless values have more room, or a place for keys is free only after one for values is.
  __device__ __forceinline__ void bring(const Work& w) {
    if (w.begin >= w.end) {
      bring_queries(w);
      return;
    }
    constexpr bool kAhead = !S::kOneByOne && S::kKeyStages >= S::kValueStages;
    int from = w.begin;  // of this warp's tiles
    if (!orders() && (!S::kPrefixed || w.shared == 0))
      from = min(max(tiles_by_tma(w.keys, job_.maps.box), w.begin), w.end);
    keys_.skip(from - w.begin), values_.skip(from - w.begin);
    if (from == w.begin) bring_keys(w, from);
    bring_queries(w);
    if (w.begin < from && from < w.end) bring_keys(w, from);
    for (int tile = from; tile < w.end; ++tile) {
      if (kAhead && tile + 1 < w.end) bring_keys(w, tile + 1);
      if (!S::kLatent || !job_.values_in_keys) bring_values(w, tile);
      if (!kAhead && tile + 1 < w.end) bring_keys(w, tile + 1);
    }
  }
  __device__ __forceinline__ static bool orders() { return threadIdx.x % 128 < 32; }
  // Items by their counter. Of a short item the second warp takes the next one as soon as it has described it, so that nobody waits;
  // of a long one the first warp when it has ordered all tiles, so that whoever is free has what is left. Neither waits for the
  // others, which have read the number before when the scores of that item are there.
  static constexpr int kLong = 8;  // tiles
  __device__ __forceinline__ static bool takes(const Work& w) {
    return threadIdx.x % 128 / 32 == (w.end - w.begin > kLong ? 0 : 1);
  }
  __device__ __forceinline__ void take() {
    if (threadIdx.x % 32 == 0) {
      asm volatile("griddepcontrol.wait;" ::: "memory");  // what clears it may still run
      s_.item[items_.phase] = static_cast<int>(gridDim.x + atomicAdd(job_.taken, 1u));
    }
    __syncwarp();
    asm volatile("bar.arrive %0, 128;" ::"r"(2 + items_.phase) : "memory");
  }
  __device__ __forceinline__ int taken_item(const Work& w) {
    if (!takes(w))
      role_sync(2 + items_.phase, 128);
    else if (orders())
      take();
    return uniform(s_.item[items_.phase]);
  }
  __device__ __forceinline__ void bring_keys(const Work& w, int tile) {
    bring_tile<true>(p_.k, &job_.maps.k, s_.k + keys_.stage * S::kKeyBytes, s_.k_full + keys_.stage,
                     s_.k_empty + keys_.stage, keys_.phase ^ 1, w, tile);
    keys_.next();
  }
  // Latent heads: in the place of keys, when their scores are there.
  __device__ __forceinline__ void bring_values(const Work& w, int tile) {
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
      copy_places<S>(p_, of, w, tile, s_.places);
      barrier_wait(empty, phase);
      if constexpr (S::kF8) {
        const attn128::Factors& factors = Keys ? p_.k_scale : p_.v_scale;
        widen_tile<typename S::Element, kWidth>(to, s_.places, width, factors.of(w.h));
        fence_async_proxy();
        barrier_arrive(full);
      } else {
        copy_tile<kWidth / 8>(to, s_.places, of.data, width / 8);
        copy_arrive(full);
      }
    } else if (whole) {
      if (!orders()) return;
      const Piece piece = piece_of<S>(job_, w, tile, job_.maps.box, kTile);
      barrier_wait(empty, phase);
      const int lane = static_cast<int>(threadIdx.x) % 32;
      if (lane == 0) barrier_expect(full, kTile * kWidth * 2);
      if (lane == 1) barrier_arrive(full, 127);
      __syncwarp();
      order_boxes<kWidth>(to, map, full, w.h, piece, job_.maps.box);
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
      const Piece piece = piece_of<S>(job_, w, tile, kBoxRows, boxes * kBoxRows);
      if (threadIdx.x % 32 == 0) barrier_announce(full, boxes * kBoxRows * Width * 2);
      __syncwarp();
      order_boxes<Width>(to, &job_.maps.v_rows, full, w.h, piece, kBoxRows);
    }
    attn128::KeyRows rows{w.k_begin};
    if (S::kPrefixed) rows = {w.k_begin + w.shared, w.shared, w.shared_begin};
    const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
    for (int i = boxes * kBoxRows * kPieces + thread; i < kTile * kPieces; i += 128) {
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
      if (job_.maps.queries) order_queries(w);
      __syncwarp();
      if (threadIdx.x % 32 == 0)  // this warp has read what the item is
        for (int g = 0; g < S::kGroups; ++g) barrier_arrive(s_.q_full + g);
    }
    items_.next();
    if (job_.taken != nullptr && w.count != kNoMore && !orders() && takes(w)) take();
  }
  __device__ __forceinline__ void await_places() const {
    for (int g = 0; g < S::kGroups; ++g) barrier_wait(s_.q_empty + g, items_.phase ^ 1);
  }
  __device__ __forceinline__ void describe(const Work& w) const {
    const int thread = static_cast<int>(threadIdx.x) % 128 - 32;
#pragma unroll 1
    for (int row = thread; w.count > 0 && row < S::kRows; row += kQueryThreads) {
      const attn128::Visible seen = seen_by<S>(p_, w, (w.first + min(row, w.count - 1)) / p_.group, w.keys);
      s_.seen[row] = make_int2(static_cast<int>(seen.first), static_cast<int>(seen.last));
    }
    if (thread == 0) s_.work[items_.phase] = w;
    for (int g = 0; g < S::kGroups; ++g) {
      if (!job_.maps.queries) {
        if (w.begin < w.end) copy_queries<S, kQueryThreads>(p_, w, s_.q, 64 * g, thread);
        copy_arrive(s_.q_full + g);
      }
      barrier_arrive(s_.q_full + g);
    }
  }
  // Rows that are not there are whatever lies behind the others.
  __device__ __forceinline__ void order_queries(const Work& w) const {
    if (threadIdx.x % 32 != 0) return;
    for (int g = 0; g < S::kGroups; ++g) {
      std::uint64_t* const full = s_.q_full + g;
      barrier_arrive(full, kQueryThreads - 1);
      if (w.begin >= w.end) {
        barrier_arrive(full);
        continue;
      }
      barrier_expect(full, 64 * S::kWidth * 2);
      const int query = (w.first + 64 * g) / p_.group;
#pragma unroll
      for (int x = 0; x < S::kWidth; x += 64)
        tma_load(s_.q + (x / 64 * S::kRows + 64 * g) * 128, &job_.maps.q, full, x, w.h * p_.group,
                 static_cast<int>(w.q_begin) + query, p_.cu_q ? 0 : static_cast<int>(w.n));
    }
  }

  const Job& job_;
  const Problem& p_;
  const Shared<S>& s_;
  Turn<S::kKeyStages> keys_;
  Turn<S::kValueStages> values_;
  Turn<1> items_;
  Seek seek_;
};

}  // namespace rlk::cuda::attention
