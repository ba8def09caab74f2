// kda_step where every sequence has one token and its state is [K, V]: what a sampler calls at each token. A block has one
// (sequence, value head). The chains are those of arithmetic/kda/step.hpp; here they run beside each other:
//
//   decays       a thread a channel: the row's own decays, and the keys of its 16-row block decayed to it, into shared memory;
//                the other half of the block brings the rows of A
//   products     a thread a column of V: x and (s q eg) S, the state read once; a thread a column j: M_ij and P_ij
//   rows         a thread a column j: row i of A
//   sums         a thread a column of V: n_i, and in the other half of the block P_i n as far as row i - 1
//
// Of a state and a cache in memory it reads 4 K V bytes and, on average over a chunk, 57 kB at K = V = 128. So many loads are
// asked for at once that three blocks on a multiprocessor are enough.
#pragma once

#include "arithmetic/kda/step.hpp"
#include "simt/kda/team.hpp"
#include "simt/kda/token.hpp"

namespace rlk::simt::kda {

inline constexpr int kHalfBlock = kThreads / 2;
// Loads of a chain that are asked for before the first is used.
inline constexpr int kAsk = 32;

struct SharedRow {
  alignas(16) float k_start[kHalfBlock], q_start[kHalfBlock], k_block[kHalfBlock], q_block[kHalfBlock];
  float own[chunked::kBlock][kHalfBlock + 1];                 // keys of the row's block, decayed to the row
  float whole[chunked::kRows / chunked::kBlock][kHalfBlock];  // the decay over a block
  float A[chunked::kRows][chunked::kRows];
  float to_A[chunked::kRows], P[chunked::kRows], row[chunked::kRows];  // -beta M, P, row i of A
  float o[kHalfBlock], n[kHalfBlock];
};

// use(at, load(at)) for at = 0 .. count - 1, kAsk loads on their way at once; `change(from, some)` sees them before they are used.
template <class Load, class Change, class Use>
__device__ __forceinline__ void stream(int count, Load load, Change change, Use use) {
  for (int from = 0; from < count; from += kAsk) {
    float some[kAsk];
#pragma unroll
    for (int a = 0; a < kAsk; ++a) some[a] = from + a < count ? load(from + a) : 0.0f;
    change(from, some);
#pragma unroll
    for (int a = 0; a < kAsk; ++a)
      if (from + a < count) use(from + a, some[a]);
  }
}
template <class Load, class Use>
__device__ __forceinline__ void stream(int count, Load load, Use use) {
  stream(count, load, [](int, float(&)[kAsk]) {}, use);
}

// A row's place in its chunk, and what it finds there.
struct OpenRow {
  chunked::OpenChunk c;
  float* state;
  int K, V, i, first;  // the row, and the first of its block
};

// Asks for rows of `floats` neighbours each, `step` apart, to be on their way to the cache that all blocks share.
__device__ __forceinline__ void ask_for(const float* from, int rows, int floats, int step, int thread) {
  constexpr int kLine = 32;
  const int lines = (floats + kLine - 1) / kLine;
  for (int at = thread; at < rows * lines; at += kThreads) {
    [[maybe_unused]] const float* line = from + at / lines * step + at % lines * kLine;
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
  }
}
__device__ __forceinline__ void ask_for_row(const OpenRow& r, int thread) {
  const int own = r.i - r.first;
  ask_for(r.c.k + r.first * r.K, 1, own * r.K, 0, thread);
  ask_for(r.c.decay + r.first * r.K, 1, own * r.K, 0, thread);
  ask_for(r.c.tail, r.K, r.first, r.c.C, thread);
  ask_for(r.c.A, 1, r.i * r.c.C, 0, thread);
  ask_for(r.c.y, 1, r.i * r.V, 0, thread);
  ask_for(r.c.n, 1, r.i * r.V, 0, thread);
}

// What later blocks need of channel d of a block whose last row this is.
__device__ __forceinline__ void end_block(const OpenRow& r, int d, const float (&k)[chunked::kBlock],
                                          const float (&e)[chunked::kBlock], float from_start,
                                          float in_block) {
  const int block = r.first / chunked::kBlock;
  r.c.start[(block + 1) * r.K + d] = from_start;
  r.c.whole[block * r.K + d] = in_block;
  float tail[chunked::kBlock], to_bound = 1;
#pragma unroll
  for (int m = chunked::kBlock - 1; m >= 0; --m) {
    tail[m] = mul_rn(k[m], to_bound);
    to_bound = chunked::flushed(mul_rn(to_bound, e[m]));
  }
  auto* to = reinterpret_cast<float4*>(r.c.tail + d * r.c.C + r.first);
#pragma unroll
  for (int m = 0; m < chunked::kBlock; m += 4)
    to[m / 4] = make_float4(tail[m], tail[m + 1], tail[m + 2], tail[m + 3]);
}

// Decays of the row and what they multiply; the row's key and decay into the cache.
__device__ __forceinline__ void decay_channel(const OpenRow& r, const SharedToken& t, SharedRow& s, int d) {
  using chunked::flushed;
  using chunked::kBlock;
  const int K = r.K, rows = r.i - r.first;
  float k[kBlock], e[kBlock], from_start = 1;
#pragma unroll
  for (int m = 0; m < kBlock; ++m) {
    k[m] = m < rows ? r.c.k[(r.first + m) * K + d] : t.k[d];
    e[m] = m < rows ? r.c.decay[(r.first + m) * K + d] : t.decay[d];
  }
  if (r.first > 0) from_start = r.c.start[r.first / kBlock * K + d];
  float in_block = 1;
#pragma unroll
  for (int m = 0; m < kBlock; ++m) {
    if (m > rows) break;
    from_start = flushed(mul_rn(from_start, e[m]));
    in_block = m == 0 ? e[m] : flushed(mul_rn(in_block, e[m]));
  }
  if (rows == kBlock - 1 && r.i + 1 < r.c.C) end_block(r, d, k, e, from_start, in_block);
#pragma unroll
  for (int m = 1; m < kBlock; ++m) {
    if (m > rows) break;
#pragma unroll
    for (int j = 0; j < m; ++j) k[j] = mul_rn(k[j], e[m]);
  }
#pragma unroll
  for (int m = 0; m < kBlock; ++m)
    if (m <= rows) s.own[m][d] = k[m];
  r.c.k[r.i * K + d] = t.k[d];
  r.c.decay[r.i * K + d] = t.decay[d];
  s.k_start[d] = -mul_rn(t.k[d], from_start);
  s.q_start[d] = mul_rn(t.q[d], from_start);
  s.k_block[d] = mul_rn(t.k[d], in_block);
  s.q_block[d] = mul_rn(t.q[d], in_block);
}

// Rows of A and the decays over blocks, brought by the threads of half a block.
__device__ __forceinline__ void bring_rows(const OpenRow& r, SharedRow& s, int thread) {
  constexpr int kPacks = chunked::kRows / 4, kTurns = chunked::kRows * kPacks / kHalfBlock;
  const int j = thread % kPacks * 4;
  float4 some[kTurns];
#pragma unroll
  for (int a = 0; a < kTurns; ++a) {
    const int m = a * (kHalfBlock / kPacks) + thread / kPacks;
    some[a] =
        m < r.i && j <= m ? *reinterpret_cast<const float4*>(r.c.A + m * r.c.C + j) : make_float4(0, 0, 0, 0);
  }
#pragma unroll
  for (int a = 0; a < kTurns; ++a)
    *reinterpret_cast<float4*>(&s.A[a * (kHalfBlock / kPacks) + thread / kPacks][j]) = some[a];
  if (thread < r.K)
    for (int b = 1; b < r.i / chunked::kBlock; ++b) s.whole[b][thread] = r.c.whole[b * r.K + thread];
}

// Column j of row i of M, without beta, and of P.
__device__ __forceinline__ void pair_column(const OpenRow& r, const SharedToken& t, SharedRow& s, float beta,
                                            int j) {
  float M = 0, P = 0;
  if (j >= r.first) {
    const float* keys = s.own[j - r.first];
    stream(
        r.K, [&](int d) { return keys[d]; },
        [&](int d, float key) {
          M = fused(t.k[d], key, M);
          P = fused(t.q[d], key, P);
        });
  } else {
    const float* keys = r.c.tail + j;
    stream(
        r.K, [&](int d) { return keys[d * r.c.C]; },
        [&](int from, float(&key)[kAsk]) {
          for (int b = j / chunked::kBlock + 1; b < r.i / chunked::kBlock; ++b)
#pragma unroll
            for (int a = 0; a < kAsk; ++a) key[a] = mul_rn(key[a], s.whole[b][from + a]);
        },
        [&](int d, float key) {
          M = fused(s.k_block[d], key, M);
          P = fused(s.q_block[d], key, P);
        });
  }
  s.to_A[j] = 0.0f - mul_rn(beta, M);
  s.P[j] = P;
}

// Column j of row i of A.
__device__ __forceinline__ void inverse_column(const OpenRow& r, SharedRow& s, int j) {
  float row = j == r.i ? 1.0f : 0.0f;
  for (int m = j; m < r.i; ++m) row = fused(s.to_A[m], s.A[m][j], row);
  s.row[j] = row;
  r.c.A[r.i * r.c.C + j] = row;
}

// The row from its token; threads are (32, 8).
__device__ inline void step_row(const Step& p, const OpenRow& r, const SharedToken& t, SharedRow& s,
                                float beta, int thread, std::int64_t out) {
  const int V = r.V, i = r.i, column = thread % kHalfBlock;
  const bool low = thread < kHalfBlock, inside = column < V;
  if (low) {
    if (column < r.K) decay_channel(r, t, s, column);
  } else {
    bring_rows(r, s, column);
  }
  __syncthreads();
  float x = 0, y = 0, o = 0;
  if (low && inside) {
    x = t.v[column];
    stream(
        r.K, [&](int d) { return r.state[d * V + column]; },
        [&](int d, float S) {
          x = fused(s.k_start[d], S, x);
          o = fused(s.q_start[d], S, o);
        });
    y = mul_rn(x, beta);
    s.o[column] = o;
    r.c.y[i * V + column] = y;
  } else if (!low && column <= i) {
    pair_column(r, t, s, beta, column);
  }
  __syncthreads();
  if (!low && column < chunked::padded(i + 1)) inverse_column(r, s, column);
  __syncthreads();
  const float* rows = low ? r.c.y : r.c.n;
  const float* with = low ? s.row : s.P;
  float sum = low || !inside ? 0.0f : s.o[column];
  if (inside)
    stream(
        i, [&](int m) { return rows[m * V + column]; },
        [&](int m, float number) { sum = fused(with[m], number, sum); });
  if (low && inside) {
    sum = fused(with[i], y, sum);
    s.n[column] = sum;
    r.c.n[i * V + column] = sum;
  }
  __syncthreads();
  if (!low && inside) store(p.out.data, p.out.type, out + column, fused(with[i], s.n[column], sum));
}

// The state after a full chunk, as many channels at a time as shared memory holds keys of.
__device__ inline void close_chunk(BlockTeam& team, const OpenRow& r, SharedRow& s) {
  constexpr int kChannels = chunked::kRows;
  float *k_end = &s.A[0][0], *total = s.k_start;
  for (int first = 0; first < r.K; first += kChannels) {
    const int channels = r.K - first < kChannels ? r.K - first : kChannels;
    team.lanes(channels, [=](int d) {
      chunked::end_channel<BlockTeam>(r.c, r.K, first + d, total + d, k_end + d, kChannels);
    });
    team.sync();
    float* state = r.state + first * r.V;
    team.gemm<chunked::Init::scale, chunked::Span::full>(
        {channels, r.V, r.c.C, k_end, 1, kChannels, r.c.n, r.V, state, r.V, state, total});
    team.sync();
  }
}

__global__ void __launch_bounds__(kThreads, 3) step_token(Step p) {
  __shared__ SharedToken t;
  __shared__ SharedRow s;
  BlockTeam team;
  const int thread = team.thread = int(threadIdx.y) * 32 + int(threadIdx.x);
  team.threads = kThreads;
  const std::int64_t n = blockIdx.x / unsigned(p.value_heads);
  const int hv = int(blockIdx.x % unsigned(p.value_heads));
  const std::int64_t out = at(p.out, n, 0, hv), cached = p.cached(n);
  if (!p.fits(n)) {
    if (thread < p.v_dim) store(p.out.data, p.out.type, out + thread, bits_float(0x7fc00000));
    return;
  }
  OpenRow r{
      chunked::OpenChunk(p.layout, static_cast<float*>(p.cache.data) + n * p.cache.row + hv * p.cache.head),
      static_cast<float*>(p.initial.data) + n * p.initial.row + hv * p.initial.head,
      p.k_dim,
      p.v_dim,
      int(cached),
      0};
  ask_for(r.state, 1, r.K * r.V, 0, thread);
  if (cached == p.chunk) {
    close_chunk(team, r, s);
    r.i = 0;
  }
  r.first = r.i - r.i % chunked::kBlock;
  ask_for_row(r, thread);
  const float beta = write_strength<float>(p, load(p.beta.data, p.beta.type, at(p.beta, n, 0, hv)));
  read_token(p, n, hv, t);
  step_row(p, r, t, s, beta, thread, out);
}

// Whether a call is what step_token is for.
inline bool one_token(const Step& p) {
  return p.cache && !p.cu_seqlens && p.tokens == 1 && chunked::is_plain(p.initial, p) &&
         p.k_dim <= kHalfBlock && p.v_dim <= kHalfBlock;
}

}  // namespace rlk::simt::kda
