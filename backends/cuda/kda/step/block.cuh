// kda_step on Hopper: what a block has in shared memory, and how numbers get there. The chains are those of
// arithmetic/kda/step.hpp; the arithmetic is fma32/kda.
//
// The kernel for calls of few tasks: all warps work at one. A block takes one (sequence, value head) after the other, a token
// each. One warp of it, the producer, orders bulk copies of what lies in one piece in memory: the keys and decays of the row's
// own block of 16 rows, the state, y and n. They go through a ring of slots, so that the next state is on its way while this
// row's short chains run. Eight warps compute, in two halves of a thread a column:
//
//              columns of V ("low")                              pairs ("high")
//   decays     of the row                                        keys of the row's block, decayed to it
//   products   x and (s q eg) S, the state read once             M_ij and P_ij, a thread a column j
//   rows       row i of A, then n_i                              (s q eg) S + P n as far as row i - 1
//
// Rows of A and decayed keys of earlier blocks are scattered in memory: 16 bytes at a time, asked for by those who use them
// as soon as the row is known.
#pragma once

#include "arithmetic/kda/step.hpp"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/copy.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kda/step/close.cuh"
#include "simt/kda/token.hpp"

namespace rlk::cuda::kda::step {

using namespace hopper;

inline constexpr int kHalf = 128, kConsumers = 2 * kHalf, kThreads = kConsumers + 32;
// A block has a multiprocessor to itself, and slots of 16 rows for all of a row's pieces: while one task computes, much of the next
// one's state is on its way.
inline constexpr int kSlots = 18;

struct Shared {
  alignas(128) float slots[kSlots][kTile];
  // Keys of a 16-row block: [channel][row]. Channels of odd blocks are swapped in pairs, so that a warp whose columns lie
  // in two blocks meets 32 banks. Where a chunk ends: [row][channel], keys decayed to its end.
  alignas(128) float keys[kBlocks][kTile];
  alignas(128) float A[kRows][kRows];
  simt::kda::SharedToken token;
  alignas(16) float k_start[kDim], q_start[kDim], k_block[kDim], q_block[kDim];
  alignas(16) float whole[2][kDim];                     // decays over the second block and the third
  alignas(16) float to_A[kRows], P[kRows], row[kRows];  // -beta M, P, row i of A
  float o[kDim], n[kDim];
  alignas(8) std::uint64_t full[kSlots], empty[kSlots], closed;
};

// Where a thread stands.
struct Here {
  int thread, half;  // half: the thread in its half
  bool low;
};

// A task, found in the call.
struct Row : Task {
  __device__ Row(const Step& p, int task)
      : Row(p, static_cast<int>(static_cast<unsigned>(task) / static_cast<unsigned>(p.value_heads)), task) {}
  __device__ Row(const Step& p, int sequence, int task)
      : Task({p.layout, nullptr}, sequence, task - sequence * p.value_heads) {
    c = {p.layout, static_cast<float*>(p.cache.data) + n * p.cache.row + hv * p.cache.head};
    state = static_cast<float*>(p.initial.data) + n * p.initial.row + hv * p.initial.head;
  }
};

// Whether a call may give this many rows.
__device__ __forceinline__ bool fits(std::int64_t rows) { return rows >= 0 && rows <= kRows; }

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// Each half among itself, both as often: racecheck counts barriers, not their names.
__device__ __forceinline__ void sync_half(bool low) {
  if (low) {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 3, 128;" ::: "memory");
  }
}

// The slot with piece `piece` of all that the producer brings, once it is there.
__device__ __forceinline__ const float* wait_for(Shared& s, unsigned piece) {
  barrier_wait(&s.full[piece % kSlots], piece / kSlots & 1);
  return s.slots[piece % kSlots];
}
// By every thread of the half that has the piece, when nobody reads it any more.
__device__ __forceinline__ void release(Shared& s, unsigned piece) {
  barrier_arrive(&s.empty[piece % kSlots]);
}

// The producer's next piece.
__device__ __forceinline__ void bring_rows(Shared& s, unsigned& piece, const float* from, int rows) {
  const int slot = static_cast<int>(piece % kSlots);
  const auto bytes = static_cast<std::uint32_t>(rows * kDim * 4);
  barrier_wait(&s.empty[slot], (piece++ / kSlots & 1) ^ 1);
  barrier_expect(&s.full[slot], bytes);
  bulk_load(s.slots[slot], from, bytes, &s.full[slot]);
}

// Pieces of a row, in the order of the ring.
struct Pieces {
  unsigned block, state, rows, end;  // the first of: own block's keys and decays, state, n and y in turn

  __device__ Pieces(unsigned piece, const Row& r)
      : block(piece),
        state(block + (r.own() > 0 ? 2 : 0)),
        rows(state + kDim / kBlock),
        end(rows + 2 * static_cast<unsigned>((r.i + kBlock - 1) / kBlock)) {}
};

// What the producer does, one thread.
__device__ inline void produce(const Step& p, Shared& s, int task, int step) {
  unsigned piece = 0, closings = 0;
  for (; task < p.sequences * p.value_heads; task += step) {
    Row r(p, task);
    const std::int64_t rows = p.cached(r.n);
    if (!fits(rows)) continue;
    r.i = static_cast<int>(rows);
    if (r.i == kRows) {
      for (int b = kRows / kBlock - 1; b >= 0; --b) {
        bring_rows(s, piece, r.c.k + b * kTile, kBlock);
        bring_rows(s, piece, r.c.decay + b * kTile, kBlock);
      }
      for (int m = 0; m < kRows; m += kBlock) bring_rows(s, piece, r.c.n + m * kDim, kBlock);
      barrier_wait(&s.closed, closings++ & 1);
      r.i = 0;
    }
    if (r.own() > 0) {
      bring_rows(s, piece, r.c.k + r.first() * kDim, r.own());
      bring_rows(s, piece, r.c.decay + r.first() * kDim, r.own());
    }
    for (int d = 0; d < kDim; d += kBlock) bring_rows(s, piece, r.state + d * kDim, kBlock);
    for (int m = 0; m < r.i; m += kBlock) {
      const int some = r.i - m < kBlock ? r.i - m : kBlock;
      bring_rows(s, piece, r.c.n + m * kDim, some);
      bring_rows(s, piece, r.c.y + m * kDim, some);
    }
  }
}

}  // namespace rlk::cuda::kda::step
