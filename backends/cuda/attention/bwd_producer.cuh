// The producer of attention's backward: a warpgroup that brings an item's still rows and tiles of the moving side, by TMA
// where all rows are there or nothing lies behind them. Rows that are not, and channels behind the last, are zeros: 0 * NaN
// would be NaN.
#pragma once

#include "cuda/attention/bwd_block.cuh"

namespace rlk::cuda::attention {

__device__ __forceinline__ void copy4(void* to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
               : "memory");
}

// f.operator()<tensor>() for the two tensors of a side.
template <class F>
__device__ __forceinline__ void for_both(F f) {
  f.template operator()<0>();
  f.template operator()<1>();
}

// `Rows` rows of one side's tensor from `first` on, of which `rows` are there.
template <class S, bool OfKeys, int Rows, int Tensor>
__device__ __forceinline__ void copy_rows(const Backward& g, const BackwardWork& w, int first, int rows,
                                          unsigned char* to) {
  constexpr int kPieces = S::width(Tensor) / 8;  // of 16 bytes, of a row
  const int t = static_cast<int>(threadIdx.x) % 128;
  const int pieces = (Tensor == 0 ? g.p.width : g.p.value_width) / 8;
  const void* const anywhere = row_of<S, OfKeys>(g, w, Tensor, first);
#pragma unroll 2
  for (int i = 0; i < Rows * kPieces / 128; ++i) {
    const int at = t + i * 128, row = at / kPieces, piece = at % kPieces;
    const bool there = row < rows && piece < pieces;
    const void* from = anywhere;
    if (there) from = static_cast<const char*>(row_of<S, OfKeys>(g, w, Tensor, first + row)) + piece * 16;
    copy16(to + swizzled(Rows, row, piece), from, there ? 16 : 0);
  }
}

// Rows by TMA, in boxes of kMoving.
template <class S, bool OfKeys, int Rows, int Tensor>
__device__ __forceinline__ void order_rows(const Problem& p, const BackwardWork& w, const CUtensorMap* map,
                                           int first, unsigned char* to, std::uint64_t* full) {
  const bool packed = static_cast<bool>(OfKeys ? p.cu_k : p.cu_q);
  const int begin = OfKeys && S::kPrefixed && first < w.shared
                        ? w.shared_begin
                        : static_cast<int>(OfKeys ? w.k_begin : w.q_begin),
            token = begin + first, head = OfKeys ? w.kv_head : w.head;
#pragma unroll
  for (int x = 0; x < S::width(Tensor); x += 64)
#pragma unroll
    for (int row = 0; row < Rows; row += S::kMoving)
      tma_load(to + (x / 64 * Rows + row) * 128, map, full, x, head, token + row,
               packed ? 0 : static_cast<int>(w.n));
}

// An item's still rows, when consumers have left those of the last but one, and what it is.
template <class S, bool Keys>
__device__ __forceinline__ void bring_still(const BackwardJob& job, const BackwardWork& w,
                                            const BackwardShared<S>& s, Turn<S::kItems>& turn) {
  const int t = static_cast<int>(threadIdx.x) % 128;
  std::uint64_t* const full = s.item_full + turn.stage;
  barrier_wait(s.item_empty + turn.stage, turn.phase ^ 1);
  if (t == 0) s.work[turn.stage] = w, barrier_arrive(full);
  const bool ordered =
      job.mapped[!Keys] && w.count > 0 && (w.count == S::kStill || ends_tensor(job.g.p, w, Keys));
  if (ordered && t == 0) barrier_expect(full, S::still_bytes(0) + S::still_bytes(1));
  for_both([&]<int Tensor>() {
    unsigned char* const to = s.still[Tensor] + turn.stage * S::still_bytes(Tensor);
    if (ordered && t == 0)
      order_rows<S, Keys, S::kStill, Tensor>(job.g.p, w, job.maps[!Keys] + Tensor, w.first, to, full);
    else if (!ordered && w.count > 0)
      copy_rows<S, Keys, S::kStill, Tensor>(job.g, w, w.first, w.count, to);
  });
  if (!ordered || t != 0) copy_arrive(full);
  turn.next();
}

template <class S, bool Keys>
__device__ inline void produce(const BackwardJob& job, const BackwardWork& w, const BackwardShared<S>& s,
                               Turn<S::kStages>& turn) {
  const Backward& g = job.g;
  const int t = static_cast<int>(threadIdx.x) % 128, rows = Keys ? w.queries : w.keys;
  const Stat* const stats = job.gathered.stats + w.head * g.rows() + w.row_begin;
  for (int tile = w.begin; tile < w.end; ++tile, turn.next()) {
    const int first = tile * S::kMoving;
    std::uint64_t* const full = s.full + turn.stage;
    const bool ordered = tile < w.by_tma && (Keys || !S::kPrefixed || !is_seam(w.shared, tile, S::kMoving));
    barrier_wait(s.empty + turn.stage, turn.phase ^ 1);
    if (Keys && t >= 64) {
#pragma unroll
      for (int at = t - 64; at < S::kMoving; at += 64) {
        const bool there = first + at < rows;
        const Stat* const from = there ? stats + first + at : stats;
        float* const to = s.stats + turn.stage * 2 * S::kMoving + at;
        copy4(to, &from->base, there ? 4 : 0), copy4(to + S::kMoving, &from->delta, there ? 4 : 0);
      }
    }
    if (ordered && t == 0) barrier_expect(full, S::moving_bytes(0) + S::moving_bytes(1));
    for_both([&]<int Tensor>() {
      unsigned char* const to = s.moving[Tensor] + turn.stage * S::moving_bytes(Tensor);
      if (!ordered)
        copy_rows<S, !Keys, S::kMoving, Tensor>(g, w, first, rows - first, to);
      else if (t == 0)
        order_rows<S, !Keys, S::kMoving, Tensor>(g.p, w, job.maps[Keys] + Tensor, first, to, full);
    });
    if (!ordered || t != 0) copy_arrive(full);
  }
}
// The item that no block has taken yet.
template <class S>
__device__ __forceinline__ unsigned next_item(const BackwardJob& job, const BackwardShared<S>& s) {
  if (threadIdx.x % 128 == 0) *s.item = gridDim.x + atomicAdd(job.gathered.taken, 1u);
  role_sync(1, 128);
  const unsigned item = *s.item;
  role_sync(1, 128);
  return item;
}

// The sequence behind `reader` whose queries see keys of `owner` next, or p.sequences. Every lane asks alike.
__device__ inline std::int64_t next_reader(const Problem& p, std::int64_t owner, std::int64_t reader) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t base = reader + 1; base < p.sequences; base += 32) {
    const bool reads = base + lane < p.sequences && p.prefix(base + lane) == owner;
    if (const unsigned hit = __ballot_sync(~0u, reads); hit != 0)
      return base + __ffs(static_cast<int>(hit)) - 1;
  }
  return p.sequences;
}

// Items of one side, [begin, end) of all.
template <class S, bool Keys>
__device__ inline void produce_items(const BackwardJob& job, const BackwardShared<S>& s, unsigned& item,
                                     unsigned begin, unsigned end, Turn<S::kStages>& turn,
                                     Turn<S::kItems>& items) {
  for (; item < end; item = next_item(job, s)) {
    BackwardWork w;
    if (!find_work<S, Keys>(job, item - begin, w)) continue;
    const std::int64_t owner = w.n;
    for (w.place = 0; w.place < (Keys ? job.gathered.together : 1); ++w.place, ++w.head) {
      w.goes_on = false, w.ends = !Keys || !S::kPrefixed;
      while (!w.ends) {
        const std::int64_t next = next_reader(job.g.p, owner, w.n);
        w.ends = next == job.g.p.sequences;
        bring_still<S, Keys>(job, w, s, items);
        produce<S, Keys>(job, w, s, turn);
        w.n = w.ends ? owner : next, w.goes_on = true;
        find_moving<S, Keys>(job, w);
      }
      if (w.goes_on) continue;
      bring_still<S, Keys>(job, w, s, items);
      produce<S, Keys>(job, w, s, turn);
    }
  }
}
template <class S>
__device__ inline void produce_all(const BackwardJob& job, const BackwardShared<S>& s) {
  Turn<S::kStages> turn;
  Turn<S::kItems> items;
  unsigned item = blockIdx.x;
  produce_items<S, true>(job, s, item, 0, job.items[0], turn, items);
  produce_items<S, false>(job, s, item, job.items[0], job.items[0] + job.items[1], turn, items);
  bring_still<S, true>(job, BackwardWork{}, s, items);  // which says that there are no more
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rlk::cuda::attention
