// The producer of attention's backward: a warpgroup that brings tiles of the moving side, by TMA where all rows of a tile are
// there. Rows that are not, and channels behind the last, are zeros: 0 * NaN would be NaN.
#pragma once

#include "cuda/attention/bwd_block.cuh"

namespace rlk::cuda::attention {

__device__ __forceinline__ void copy4(void* to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
               : "memory");
}

template <class S>
__device__ __forceinline__ void copy_moving(const Backward& g, const BackwardWork& w, int tensor, int first,
                                            unsigned char* to) {
  constexpr bool kKeys = !S::kKeys;
  const int t = static_cast<int>(threadIdx.x) % 128, rows = (kKeys ? w.keys : w.queries) - first;
  const int pieces = (tensor == 0 ? g.p.width : g.p.value_width) / 8;
  const void* const anywhere = row_of<kKeys>(g, w, tensor, first);
#pragma unroll 2
  for (int i = 0; i < S::kMoving * S::kPieces / 128; ++i) {
    const int at = t + i * 128, row = at / S::kPieces, piece = at % S::kPieces;
    const bool there = row < rows && piece < pieces;
    const void* from = anywhere;
    if (there) from = static_cast<const char*>(row_of<kKeys>(g, w, tensor, first + row)) + piece * 16;
    copy16(to + swizzled(S::kMoving, row, piece), from, there ? 16 : 0);
  }
}

// A tile whose rows are all there.
template <class S>
__device__ __forceinline__ void order_moving(const BackwardJob& job, const BackwardWork& w, int tensor,
                                             int first, unsigned char* to, std::uint64_t* full) {
  const Problem& p = job.g.p;
  const bool packed = static_cast<bool>(S::kKeys ? p.cu_q : p.cu_k);
  const int token = static_cast<int>(S::kKeys ? w.q_begin : w.k_begin) + first,
            head = S::kKeys ? w.head : w.kv_head;
#pragma unroll
  for (int x = 0; x < S::kWidth; x += 64)
    tma_load(to + x / 64 * S::kMoving * 128, job.maps + tensor, full, x, head, token,
             packed ? 0 : static_cast<int>(w.n));
}

template <class S>
__device__ inline void produce(const BackwardJob& job, const BackwardWork& w, const BackwardShared<S>& s,
                               Turn<S::kStages>& turn) {
  const Backward& g = job.g;
  const int t = static_cast<int>(threadIdx.x) % 128, rows = S::kKeys ? w.queries : w.keys;
  const Stat* const stats = job.gathered.stats + w.head * g.rows() + w.row_begin;
  for (int tile = w.begin; tile < w.end; ++tile, turn.next()) {
    const int first = tile * S::kMoving;
    std::uint64_t* const full = s.full + turn.stage;
    const bool ordered = !by_threads<S>(job, w, tile);
    barrier_wait(s.empty + turn.stage, turn.phase ^ 1);
    if (S::kKeys && t >= 64) {
#pragma unroll
      for (int at = t - 64; at < S::kMoving; at += 64) {
        const bool there = first + at < rows;
        const Stat* const from = there ? stats + first + at : stats;
        float* const to = s.stats + turn.stage * 2 * S::kMoving + at;
        copy4(to, &from->base, there ? 4 : 0), copy4(to + S::kMoving, &from->delta, there ? 4 : 0);
      }
    }
    if (ordered && t == 0) barrier_expect(full, 2 * S::kMovingBytes);
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
      unsigned char* const to = s.moving[tensor] + turn.stage * S::kMovingBytes;
      if (!ordered)
        copy_moving<S>(g, w, tensor, first, to);
      else if (t == 0)
        order_moving<S>(job, w, tensor, first, to, full);
    }
    if (!ordered || t != 0) copy_arrive(full);
  }
}
template <class S>
__device__ inline void produce_all(const BackwardJob& job, BackwardWork w, const BackwardShared<S>& s) {
  Turn<S::kStages> turn;
  for (int i = 0; i < (S::kGrouped ? job.g.p.group : 1); ++i, ++w.head) produce<S>(job, w, s, turn);
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rlk::cuda::attention
