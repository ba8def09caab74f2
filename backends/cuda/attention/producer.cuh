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

// Where a lane's piece of a tile lies, as TMA counts: a tile is one box, or pages that fill it.
struct Piece {
  int token, outer;
  bool there;
};
template <class S>
__device__ __forceinline__ Piece piece_of(const Job& job, const Work& w, int tile) {
  const Problem& p = job.p;
  const int lane = static_cast<int>(threadIdx.x) % 32, box = job.maps.box, j = tile * kTile + lane * box;
  const int begin = S::kPrefixed && j < w.shared ? w.shared_begin : static_cast<int>(w.k_begin);
  Piece piece{begin + j, p.cu_k ? 0 : static_cast<int>(w.n), lane * box < kTile};
  if (p.block_table && piece.there) {
    const int size = static_cast<int>(p.page_size),
              page = box < kTile ? tile * (kTile / box) + lane : j / size;
    piece.outer = static_cast<int>(Problem::held(p.block_table.get(w.n, page), p.pages - 1));
    piece.token = j - page * size;
  }
  return piece;
}
// A tile in such pieces, by the first warp for all of the producer's threads.
template <int Width>
__device__ __forceinline__ void order_tile(unsigned char* to, const CUtensorMap* map, std::uint64_t* full,
                                           const Job& job, int head, const Piece& piece) {
  const int lane = static_cast<int>(threadIdx.x) % 32, box = job.maps.box;
  if (lane == 0) barrier_expect(full, kTile * Width * 2);
  if (lane == 1) barrier_arrive(full, 127);
  __syncwarp();
  if (!piece.there) return;
#pragma unroll
  for (int x = 0; x < Width; x += 64)
    tma_load(to + (x / 64 * kTile + lane * box) * 128, map, full, x, head, piece.token, piece.outer);
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
  __device__ __forceinline__ void end() { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  __device__ __forceinline__ static bool orders() { return threadIdx.x % 128 < 32; }
  __device__ __forceinline__ void bring_keys(const Work& w, int tile) {
    bring_tile<S::kWidth>(p_.k, &job_.maps.k, p_.width, s_.k + keys_.stage * S::kKeyBytes,
                          s_.k_full + keys_.stage, s_.k_empty + keys_.stage, keys_.phase ^ 1, w, tile);
    keys_.next();
  }
  // Latent heads: in the place of keys, when their scores are there.
  __device__ __forceinline__ void bring_values(const Work& w, int tile) {
    bring_tile<S::kValueWidth>(p_.v, &job_.maps.v, p_.value_width, s_.v + values_.stage * S::kValueBytes,
                               s_.v_full + values_.stage, s_.v_empty + values_.stage,
                               S::kLatent ? values_.phase : values_.phase ^ 1, w, tile);
    values_.next();
  }
  // By TMA the first warp orders a tile for all threads.
  template <int Width>
  __device__ __forceinline__ void bring_tile(const attn128::Tensor& of, const CUtensorMap* map, int width,
                                             unsigned char* to, std::uint64_t* full, std::uint64_t* empty,
                                             int phase, const Work& w, int tile) {
    if (tile >= tiles_by_tma(w.keys, job_.maps.box) || (S::kPrefixed && is_seam(w.shared, tile, kTile))) {
      copy_places<S>(p_, of, w, tile, s_.places);
      barrier_wait(empty, phase);
      if constexpr (S::kF8) {
        const attn128::Factors& factors = &of == &p_.k ? p_.k_scale : p_.v_scale;
        widen_tile<typename S::Element, Width>(to, s_.places, width, factors.of(w.h));
        fence_async_proxy();
        barrier_arrive(full);
      } else {
        copy_tile<Width / 8>(to, s_.places, of.data, width / 8);
        copy_arrive(full);
      }
    } else if (orders()) {
      const Piece piece = piece_of<S>(job_, w, tile);
      barrier_wait(empty, phase);
      order_tile<Width>(to, map, full, job_, w.h, piece);
    }
  }
  // Each warpgroup's queries, when it has the last scores of those before, which they are and what they see.
  __device__ __forceinline__ void bring_queries(const Work& w) {
    if constexpr (!S::kSpread) {
      if (!orders())
        describe(w);
      else if (job_.maps.queries)
        order_queries(w);
      items_.next();
    }
  }
  __device__ __forceinline__ void await_places() const {
    for (int g = 0; g < S::kGroups; ++g) barrier_wait(s_.q_empty + g, items_.phase ^ 1);
  }
  __device__ __forceinline__ void describe(const Work& w) const {
    const int thread = static_cast<int>(threadIdx.x) % 128 - 32;
    await_places();
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
    await_places();
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
};

}  // namespace rlk::cuda::attention
