// The producer of the attention kernel: a warpgroup that brings queries and tiles of keys and values, from wherever they lie.
#pragma once

#include "cuda/attention/block.cuh"

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

// Whole tiles by TMA, in pieces of a box.
template <int Width>
__device__ __forceinline__ void order_tile(unsigned char* to, const CUtensorMap* map, std::uint64_t* full,
                                           const Job& job, const Work& w, int tile) {
  const Problem& p = job.p;
  const int t = static_cast<int>(threadIdx.x) % 128, box = job.maps.box, pieces = kTile / box;
  if (t >= pieces) return barrier_arrive(full);
  const int j = tile * kTile + t * box;
  int token = static_cast<int>(w.k_begin) + j, outer = p.cu_k ? 0 : static_cast<int>(w.n);
  if (p.block_table) {
    const int size = static_cast<int>(p.page_size);
    outer = static_cast<int>(Problem::held(p.block_table.get(w.n, j / size), p.pages - 1)), token = j % size;
  }
  barrier_expect(full, kTile * Width * 2 / pieces);
#pragma unroll
  for (int x = 0; x < Width; x += 64)
    tma_load(to + (x / 64 * kTile + t * box) * 128, map, full, x, w.h, token, outer);
}

__device__ __forceinline__ void copy_places(const Problem& p, const Work& w, int tile,
                                            const unsigned char** places) {
  const int t = static_cast<int>(threadIdx.x) % 128, j = tile * kTile + t;
  const bool there = j < w.keys;
  role_sync(1, 128);  // nobody reads those of the tile before any more
  places[t] = there ? static_cast<const unsigned char*>(p.key(p.k, w.n, w.k_begin, j, w.h)) : nullptr;
  places[kTile + t] = there ? static_cast<const unsigned char*>(p.key(p.v, w.n, w.k_begin, j, w.h)) : nullptr;
  role_sync(1, 128);
}

template <class S>
class Producer {
 public:
  __device__ __forceinline__ Producer(const Job& job, const Shared<S>& s) : job_(job), p_(job.p), s_(s) {}

  // An item, or one that is nothing, without rows.
  __device__ __forceinline__ void bring(const Work& w) {
    if (w.begin >= w.end) return bring_queries(w);
    for (int tile = w.begin; tile < w.end; ++tile) {
      unsigned char* const k = s_.k + keys_.stage * S::kKeyBytes;
      unsigned char* const v = s_.v + values_.stage * S::kValueBytes;
      const bool threads = by_threads(w.keys, job_.maps.box, tile),
                 with_values = !S::kLatent || !job_.values_in_keys;
      if (threads) copy_places(p_, w, tile, s_.places);
      barrier_wait(s_.k_empty + keys_.stage, keys_.phase ^ 1);
      if (threads) {
        copy_tile<S::kWidth / 8>(k, s_.places, p_.k.data, p_.width / 8);
        copy_arrive(s_.k_full + keys_.stage);
      } else {
        order_tile<S::kWidth>(k, &job_.maps.k, s_.k_full + keys_.stage, job_, w, tile);
      }
      keys_.next();
      if (tile == w.begin) bring_queries(w);
      if (!with_values) continue;
      // In the place of keys: when their scores are there.
      barrier_wait(s_.v_empty + values_.stage, S::kLatent ? values_.phase : values_.phase ^ 1);
      if (threads) {
        copy_tile<S::kValueWidth / 8>(v, s_.places + kTile, p_.v.data, p_.value_width / 8);
        copy_arrive(s_.v_full + values_.stage);
      } else {
        order_tile<S::kValueWidth>(v, &job_.maps.v, s_.v_full + values_.stage, job_, w, tile);
      }
      values_.next();
    }
  }
  __device__ __forceinline__ void end() { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  // Each warpgroup's queries, when it has the last scores of those before, and which they are.
  __device__ __forceinline__ void bring_queries(const Work& w) {
    if constexpr (!S::kSpread) {
      const int thread = static_cast<int>(threadIdx.x) % 128;
      for (int g = 0; g < S::kGroups; ++g) barrier_wait(s_.q_empty + g, items_.phase ^ 1);
      if (thread == 0) s_.work[items_.phase] = w;
      for (int g = 0; g < S::kGroups; ++g) {
        if (w.begin < w.end) copy_queries<S, 128>(p_, w, s_.q, 64 * g, thread);
        copy_arrive(s_.q_full + g);
        if (thread == 0) barrier_arrive(s_.q_full + g);
      }
      items_.next();
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
