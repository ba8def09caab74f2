// The producer of the attention kernel: a warpgroup that brings tiles of keys and values, from wherever they lie.
#pragma once

#include "cuda/attention/block.cuh"

namespace rlk::cuda::attention {

// Rows that are not there, and channels behind the last, are zeros: 0 * NaN would be NaN.
template <class S>
__device__ __forceinline__ void copy_tile(unsigned char* to, const unsigned char* const* places,
                                          const void* anywhere, int pieces) {
  const int t = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int i = 0; i < S::kPieces; ++i) {
    const int at = t + i * 128, row = at / S::kPieces, piece = at % S::kPieces;
    const unsigned char* from = places[row];
    const bool there = from != nullptr && piece < pieces;
    copy16(to + Shared<S>::swizzled(kTile, row, piece),
           there ? static_cast<const void*>(from + piece * 16) : anywhere, there ? 16 : 0);
  }
}

// Whole tiles by TMA, in pieces of a box.
template <class S>
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
  barrier_expect(full, S::kTileBytes / pieces);
#pragma unroll
  for (int x = 0; x < S::kWidth; x += 64)
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
  Turn<S::kStages> turn;
  for (int tile = w.begin; tile < w.end; ++tile, turn.next()) {
    unsigned char *const k = s.k + turn.stage * S::kTileBytes, *const v = s.v + turn.stage * S::kTileBytes;
    std::uint64_t *const k_full = s.k_full + turn.stage, *const v_full = s.v_full + turn.stage;
    if (by_threads(w, job.maps.box, tile)) {
      copy_places(p, w, tile, s.places);
      barrier_wait(s.k_empty + turn.stage, turn.phase ^ 1);
      copy_tile<S>(k, s.places, p.k.data, p.width / 8);
      copy_arrive(k_full);
      barrier_wait(s.v_empty + turn.stage, turn.phase ^ 1);
      copy_tile<S>(v, s.places + kTile, p.v.data, p.value_width / 8);
      copy_arrive(v_full);
    } else {
      barrier_wait(s.k_empty + turn.stage, turn.phase ^ 1);
      order_tile<S>(k, &job.maps.k, k_full, job, w, tile);
      barrier_wait(s.v_empty + turn.stage, turn.phase ^ 1);
      order_tile<S>(v, &job.maps.v, v_full, job, w, tile);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rlk::cuda::attention
