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

// Threads are (32, 8); `t` is filled by all of them and may be read when this returns.
__device__ inline void read_token(const Problem& p, std::int64_t b, int hv, SharedToken& t) {
  const int thread = int(threadIdx.y) * 32 + int(threadIdx.x), K = p.k_dim, h = hv / p.group();
  std::uint32_t q_bits = 0, k_bits = 0, g_bits = 0, v_bits = 0;
  if (thread < K) {
    q_bits = load_bits(p.q.data, p.q.type, at(p.q, b, 0, h) + thread);
    k_bits = load_bits(p.k.data, p.k.type, at(p.k, b, 0, h) + thread);
    g_bits = load_bits(p.g.data, p.g.type, at(p.g, b, 0, hv) + thread);
  }
  if (thread < p.v_dim) v_bits = load_bits(p.v.data, p.v.type, at(p.v, b, 0, hv) + thread);
  const std::uint32_t beta_bits = load_bits(p.beta.data, p.beta.type, at(p.beta, b, 0, hv));
  const GateParameters<float> gate = gate_parameters<float>(p, hv, thread < K ? thread : 0);
  float q = from_bits(p.q.type, q_bits), k = from_bits(p.k.type, k_bits);
  t.v[thread] = from_bits(p.v.type, v_bits);
  if (p.l2norm) {
    t.q[thread] = q;
    t.k[thread] = k;
    __syncthreads();
    if (thread < 32) {
      const float* x = thread < 16 ? t.q : t.k;
      float sum = 0;
      for (int d = thread % 16; d < chunked::padded(K); d += 16) sum = simt::fused(x[d], x[d], sum);
      t.sums[thread] = sum;
    }
    __syncthreads();
    if (thread < 2) {
      float sum = 0;
      for (int l = 0; l < 16; ++l) sum += t.sums[thread * 16 + l];
      t.norm[thread] = 1.0f / simt::root(sum + float(kNormEps));
    }
    __syncthreads();
    q = round_to(p.q.type, q * t.norm[0]);
    k = round_to(p.k.type, k * t.norm[1]);
  }
  if (thread < K) {
    const float beta = write_strength<float>(p, from_bits(p.beta.type, beta_bits));
    t.q[thread] = q * float(p.scale);
    t.k[thread] = k;
    t.write_k[thread] = beta * k;
    t.decay[thread] = chunked::flushed(simt::exp<float>(gate.value(from_bits(p.g.type, g_bits))));
  } else {
    t.q[thread] = t.k[thread] = t.write_k[thread] = t.decay[thread] = 0;
  }
  __syncthreads();
}

}  // namespace rlk::simt::kda
