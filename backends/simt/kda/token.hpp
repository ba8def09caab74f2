// One token of a sequence and value head as the recurrence sees it, for the kernels that decode.
#pragma once

#include "arithmetic/kda/chunk.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::kda {

using namespace rlk::kda;

inline constexpr int kThreads = 256;

// One token's vectors in shared memory.
struct SharedToken {
  alignas(16) float q[256], k[256], write_k[256], decay[256];
  float v[256];
  float sums[32], norm[2];
};

// A token as memory has it, a channel a thread.
struct TokenBits {
  std::uint32_t q = 0, k = 0, g = 0, v = 0, beta = 0;
  float a_log = 0, bias = 0;
};
__device__ __forceinline__ TokenBits fetch_token(const Problem& p, std::int64_t b, int hv, int thread) {
  TokenBits x;
  const int h = hv / p.group();
  if (thread < p.k_dim) {
    x.q = load_bits(p.q.data, p.q.type, at(p.q, b, 0, h) + thread);
    x.k = load_bits(p.k.data, p.k.type, at(p.k, b, 0, h) + thread);
    x.g = load_bits(p.g.data, p.g.type, at(p.g, b, 0, hv) + thread);
    if (p.gate != Gate::none && p.dt_bias) x.bias = p.dt_bias[std::int64_t(hv) * p.k_dim + thread];
  }
  if (thread < p.v_dim) x.v = load_bits(p.v.data, p.v.type, at(p.v, b, 0, hv) + thread);
  x.beta = load_bits(p.beta.data, p.beta.type, at(p.beta, b, 0, hv));
  if (p.gate != Gate::none && p.a_log) x.a_log = p.a_log[hv];
  return x;
}

// `t` is filled by kThreads threads, `thread` among them, and may be read when this returns; `sync` is a barrier of these.
template <class Sync>
__device__ inline void read_token(const Problem& p, const TokenBits& x, SharedToken& t, int thread,
                                  Sync sync) {
  const int K = p.k_dim;
  GateParameters<float> gate{p.gate, 1, x.bias, float(p.lower_bound)};
  if (p.gate != Gate::none && p.a_log) gate.rate = simt::exp<float>(x.a_log);
  float q = from_bits(p.q.type, x.q), k = from_bits(p.k.type, x.k);
  t.v[thread] = from_bits(p.v.type, x.v);
  if (p.l2norm) {
    t.q[thread] = q;
    t.k[thread] = k;
    sync();
    if (thread < 32) {
      const float* row = thread < 16 ? t.q : t.k;
      float sum = 0;
      for (int d = thread % 16; d < chunked::padded(K); d += 16) sum = simt::fused(row[d], row[d], sum);
      t.sums[thread] = sum;
    }
    sync();
    if (thread < 2) {
      float sum = 0;
      for (int l = 0; l < 16; ++l) sum += t.sums[thread * 16 + l];
      t.norm[thread] = 1.0f / simt::root(sum + float(kNormEps));
    }
    sync();
    q = round_to(p.q.type, q * t.norm[0]);
    k = round_to(p.k.type, k * t.norm[1]);
  }
  if (thread < K) {
    const float beta = write_strength<float>(p, from_bits(p.beta.type, x.beta));
    t.q[thread] = q * float(p.scale);
    t.k[thread] = k;
    t.write_k[thread] = beta * k;
    t.decay[thread] = chunked::flushed(simt::exp<float>(gate.value(from_bits(p.g.type, x.g))));
  } else {
    t.q[thread] = t.k[thread] = t.write_k[thread] = t.decay[thread] = 0;
  }
  sync();
}
// Threads are (32, 8).
__device__ inline void read_token(const Problem& p, std::int64_t b, int hv, SharedToken& t) {
  const int thread = int(threadIdx.y) * 32 + int(threadIdx.x);
  read_token(p, fetch_token(p, b, hv, thread), t, thread, [] { __syncthreads(); });
}

}  // namespace rlk::simt::kda
