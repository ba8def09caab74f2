// kda_step on Hopper: what a block has in shared memory, and how numbers get there. The chains are those of
// arithmetic/kda/step.hpp; the arithmetic is fma32/kda.
//
// The kernel for calls of many tasks. A block takes one (sequence, value head) after the other, a token each,
// in two stages: M, P and row i of A need neither v nor the state, so they are made while the columns of V of
// the task before are summed.
//
//   keys      eight warps in two halves of a thread a channel
//               decays     of the row (low), and keys of its 16-row block decayed to it (high)
//               row        two of the warps, a thread a column j: M_ij, P_ij and row i of A
//   columns   two warps, a thread two columns of V: x and (s q eg) S, the state read once; then n_i and
//             (s q eg) S + P n
//
// Two more warps, a thread of each, order bulk copies of what lies in one piece in memory, for each stage
// through a ring of slots of its own, so that the next pieces are on their way while this task's chains run:
// the keys and decays of the row's own block of 16 rows; the state, y and n. Rows of A and decayed keys of
// earlier blocks are scattered in memory: 16 bytes at a time, asked for by those who use them as soon as the
// row is known.
#pragma once

#include "arithmetic/kda/step.hpp"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/copy.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kda/step/close.cuh"
#include "simt/kda/token.hpp"

namespace rlk::cuda::kda::step::stages {

using namespace hopper;

inline constexpr int kHalf = 128, kKeyThreads = 2 * kHalf, kColumnThreads = kDim / 2;
inline constexpr int kThreads = kKeyThreads + kColumnThreads + 2 * 32;
// A block has a multiprocessor to itself. A chunk's end needs four slots of keys at once; the rest is for the
// state.
inline constexpr int kKeySlots = 4, kColumnSlots = 16;

// Slots of 16 rows, used in turn.
template <int kSlots>
struct Ring {
  alignas(128) float slots[kSlots][kTile];
  alignas(8) std::uint64_t full[kSlots], empty[kSlots];
};

// What the keys' warps hand to the columns' for a task.
struct Handed {
  alignas(16) float k_start[kDim], q_start[kDim];
  alignas(16) float P[kRows], row[kRows];             // row i of A
  alignas(8) std::uint64_t started, complete, taken;  // the first two; all; nobody reads them any more
};

struct Shared {
  Ring<kKeySlots> own;
  Ring<kColumnSlots> columns;
  // Keys of a 16-row block: [channel][row]. Channels of odd blocks are swapped in pairs, so that a warp whose
  // columns lie in two blocks meets 32 banks. Where a chunk ends: [row][channel], keys decayed to its end.
  alignas(128) float keys[kBlocks][kTile];
  alignas(128) float A[kRows][kRows];
  simt::kda::SharedToken token;
  alignas(16) float k_block[kDim], q_block[kDim];
  alignas(16) float whole[2][kDim];       // decays over the second block and the third
  alignas(16) float ones[kDim + kBlock];  // from kBlock on, so that they lie in other banks
  alignas(16) float to_A[kRows];          // -beta M
  Handed handed[2];                       // of tasks in turn
  alignas(8) std::uint64_t closed;
};

// Where a thread of the keys' warps stands.
struct Here {
  int thread, half;  // half: the thread in its half
  bool low;
};

inline constexpr ::rlk::kda::CacheLayout kLayout = ::rlk::kda::cache_layout(kDim, kDim, kRows);

// A task, found in the call.
struct Row : Task {
  __device__ Row(const Step& p, int task)
      : Row(p, static_cast<int>(static_cast<unsigned>(task) / static_cast<unsigned>(p.value_heads)), task) {}
  __device__ Row(const Step& p, int sequence, int task)
      : Task({{}, nullptr}, sequence, task - sequence * p.value_heads) {
    float* cache = static_cast<float*>(p.cache.data) + n * p.cache.row + hv * p.cache.head;
    c.k = cache + kLayout.k, c.decay = cache + kLayout.decay;
    c.y = cache + kLayout.y, c.n = cache + kLayout.n;
    c.A = cache + kLayout.inverse, c.tail = cache + kLayout.tail;
    c.start = cache + kLayout.start, c.whole = cache + kLayout.whole;
    state = static_cast<float*>(p.initial.data) + n * p.initial.row + hv * p.initial.head;
  }
};

// Computes an address here and nowhere later.
template <class T>
__device__ __forceinline__ void settle(T*& address) {
  asm volatile("" : "+l"(address));
}
// What the kernel before this one wrote may be read from here on, and the one behind it may begin as far as
// here.
__device__ __forceinline__ void begin_reading() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// What a load brings of a type that the call decides, as it comes: so a task's loads are on their way at
// once, and nothing waits for them before value() is asked for.
struct Bits {
  std::uint32_t narrow, wide;

  Bits() = default;
  __device__ Bits(const char* from, Float type) : Bits(from, static_cast<int>(type == Float::f32)) {}
  __device__ std::uint32_t value() const { return narrow | wide; }

 private:
  __device__ Bits(const char* from, int is_wide) {
    asm volatile(
        "{.reg .pred wide;\n"
        "setp.ne.b32 wide, %3, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "@!wide ld.global.u16 %0, [%2];\n"
        "@wide ld.global.u32 %1, [%2];}"
        : "=&r"(narrow), "=&r"(wide)
        : "l"(from), "r"(is_wide));
  }
};
// The same of the rows of a sequence's open chunk.
struct Rows {
  unsigned low, high;

  Rows() = default;
  __device__ Rows(const char* from, bool wide) {
    asm volatile(
        "{.reg .pred wide;\n"
        "setp.ne.b32 wide, %3, 0;\n"
        "mov.b32 %1, 0;\n"
        "ld.global.u32 %0, [%2];\n"
        "@wide ld.global.u32 %1, [%2+4];}"
        : "=&r"(low), "=&r"(high)
        : "l"(from), "r"(static_cast<int>(wide)));
  }
  // More than fit of a number that is none.
  __device__ unsigned value() const { return high == 0 ? low : ~0u; }
};
__device__ __forceinline__ const char* rows_at(const Step& p, const Row& r) {
  return static_cast<const char*>(p.rows) + (static_cast<std::int64_t>(r.n) << (p.wide_rows ? 3 : 2));
}
// Channel d of a head's row in a tensor.
__device__ __forceinline__ const char* channel_at(const ::rlk::kda::Tensor& t, int n, int head, int d) {
  return static_cast<const char*>(t.data) +
         ((::rlk::kda::at(t, n, 0, head) + d) << (t.type == Float::f32 ? 2 : 1));
}
// Whether a call may give this many rows.
__device__ __forceinline__ bool fits(unsigned rows) { return rows <= kRows; }

__device__ __forceinline__ void sync_keys() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void sync_makers() { asm volatile("bar.sync 2, 64;" ::: "memory"); }

// The slot with piece `piece` of all that come through a ring, once it is there.
template <int kSlots>
__device__ __forceinline__ const float* wait_for(Ring<kSlots>& ring, unsigned piece) {
  barrier_wait(&ring.full[piece % kSlots], piece / kSlots & 1);
  return ring.slots[piece % kSlots];
}
// One arrival for the warp.
__device__ __forceinline__ void arrive_warp(std::uint64_t* barrier) {
  __syncwarp();
  barrier_arrive_if(threadIdx.x % 32 == 0, barrier);
}
// By every warp of those that have the piece, when it reads it no more.
template <int kSlots>
__device__ __forceinline__ void release(Ring<kSlots>& ring, unsigned piece) {
  arrive_warp(&ring.empty[piece % kSlots]);
}

template <int kSlots>
__device__ __forceinline__ void init_ring(Ring<kSlots>& ring, int readers) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot)
    barrier_init(&ring.full[slot], 1), barrier_init(&ring.empty[slot], readers);
}
// By a thread of each of two warps: lanes with barriers of their own would take turns.
__device__ __forceinline__ void init_barriers(Shared& s, int thread) {
  if (thread == 0) {
    init_ring(s.own, kHalf / 32);
    for (Handed& handed : s.handed) {
      barrier_init(&handed.started, kHalf / 32);
      barrier_init(&handed.complete, kRows / 32);
      barrier_init(&handed.taken, kColumnThreads / 32);
    }
    barrier_init(&s.closed, 1);
    fence_barrier_init();
  } else if (thread == 32) {
    init_ring(s.columns, kColumnThreads / 32);
    fence_barrier_init();
  }
}

// The next piece.
template <int kSlots>
__device__ __forceinline__ void bring_rows(Ring<kSlots>& ring, unsigned& piece, const float* from, int rows) {
  const unsigned slot = piece % kSlots;
  const auto bytes = static_cast<std::uint32_t>(rows * kDim * 4);
  barrier_wait(&ring.empty[slot], (piece++ / kSlots & 1) ^ 1);
  barrier_expect(&ring.full[slot], bytes);
  bulk_load(ring.slots[slot], from, bytes, &ring.full[slot]);
}

// Calls bring(row, closes) for one task after the other; what is no row has nothing to bring.
template <class Bring>
__device__ __forceinline__ void for_each_row(const Step& p, int task, int step, Bring bring) {
  const int tasks = static_cast<int>(p.sequences * p.value_heads);
  Row next_row(p, task);
  const char* at = rows_at(p, next_row);
  settle(at), settle(next_row.c.k), settle(next_row.state);
  begin_reading();
  Rows next(at, p.wide_rows);
  for (; task < tasks; task += step) {
    Row r = next_row;
    const unsigned rows = next.value();
    if (task + step < tasks) next_row = Row(p, task + step), next = Rows(rows_at(p, next_row), p.wide_rows);
    if (!fits(rows)) continue;
    r.i = static_cast<int>(rows % kRows);
    bring(r, rows == kRows);
  }
}

// For the keys, one thread: two pieces where the row's block has rows before it, and twelve where a chunk
// ends.
__device__ inline void produce_keys(const Step& p, Shared& s, int task, int step) {
  unsigned piece = 0;
  for_each_row(p, task, step, [&](const Row& r, bool closes) {
    if (closes) {
      for (int b = kRows / kBlock - 1; b >= 0; --b) {
        bring_rows(s.own, piece, r.c.k + b * kTile, kBlock);
        bring_rows(s.own, piece, r.c.decay + b * kTile, kBlock);
      }
      for (int m = 0; m < kRows; m += kBlock) bring_rows(s.own, piece, r.c.n + m * kDim, kBlock);
    }
    if (r.own() > 0) {
      bring_rows(s.own, piece, r.c.k + r.first() * kDim, r.own());
      bring_rows(s.own, piece, r.c.decay + r.first() * kDim, r.own());
    }
  });
}

// For the columns, one thread: the state, then n and y in turn.
__device__ inline void produce_columns(const Step& p, Shared& s, int task, int step) {
  unsigned piece = 0, closings = 0;
  for_each_row(p, task, step, [&](const Row& r, bool closes) {
    if (closes) barrier_wait(&s.closed, closings++ & 1);
    for (int d = 0; d < kDim; d += kBlock) bring_rows(s.columns, piece, r.state + d * kDim, kBlock);
    for (int m = 0; m < r.i; m += kBlock) {
      const int some = r.i - m < kBlock ? r.i - m : kBlock;
      bring_rows(s.columns, piece, r.c.n + m * kDim, some);
      bring_rows(s.columns, piece, r.c.y + m * kDim, some);
    }
  });
}

}  // namespace rlk::cuda::kda::step::stages
