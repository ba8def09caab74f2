// The gradients kernel's loads: TMA and bulk copies by one thread, or cp.async by all where TMA cannot walk a
// tensor.
#pragma once

#include "cuda/kda/gradients/block.cuh"

namespace rlk::cuda::kda::gradients {

// One thread's.
template <class V>
__device__ inline void begin_barriers(const Block<V>& b) {
  barrier_init(&b.s.operands_arrived, 1);
  barrier_init(&b.s.inputs_arrived, 1);
  barrier_init(&b.s.dots_arrived, 1);
  fence_barrier_init();
  fence_async_proxy();
}

// The producer's orders: one thread's, for all that the block reads by bulk copies and TMA. First q, k and g.
template <class V>
__device__ inline void order_inputs(const Block<V>& b) {
  std::uint64_t* const arrived = &b.s.inputs_arrived;
  const int token = static_cast<int>(b.c.token), row = static_cast<int>(b.c.row), x = b.slice * kSlice;
  const int halves = b.half(b.p.g) ? 1 : 2;
  barrier_expect(arrived, 2 * 8192 + halves * 8192);
  tma_load(b.s.inputs.q, &b.maps.q, arrived, x, b.h, token, row);
  tma_load(b.s.inputs.k, &b.maps.k, arrived, x, b.h, token, row);
  for (int i = 0; i < halves; ++i)
    tma_load(b.s.inputs.g + i * 8192, &b.maps.g, arrived, x + 32 * i, b.hv, token, row);
}
// Into L2 alone.
__device__ inline void tma_prefetch(const CUtensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(w)
               : "memory");
}
template <class V>
__device__ inline void prefetch_inputs(const Block<V>& b) {
  const int token = static_cast<int>(b.c.token), row = static_cast<int>(b.c.row), x = b.slice * kSlice;
  tma_prefetch(&b.maps.q, x, b.h, token, row), tma_prefetch(&b.maps.k, x, b.h, token, row);
  for (int i = 0; i < (b.p.g.bf16 ? 1 : 2); ++i) tma_prefetch(&b.maps.g, x + 32 * i, b.hv, token, row);
}
// Then all that the products read.
template <class V>
__device__ inline void order_operands(const Block<V>& b) {
  constexpr int K = V::K, C = kSlice;
  const Job& p = b.p;
  auto& to = b.s.operands;
  std::uint64_t* const arrived = &b.s.operands_arrived;
  barrier_expect(arrived, 512 * K + (V::Gated ? 128 * K + 2 * K * C : 0) + (V::Mapped ? 128 * K : 0));
  const std::int64_t item = b.item;
  bulk_load(to.v_new, p.v_new + item * 64 * K, 128 * K, arrived);
  bulk_load(to.d_x, p.d_x + item * 64 * K, 128 * K, arrived);
  bulk_load(to.d_state, p.d_states + (item * K + b.slice * C) * K, 2 * K * C, arrived);
  bulk_load(to.state, p.states + (item * K + b.slice * C) * K, 2 * K * C, arrived);
  if constexpr (V::Gated) {
    bulk_load(b.s.rests.v_new, p.v_new_rest + item * 64 * K, 128 * K, arrived);
    bulk_load(b.s.rests.d_state, p.d_states_rest + (item * K + b.slice * C) * K, 2 * K * C, arrived);
  }
  if constexpr (V::Mapped) {
    const int token = static_cast<int>(b.c.token), row = static_cast<int>(b.c.row);
#pragma unroll
    for (int i = 0; i < K / 64; ++i)
      tma_load(to.d_out + i * 8192, &b.maps.d_out, arrived, 64 * i, b.hv, token, row);
    if constexpr (V::Later) {
      prefetch_inputs(b);
    } else {
      order_inputs(b);
    }
  }
}

// 64 rows of `Pieces` times 16 bytes, rows of the tile `pitch` bytes apart; past the end zeros. `place` is
// where in the tile a piece of a row lies.
template <unsigned Pieces, class V, class Place>
__device__ inline void load_rows(const Block<V>& b, const char* tile, const void* from, int step, int pitch,
                                 Place place) {
  constexpr unsigned kRows = kThreads / Pieces;
  const int row = b.thread / Pieces, piece = b.thread % Pieces;
  const char* at = static_cast<const char*>(from) + 16 * piece;
  const std::uint32_t to = shared_address(tile) + place(row, piece);
#pragma unroll
  for (int i = 0; i < static_cast<int>(64 / kRows); ++i) {
    const int r = row + static_cast<int>(kRows) * i;
    const bool valid = r < b.c.length;
    copy16(to + i * kRows * pitch, rows_on(at, valid ? r : 0, step), valid ? 16 : 0);
  }
}
// To a tile of `rows`.
template <unsigned Pieces, class V>
__device__ inline void load_tile(const Block<V>& b, const char* tile, const bf16* from, int step) {
  load_rows<Pieces>(b, tile, from, 2 * step, 128,
                    [](int row, int piece) { return row_tile(64, row, piece); });
}

template <class V>
__device__ inline void load_d_out(const Block<V>& b) {
  load_tile<V::K / 8>(b, b.s.operands.d_out, row_of(b.p.d_out, b.c.row, b.c.token, b.hv),
                      static_cast<int>(b.p.d_out.token));
}

// q, k and g.
template <class V>
__device__ inline void load_inputs(const Block<V>& b) {
  constexpr int K = V::K, C = kSlice;
  const Job& p = b.p;
  auto& to = b.s.inputs;
  if (p.l2norm) {
    const std::int64_t row = ((b.c.row * p.tokens + b.c.token) * p.heads + b.h) * K + b.slice * C;
    load_tile<8>(b, to.q, p.q_norm + row, p.heads * K);
    load_tile<8>(b, to.k, p.k_norm + row, p.heads * K);
  } else {
    load_tile<8>(b, to.q, row_of(p.q, b.c.row, b.c.token, b.h) + b.slice * C, static_cast<int>(p.q.token));
    load_tile<8>(b, to.k, row_of(p.k, b.c.row, b.c.token, b.h) + b.slice * C, static_cast<int>(p.k.token));
  }
  if (p.g.bf16) {
    load_tile<8>(b, to.g, static_cast<const bf16*>(p.g.data) + b.gate_row, static_cast<int>(p.g.token));
  } else {
    load_rows<16>(b, to.g, static_cast<const float*>(p.g.data) + b.gate_row, 4 * static_cast<int>(p.g.token),
                  256, [](int row, int piece) { return row * 256 + ((piece ^ (row & 6)) << 4); });
  }
}

// v of this warp's 8 tokens, 64 columns, for D . v.
template <class V>
__device__ inline void load_v(const Block<V>& b, std::uint32_t (&v)[8]) {
  const int token = 8 * b.warp + b.group;
  const bf16* from = row_of(b.p.v, b.c.row, b.c.token + token, b.hv) + 64 * b.slice + 2 * b.member;
#pragma unroll
  for (int x = 0; x < 8; ++x) v[x] = load32(from + 8 * x, token < b.c.length);
}

// True if this thread's token has a beta too small to divide by.
template <class V>
__device__ inline bool load_beta(const Block<V>& b) {
  if (b.tid >= 64) return false;
  const Job& p = b.p;
  const bool valid = b.tid < b.c.length;
  const float beta =
      valid ? beta_value(p, load_real(p.beta, index_of(p.beta, b.c.row, b.c.token + b.tid, b.hv))) : 0.f;
  b.s.beta[b.tid] = beta;
  return valid && fabsf(beta) < kFaint;
}

}  // namespace rlk::cuda::kda::gradients
