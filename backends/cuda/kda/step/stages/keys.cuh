// A row of the open chunk from its token: the stage of the keys.
#pragma once

#include "cuda/kda/step/stages/block.cuh"

namespace rlk::cuda::kda::step::stages {

// Asks for what does not come through the ring: rows of A by the low half, decayed keys of earlier blocks by
// the high one. Not of a row that begins a chunk, nor of a row that is none. Rows of A from i to the end of
// its block are zeros.
__device__ inline void ask_for(const Row& r, Shared& s, const Here& h) {
  if (h.low) {
    const int j = h.half % 16 * 4;  // column
    for (int m = h.half / 16; m < (r.i + kBlock - 1) / kBlock * kBlock; m += kHalf / 16)
      if (j <= m) copy16(&s.A[m][j], r.c.A + m * kRows + j, m < r.i ? 16 : 0);
  } else {
    const int m = h.half % 4 * 4;  // row of a block
    for (int b = 0; b < r.block(); ++b) {
      const float* from = r.c.tail + b * kBlock + m;
#pragma unroll
      for (int d = h.half / 4; d < kDim; d += kHalf / 4)
        copy16(&s.keys[b][(d ^ (b & 1)) * kBlock + m], from + d * kRows, 16);
    }
    if (h.half < 32 * (r.block() - 1))
      copy16(&s.whole[h.half / 32][h.half % 32 * 4], r.c.whole + kDim + h.half * 4, 16);
  }
  copy_commit();
}

// Low half, a thread a channel: the decays of the row and what they multiply. `from_start` is the decay
// before the block.
__device__ inline void decay_row(const Row& r, Shared& s, Handed& to, const float* key, const float* decay,
                                 const Here& h, float from_start) {
  const int d = h.half;
  float e[kBlock];
#pragma unroll
  for (int m = 0; m < kBlock; ++m)
    e[m] = m < r.own() ? decay[m * kDim + d] : m == r.own() ? s.token.decay[d] : 1.0f;
  from_start = flushed(mul_rn(from_start, e[0]));
  float in_block = e[0];
  // Ones change nothing, and branches would cost more.
#pragma unroll
  for (int m = 1; m < kBlock; ++m) {
    from_start = flushed(mul_rn(from_start, e[m]));
    in_block = flushed(mul_rn(in_block, e[m]));
  }
  if (r.own() == kBlock - 1 && r.i + 1 < kRows) end_block(r, s, key, e, d, from_start, in_block);
  to.k_start[d] = -mul_rn(s.token.k[d], from_start);
  to.q_start[d] = mul_rn(s.token.q[d], from_start);
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
    e[m] = m < r.own() ? decay[m * kDim + d] : m == r.own() ? s.token.decay[d] : 1.0f;
  }
#pragma unroll
  for (int m = 1; m < kBlock; ++m)
#pragma unroll
    for (int j = 0; j < m; ++j) k[j] = mul_rn(k[j], e[m]);
  write(&s.keys[b][(d ^ (b & 1)) * kBlock], k);
}

// Channels, and rows, of a sum that are on their way from shared memory while as many others are added.
inline constexpr int kAsk = 8;

// What a column of M and P takes of some channels: keys, k and q, and decays over `Between` blocks.
template <int Between>
struct Channels {
  float key[kAsk], k[kAsk], q[kAsk], over[Between + 1][kAsk];
};

// A column of M and P: the sums over channels of k and q with the keys, which are decayed over `Between`
// blocks from the first of the warp's columns to the row's block; columns of the second block have ones for
// the first of these. keys[0] and keys[1] are those of even and odd channels.
struct Pair {
  const float *k, *q, *keys[2], *over[2];
  float M = 0, P = 0;

  template <int Between>
  __device__ __forceinline__ void ask(int d, Channels<Between>& c) const {
#pragma unroll
    for (int a = 0; a < kAsk; ++a) c.key[a] = keys[a % 2][(d + a) * kBlock];
    read(k + d, c.k), read(q + d, c.q);
#pragma unroll
    for (int b = 0; b < Between; ++b) read(over[b] + d, c.over[b]);
  }
  template <int Between>
  __device__ __forceinline__ void add(const Channels<Between>& c) {
#pragma unroll
    for (int a = 0; a < kAsk; ++a) {
      float key = c.key[a];
#pragma unroll
      for (int b = 0; b < Between; ++b) key = mul_rn(key, c.over[b][a]);
      M = fused(c.k[a], key, M), P = fused(c.q[a], key, P);
    }
  }
  template <int Between>
  __device__ __forceinline__ void add_all() {
    Channels<Between> one, other;
    ask(0, one);
#pragma unroll 1
    for (int d = 0; d < kDim; d += 2 * kAsk) {
      ask(d + kAsk, other);
      add(one);
      ask((d + 2 * kAsk) % kDim, one);  // past the end for nothing
      add(other);
    }
  }
};

// Column j of M and P.
__device__ __forceinline__ Pair pair_column(const Row& r, const Shared& s, int j) {
  const int block = j / kBlock, mine = r.block(), odd = block & 1;
  const float* keys = s.keys[block] + j % kBlock;
  Pair pair = {.k = block == mine ? s.token.k : s.k_block,
               .q = block == mine ? s.token.q : s.q_block,
               .keys = {keys + odd * kBlock, keys - odd * kBlock},
               .over = {odd ? s.ones + kBlock : s.whole[0], s.whole[1]}};
  const int between = mine - 1 - j / 32 * 2;
  if (j / 32 * 32 > r.i) return pair;
  if (between == 2) {
    pair.add_all<2>();
  } else if (between == 1) {
    pair.add_all<1>();
  } else {
    pair.add_all<0>();
  }
  return pair;
}

// Column j of row i of A. What lies behind row i, or above the diagonal, is -0 times +0, and -0 changes no
// sum.
__device__ __forceinline__ float inverse_column(const Row& r, const Shared& s, int j) {
  float sum = j == r.i ? 1.0f : 0.0f, one[2][kAsk], other[2][kAsk];
  const auto ask = [&](int first, float(&to)[2][kAsk]) {
    read(s.to_A + first, to[0]);
#pragma unroll
    for (int a = 0; a < kAsk; ++a) to[1][a] = s.A[first + a][j];
  };
  const auto add = [&](const float(&from)[2][kAsk]) {
#pragma unroll
    for (int a = 0; a < kAsk; ++a) sum = fused(from[0][a], from[1][a], sum);
  };
  ask(j / 32 * 32, one);
#pragma unroll 1
  for (int first = j / 32 * 32; first < r.i; first += kBlock) {
    ask(first + kAsk, other);
    add(one);
    ask((first + kBlock) % kRows, one);  // past the end for nothing
    add(other);
  }
  return sum;
}

// The token and what is decayed. `piece` is the first of the row's, and then the first of the next one's.
__device__ inline void read_row(const Step& p, const Row& r, const simt::kda::TokenBits& token, Shared& s,
                                Handed& to, int parity, unsigned& piece, const Here& h) {
  const float before = h.low && r.first() > 0 ? r.c.start[r.block() * kDim + h.half] : 1.0f;
  simt::kda::read_token(p, token, s.token, h.thread, sync_keys);
  const float *key = nullptr, *decay = nullptr;
  if (r.own() > 0) key = wait_for(s.own, piece), decay = wait_for(s.own, piece + 1);
  barrier_wait(&to.taken, parity ^ 1);
  if (h.low) {
    decay_row(r, s, to, key, decay, h, before);
    arrive_warp(&to.started);
  } else {
    decay_block(r, s, key, decay, h);
  }
  copy_wait<0>();
  sync_keys();
  if (r.own() > 0) release(s.own, h.low ? piece : piece + 1), piece += 2;  // both halves read both
}

// Column j of M, P and row i of A. The makers are the low half's last two warps, which share their quarters
// of the multiprocessor with no column.
__device__ __forceinline__ bool makes(const Here& h) { return h.low && h.half >= kRows; }
__device__ inline void make_row(const Step& p, const Row& r, std::uint32_t beta_bits, Shared& s, Handed& to,
                                int j) {
  const Pair pair = pair_column(r, s, j);
  const float beta = ::rlk::kda::write_strength<float>(p, ::rlk::kda::from_bits(p.beta.type, beta_bits));
  s.to_A[j] = j < r.i ? 0.0f - mul_rn(beta, pair.M) : -0.0f;
  to.P[j] = pair.P;
  sync_makers();
  const float A = inverse_column(r, s, j);
  to.row[j] = A;
  arrive_warp(&to.complete);
  if (j < ::rlk::kda::chunked::padded(r.i + 1)) r.c.A[r.i * kRows + j] = A;
}

// Where a channel of a task's token is.
struct TokenAt {
  const char *rows, *q, *k, *g, *beta;
  const float *a_log, *bias;  // null where the gate has none

  __device__ TokenAt(const Step& p, const Row& r, int d) {
    const int head = r.hv / p.group();
    const bool gated = p.gate != ::rlk::kda::Gate::none;
    rows = rows_at(p, r);
    q = channel_at(p.q, r.n, head, d), k = channel_at(p.k, r.n, head, d);
    g = channel_at(p.g, r.n, r.hv, d), beta = channel_at(p.beta, r.n, r.hv, 0);
    a_log = gated && p.a_log ? p.a_log + r.hv : nullptr;
    bias = gated && p.dt_bias ? p.dt_bias + (r.hv * kDim + d) : nullptr;
  }
};
// What it holds.
struct Fetched {
  Rows rows;
  Bits q, k, g, beta;
  float a_log = 0, bias = 0;

  __device__ Fetched(const Step& p, const TokenAt& at)
      : rows(at.rows, p.wide_rows),
        q(at.q, p.q.type),
        k(at.k, p.k.type),
        g(at.g, p.g.type),
        beta(at.beta, p.beta.type) {
    if (at.a_log) a_log = *at.a_log;
    if (at.bias) bias = *at.bias;
  }
  __device__ simt::kda::TokenBits token() const {
    simt::kda::TokenBits x;
    x.q = q.value(), x.k = k.value(), x.g = g.value(), x.beta = beta.value();
    x.a_log = a_log, x.bias = bias;
    return x;
  }
};

// The first task's token; what needs no other kernel's results comes before.
__device__ __forceinline__ Fetched fetch_first(const Step& p, Shared& s, Row& r, const Here& h) {
  TokenAt at(p, r, h.half);
  settle(at.rows), settle(at.q), settle(at.k), settle(at.g), settle(at.beta), settle(at.a_log),
      settle(at.bias);
  settle(r.c.k);
  if (h.low) s.ones[kBlock + h.half] = 1;
  for (int i = h.thread; i < kRows * kRows; i += kKeyThreads)
    if (i % kRows / 4 * 4 > i / kRows) s.A[i / kRows][i % kRows] = 0;
  begin_reading();
  return {p, at};
}

// What the keys' warps do. While a row is made, those that do not make it look at the task behind it.
__device__ inline void consume_keys(const Step& p, Shared& s, int task, int step, const Here& h) {
  const int tasks = static_cast<int>(p.sequences * p.value_heads);
  unsigned piece = 0, turn = 0;
  Row later(p, task);
  Fetched next = fetch_first(p, s, later, h);
  for (; task < tasks; task += step) {
    const Fetched fetched = next;
    const unsigned rows = fetched.rows.value();
    const simt::kda::TokenBits token = fetched.token();
    Row r = later;
    Handed& to = s.handed[turn % 2];
    if (fits(rows)) {
      if (rows == kRows) close_chunk(r, s.own, piece, s.keys, s.k_block, &s.closed, h.thread, sync_keys);
      r.i = static_cast<int>(rows % kRows);
      ask_for(r, s, h);
      read_row(p, r, token, s, to, turn++ / 2 & 1, piece, h);
    }
    const bool more = task + step < tasks;
    if (more) later = Row(p, task + step), next = Fetched(p, TokenAt(p, later, h.half));
    if (fits(rows) && makes(h)) make_row(p, r, token.beta, s, to, h.half - kRows);
    if (fits(rows) && !h.low) {
      r.c.k[r.i * kDim + h.half] = s.token.k[h.half];
      r.c.decay[r.i * kDim + h.half] = s.token.decay[h.half];
    }
    sync_keys();
  }
}

}  // namespace rlk::cuda::kda::step::stages
