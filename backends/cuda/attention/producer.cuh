// The producer of the attention kernel: a warpgroup that brings tiles of keys and values, from wherever they lie.
#pragma once

#include "cuda/attention/block.cuh"

namespace rlk::cuda::attention {

// Rows that are not there, and channels behind the last, are zeros: 0 * NaN would be NaN.
template <int Pieces>
__device__ __forceinline__ void copy_tile(unsigned char* to, const unsigned char* const* places,
                                          const void* anywhere, int pieces) {
  const int t = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 8
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
__device__ inline void produce(const Job& job, const Work& w, const Shared<S>& s) {
  const Problem& p = job.p;
  Turn<S::kKeyStages> keys;
  Turn<S::kValueStages> values;
  for (int tile = w.begin; tile < w.end; ++tile) {
    unsigned char *const k = s.k + keys.stage * S::kKeyBytes, *const v = s.v + values.stage * S::kValueBytes;
    const bool threads = by_threads(w, job.maps.box, tile), with_values = !S::kLatent || !job.values_in_keys;
    if (threads) copy_places(p, w, tile, s.places);
    barrier_wait(s.k_empty + keys.stage, keys.phase ^ 1);
    if (threads) {
      copy_tile<S::kWidth / 8>(k, s.places, p.k.data, p.width / 8);
      copy_arrive(s.k_full + keys.stage);
    } else {
      order_tile<S::kWidth>(k, &job.maps.k, s.k_full + keys.stage, job, w, tile);
    }
    keys.next();
    if (!with_values) continue;
    // In the place of keys: when their scores are there.
    barrier_wait(s.v_empty + values.stage, S::kLatent ? values.phase : values.phase ^ 1);
    if (threads) {
      copy_tile<S::kValueWidth / 8>(v, s.places + kTile, p.v.data, p.value_width / 8);
      copy_arrive(s.v_full + values.stage);
    } else {
      order_tile<S::kValueWidth>(v, &job.maps.v, s.v_full + values.stage, job, w, tile);
    }
    values.next();
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rlk::cuda::attention
