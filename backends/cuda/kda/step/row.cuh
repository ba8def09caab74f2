// A row of the open chunk from its token, by the eight warps that compute.
#pragma once

#include "cuda/kda/step/block.cuh"

namespace rlk::cuda::kda::step {

// Asks for what does not come through the ring: rows of A by the low half, decayed keys of earlier blocks by the high one. Not
// of a row that begins a chunk, nor of a row that is none.
__device__ inline void ask_for(const Row& r, Shared& s, const Here& h) {
  if (h.low) {
    const int j = h.half % 16 * 4;  // column
    for (int m = h.half / 16; m < r.i; m += kHalf / 16)
      if (j <= m) copy16(&s.A[m][j], r.c.A + m * kRows + j, 16);
  } else {
    const int m = h.half % 4 * 4;  // row of a block
    for (int b = 0; b < r.block(); ++b) {
      const float* from = r.c.tail + b * kBlock + m;
      for (int d = h.half / 4; d < kDim; d += kHalf / 4)
        copy16(&s.keys[b][(d ^ (b & 1)) * kBlock + m], from + d * kRows, 16);
    }
    if (h.half < 32 * (r.block() - 1))
      copy16(&s.whole[h.half / 32][h.half % 32 * 4], r.c.whole + kDim + h.half * 4, 16);
  }
  copy_commit();
}

// Low half, a thread a channel: the decays of the row and what they multiply. `from_start` is the decay before the block.
__device__ inline void decay_row(const Row& r, Shared& s, const float* key, const float* decay, const Here& h,
                                 float from_start) {
  const int d = h.half;
  float e[kBlock], in_block = 1;
#pragma unroll
  for (int m = 0; m < kBlock; ++m) e[m] = m < r.own() ? decay[m * kDim + d] : s.token.decay[d];
#pragma unroll
  for (int m = 0; m < kBlock; ++m) {
    if (m > r.own()) break;
    from_start = flushed(mul_rn(from_start, e[m]));
    in_block = m == 0 ? e[m] : flushed(mul_rn(in_block, e[m]));
  }
  if (r.own() == kBlock - 1 && r.i + 1 < kRows) end_block(r, s, key, e, d, from_start, in_block);
  s.k_start[d] = -mul_rn(s.token.k[d], from_start);
  s.q_start[d] = mul_rn(s.token.q[d], from_start);
  s.k_block[d] = mul_rn(s.token.k[d], in_block);
  s.q_block[d] = mul_rn(s.token.q[d], in_block);
}

// High half, a thread a channel: the keys of the row's block, decayed to it.
__device__ inline void decay_block(const Row& r, Shared& s, const float* key, const float* decay,
                                   const Here& h) {
  const int d = h.half, b = r.block();
  float k[kBlock], e[kBlock];
#pragma unroll
  for (int m = 0; m < kBlock; ++m) {
    k[m] = m < r.own() ? key[m * kDim + d] : s.token.k[d];
    e[m] = m < r.own() ? decay[m * kDim + d] : s.token.decay[d];
  }
#pragma unroll
  for (int m = 1; m < kBlock; ++m) {
    if (m > r.own()) break;
#pragma unroll
    for (int j = 0; j < m; ++j) k[j] = mul_rn(k[j], e[m]);
  }
  write(&s.keys[b][(d ^ (b & 1)) * kBlock], k);
}

// A column of M and P, whose keys are decayed over `Between` blocks from the first of the warp's columns to the row's block,
// and over `mine` of these from its own. keys[0] and keys[1] are those of even and odd channels.
struct Pair {
  float M = 0, P = 0;
  template <int Between>
  __device__ __forceinline__ void add(const float* with_k, const float* with_q, const float* const (&keys)[2],
                                      const float* whole, int mine) {
    constexpr int kAsk = 8;
#pragma unroll 2
    for (int d = 0; d < kDim; d += kAsk) {
      float key[kAsk], k[kAsk], q[kAsk];
#pragma unroll
      for (int a = 0; a < kAsk; ++a) key[a] = keys[a % 2][(d + a) * kBlock];
      read(with_k + d, k), read(with_q + d, q);
#pragma unroll
      for (int b = 0; b < Between; ++b) {
        float over[kAsk];
        read(whole + b * kDim + d, over);
#pragma unroll
        for (int a = 0; a < kAsk; ++a) key[a] = mul_rn(key[a], Between - b <= mine ? over[a] : 1.0f);
      }
#pragma unroll
      for (int a = 0; a < kAsk; ++a) M = fused(k[a], key[a], M), P = fused(q[a], key[a], P);
    }
  }
};

// High half's first threads, a column of M and P each.
__device__ inline void pair_column(const Row& r, Shared& s, float beta, const Here& h) {
  const int j = h.half, block = j / kBlock, mine = r.block(), odd = block & 1;
  if (j >= kRows || j / 32 * 32 > r.i) return;
  const float *k = block == mine ? s.token.k : s.k_block, *q = block == mine ? s.token.q : s.q_block;
  const float* const keys[2] = {s.keys[block] + j % kBlock + odd * kBlock,
                                s.keys[block] + j % kBlock - odd * kBlock};
  const float* whole = s.whole[0];
  const int between = mine - 1 - j / 32 * 2, own = mine - 1 - block;
  Pair pair;
  if (between == 2) {
    pair.add<2>(k, q, keys, whole, own);
  } else if (between == 1) {
    pair.add<1>(k, q, keys, whole, own);
  } else {
    pair.add<0>(k, q, keys, whole, own);
  }
  if (j > r.i) return;
  s.P[j] = pair.P;
  s.to_A[j] = 0.0f - mul_rn(beta, pair.M);
}

// Low half, a thread a column of V: x and (s q eg) S. Returns y.
__device__ inline float state_column(Shared& s, unsigned piece, float beta, const Here& h) {
  constexpr int kAsk = 8;
  float x = s.token.v[h.half], o = 0;
#pragma unroll 1
  for (int first = 0; first < kDim; first += kBlock, ++piece) {
    const float* state = wait_for(s, piece) + h.half;
#pragma unroll
    for (int d = 0; d < kBlock; d += kAsk) {
      float S[kAsk], k[kAsk], q[kAsk];
#pragma unroll
      for (int a = 0; a < kAsk; ++a) S[a] = state[(d + a) * kDim];
      read(s.k_start + first + d, k), read(s.q_start + first + d, q);
#pragma unroll
      for (int a = 0; a < kAsk; ++a) x = fused(k[a], S[a], x), o = fused(q[a], S[a], o);
    }
    release(s, piece);
  }
  s.o[h.half] = o;
  return mul_rn(x, beta);
}

// Low half's first threads: column j of row i of A.
__device__ inline void inverse_column(const Row& r, Shared& s, const Here& h) {
  constexpr int kAsk = 16;
  const int j = h.half;
  if (j >= kRows) return;
  float sum = j == r.i ? 1.0f : 0.0f;
  for (int first = j / 32 * 32; first < r.i; first += kAsk) {
    float A[kAsk], with[kAsk];
    read(s.to_A + first, with);
#pragma unroll
    for (int a = 0; a < kAsk; ++a) A[a] = s.A[first + a][j];
#pragma unroll
    for (int a = 0; a < kAsk; ++a)
      if (first + a >= j && first + a < r.i) sum = fused(with[a], A[a], sum);
  }
  s.row[j] = sum;
  if (j < ::rlk::kda::chunked::padded(r.i + 1)) r.c.A[r.i * kRows + j] = sum;
}

// A column's sum over the rows before the row, with the factors `with`; every second piece from `piece` on has rows.
__device__ inline float sum_rows(const Row& r, Shared& s, unsigned piece, const float* with, float sum,
                                 const Here& h) {
#pragma unroll 1
  for (int first = 0; first < r.i; first += kBlock, piece += 2) {
    const float* rows = wait_for(s, piece) + h.half;
    const int count = r.i - first;
    float number[kBlock], factor[kBlock];
    read(with + first, factor);
#pragma unroll
    for (int m = 0; m < kBlock; ++m) number[m] = rows[m * kDim];
#pragma unroll
    for (int m = 0; m < kBlock; ++m)
      if (m < count) sum = fused(factor[m], number[m], sum);
    release(s, piece);
  }
  return sum;
}

// One token of a sequence and value head. `piece` is the first of the row's, and then the first of the next one's.
__device__ inline void step_row(const Step& p, const Row& r, const simt::kda::TokenBits& token, Shared& s,
                                unsigned& piece, const Here& h) {
  const Pieces at(piece, r);
  piece = at.end;
  const float before = h.low && r.first() > 0 ? r.c.start[r.block() * kDim + h.half] : 1.0f;
  const float beta = ::rlk::kda::write_strength<float>(p, ::rlk::kda::from_bits(p.beta.type, token.beta));
  simt::kda::read_token(p, token, s.token, h.thread, sync_consumers);
  const float *key = nullptr, *decay = nullptr;
  if (r.own() > 0) key = wait_for(s, at.block), decay = wait_for(s, at.block + 1);
  if (h.low) {
    decay_row(r, s, key, decay, h, before);
  } else {
    decay_block(r, s, key, decay, h);
  }
  copy_wait<0>();
  sync_consumers();
  if (r.own() > 0) release(s, h.low ? at.block : at.block + 1);  // both halves read both
  float sum = 0;
  if (h.low) {
    sum = state_column(s, at.state, beta, h);
  } else {
    pair_column(r, s, beta, h);
  }
  sync_consumers();
  if (h.low) inverse_column(r, s, h);
  sync_half(h.low);
  if (h.low) {
    const float n = fused(s.row[r.i], sum, sum_rows(r, s, at.rows + 1, s.row, 0.0f, h));
    s.n[h.half] = n;
    r.c.y[r.i * kDim + h.half] = sum;
    r.c.n[r.i * kDim + h.half] = n;
  } else {
    sum = sum_rows(r, s, at.rows, s.P, s.o[h.half], h);
    r.c.k[r.i * kDim + h.half] = s.token.k[h.half];
    r.c.decay[r.i * kDim + h.half] = s.token.decay[h.half];
  }
  sync_consumers();
  if (!h.low)
    ::rlk::kda::store(p.out.data, p.out.type, ::rlk::kda::at(p.out, r.n, 0, r.hv) + h.half,
                      fused(s.P[r.i], s.n[h.half], sum));
}

// What the eight warps do.
__device__ inline void consume(const Step& p, Shared& s, int task, int step, const Here& h) {
  const int tasks = static_cast<int>(p.sequences * p.value_heads);
  unsigned piece = 0;
  std::int64_t rows = p.cached(Row(p, task).n);
  for (; task < tasks; task += step) {
    Row r(p, task);
    const simt::kda::TokenBits token = simt::kda::fetch_token(p, r.n, r.hv, h.thread);
    const std::int64_t next = task + step < tasks ? p.cached(Row(p, task + step).n) : 0;
    if (!fits(rows)) {
      if (h.low)
        ::rlk::kda::store(p.out.data, p.out.type, ::rlk::kda::at(p.out, r.n, 0, r.hv) + h.half,
                          ::rlk::simt::bits_float(0x7fc00000));
    } else {
      r.i = static_cast<int>(rows);
      if (r.i == kRows) {
        close_chunk(r, s, piece, s.keys, s.k_start, &s.closed, h.thread, sync_consumers);
        r.i = 0;
      }
      ask_for(r, s, h);
      step_row(p, r, token, s, piece, h);
    }
    rows = next;
  }
}

}  // namespace rlk::cuda::kda::step
