// The gradients kernel's epilogue: dG summed over the tokens behind, through the gate, and all gradients to
// memory, by TMA where it can.
#pragma once

#include "cuda/kda/gradients/pairs.cuh"

namespace rlk::cuda::kda::gradients {

// dG summed from the end of this half; the later half leaves its sum to the earlier.
template <class V>
__device__ inline void sum_later_tokens(const Block<V>& b, float (&d_gate)[16]) {
  const int t = b.member;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float later = 0.f;
#pragma unroll
    for (int n = 3; n >= 0; --n) {
      float* d = d_gate + 4 * n + 2 * r;
      d[0] += d[1];
      const float pair = __shfl_xor_sync(~0u, d[0], 1), half_sum = d[0] + pair;
      const float four = __shfl_xor_sync(~0u, half_sum, 2);
      const float behind = later + ((t & 1 ? 0.f : pair) + (t & 2 ? 0.f : four));
      later += half_sum + four;
      d[0] += behind, d[1] += behind;
    }
    if (b.warpgroup == 1 && t == 0) b.s.pairs.gates[b.channel + 8 * r] = later;
  }
}

// What the other half and the last row add.
template <class V>
__device__ inline void add_after(const Block<V>& b, float (&d_gate)[16]) {
  float after[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = b.channel + 8 * r;
    after[r] = b.s.pairs.key[0][at] + b.s.pairs.key[1][at];
    if (b.warpgroup == 0) after[r] += b.s.pairs.gates[at];
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) d_gate[i] += after[i / 2 % 2];
}

// Sums over a lane's tokens, for d_dt_bias and d_a_log.
struct ParameterSums {
  float bias[2] = {0.f, 0.f}, rate[2] = {0.f, 0.f};
};

// g again, of which shared memory has e^{g} only.
template <class V>
__device__ inline void load_raw(const Block<V>& b, float (&raw)[16]) {
  const Job& p = b.p;
  const int step = static_cast<int>(p.g.token);
  by_type(p.g, [&](auto is_bf16) {
    using T = std::conditional_t<is_bf16.value, bf16, float>;
    const T* from = static_cast<const T*>(p.g.data) + b.gate_row + b.channel;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const T* at = rows_on(from, b.token(i), step) + i / 2 % 2 * 8;
      const bool valid = b.token(i) < b.c.length;
      raw[i] = is_bf16.value ? low(load16(at, valid)) : __uint_as_float(load32(at, valid));
    }
  });
}
template <class V>
__device__ inline void through_gate(const Block<V>& b, const Gates& gates, const float (&raw)[16],
                                    float (&d_gate)[16], ParameterSums& sums) {
  by_gate(b.p, [&](auto softplus) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i / 2 % 2;
      float of_rate;
      d_gate[i] = gate_gradient<softplus.value>(b.p, raw[i] + gates.bias[r], gates.rate, d_gate[i], of_rate);
      const bool valid = b.token(i) < b.c.length;
      sums.bias[r] += valid ? d_gate[i] : 0.f, sums.rate[r] += valid ? of_rate : 0.f;
    }
  });
}

// Through the l2norm, dx = r (d - y (y . d)) for y = r x: the dots over this strip's channels, for both slices.
template <class V>
__device__ inline void store_dots(const Block<V>& b) {
  float dots[16];  // [q, k][2 n + i]: of token 8 n + 2 (lane % 4) + i
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t q[4], k[4];
    ldmatrix_transposed(q, shared_address(b.s.inputs.q) + b.pieces() + half * 2048);
    ldmatrix_transposed(k, shared_address(b.s.inputs.k) + b.pieces() + half * 2048);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int n = 2 * half + s;
      const float4 x = *b.waiting(2 * n), y = *b.waiting(2 * n + 1);
      dots[2 * n] = fmaf(low(q[2 * s + 1]), y.x, low(q[2 * s]) * x.x);
      dots[2 * n + 1] = fmaf(high(q[2 * s + 1]), y.y, high(q[2 * s]) * x.y);
      dots[8 + 2 * n] = fmaf(low(k[2 * s + 1]), y.z, low(k[2 * s]) * x.z);
      dots[8 + 2 * n + 1] = fmaf(high(k[2 * s + 1]), y.w, high(k[2 * s]) * x.w);
    }
  }
  reduce_many<16, 16, 4>(dots, [](float y, float z) { return y + z; });
  // This lane has two tokens of q (group < 4) or k.
  float* own = &b.s.pairs.dots[b.slice][b.strip][b.group / 4][b.token(4 * (b.group % 4))];
  *reinterpret_cast<float2*>(own) = make_float2(dots[0], dots[1]);
  // The other block waits for the bytes, which no fence of all memory needs to order.
  if constexpr (V::Cluster > 1)
    store_async(address_at(shared_address(own), b.slice ^ 1),
                address_at(shared_address(&b.s.dots_arrived), b.slice ^ 1), make_float2(dots[0], dots[1]));
}
template <class V>
__device__ inline void through_norm(const Block<V>& b) {
  auto& s = b.s.pairs;
  const int which = b.tid / 64 % 2, token = b.tid % 64;
  const std::int64_t row = b.c.row * b.p.tokens + b.c.token + min(token, b.c.length - 1);
  const float factor = (which ? b.p.k_factor : b.p.q_factor)[row * b.p.heads + b.h];
  if constexpr (V::Cluster > 1) {
    if (b.tid == 0) barrier_expect(&b.s.dots_arrived, sizeof s.dots[0]);
    cluster_wait();  // the other block has left its operands
  }
  store_dots(b);
  __syncthreads();
  if constexpr (V::Cluster > 1) barrier_wait(&b.s.dots_arrived, 0);
  if (b.tid < 128) {
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * Block<V>::kSlices; ++i) dot += s.dots[i / 4][i % 4][which][token];
    s.norms[which][token] = make_float2(dot, factor);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t at = b.pieces() + half * 2048;
    std::uint32_t q[4], k[4];
    ldmatrix_transposed(q, shared_address(b.s.inputs.q) + at);
    ldmatrix_transposed(k, shared_address(b.s.inputs.k) + at);
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 8-group j / 2, channel j % 2
      const float4 d = *b.waiting(4 * half + j);
      const int first = b.token(8 * half + j / 2 * 4);
      const float4 of_q = *reinterpret_cast<const float4*>(&s.norms[0][first]),
                   of_k = *reinterpret_cast<const float4*>(&s.norms[1][first]);
      q[j] = pack(of_q.y * (d.x - low(q[j]) * of_q.x), of_q.w * (d.y - high(q[j]) * of_q.z));
      k[j] = pack(of_k.y * (d.z - low(k[j]) * of_k.x), of_k.w * (d.w - high(k[j]) * of_k.z));
    }
    stmatrix_transposed(shared_address(b.s.inputs.q) + at, q);
    stmatrix_transposed(shared_address(b.s.inputs.k) + at, k);
  }
}

// dq and dk by TMA, one thread's orders.
template <class V>
__device__ inline void order_d_q_and_d_k(const Block<V>& b) {
  const int token = static_cast<int>(b.c.token), row = static_cast<int>(b.c.row);
  tma_store(&b.maps.d_q, b.s.inputs.q, b.slice * kSlice, b.hv, token, row);
  tma_store(&b.maps.d_k, b.s.inputs.k, b.slice * kSlice, b.hv, token, row);
  tma_store_commit();
}
template <class V>
__device__ inline void store_d_q_and_d_k(const Block<V>& b) {
  const Job& p = b.p;
  const int piece = b.tid % 8;
  bf16 *d_q = row_of(p.d_q, b.c.row, b.c.token, b.hv) + b.slice * kSlice + 8 * piece,
       *d_k = row_of(p.d_k, b.c.row, b.c.token, b.hv) + b.slice * kSlice + 8 * piece;
  const int q_step = static_cast<int>(p.d_q.token), k_step = static_cast<int>(p.d_k.token);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = b.tid / 8 + 32 * i, at = row_tile(64, row, piece);
    if (row >= b.c.length) continue;
    *reinterpret_cast<uint4*>(rows_on(d_q, row, q_step)) = *reinterpret_cast<const uint4*>(b.s.inputs.q + at);
    *reinterpret_cast<uint4*>(rows_on(d_k, row, k_step)) = *reinterpret_cast<const uint4*>(b.s.inputs.k + at);
  }
}

template <class V>
__device__ inline void store_d_g(const Block<V>& b, const float (&d_gate)[16]) {
  const Job& p = b.p;
  if constexpr (V::Mapped) {
    if (b.half(p.d_g)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = pack(d_gate[8 * half + 2 * j], d_gate[8 * half + 2 * j + 1]);
        stmatrix_transposed(shared_address(b.s.inputs.g) + b.pieces() + half * 2048, y);
      }
    } else {
      char* to = b.gate_place();
#pragma unroll
      for (int i = 0; i < 16; ++i) *reinterpret_cast<float*>(to + b.gate_piece(i)) = d_gate[i];
    }
    fence_async_proxy();
    __syncthreads();
    if (b.tid == 0) {
      for (int i = 0; i < (b.half(p.d_g) ? 1 : 2); ++i)
        tma_store(&b.maps.d_g, b.s.inputs.g + i * 8192, b.slice * kSlice + 32 * i, b.hv,
                  static_cast<int>(b.c.token), static_cast<int>(b.c.row));
      tma_store_commit();
    }
  } else {
    by_type(p.d_g, [&](auto is_bf16) {
      using T = std::conditional_t<is_bf16.value, bf16, float>;
      T* to = static_cast<T*>(p.d_g.data) + index_of(p.d_g, b.c.row, b.c.token, b.hv) + b.slice * kSlice +
              b.channel;
      const int step = static_cast<int>(p.d_g.token);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        T* at = rows_on(to, b.token(i), step) + i / 2 % 2 * 8;
        if constexpr (is_bf16.value) {
          store16(at, d_gate[i], b.token(i) < b.c.length);
        } else {
          store32(at, d_gate[i], b.token(i) < b.c.length);
        }
      }
    });
  }
}

// Of this thread's token.
template <class V>
__device__ inline void store_d_beta(const Block<V>& b) {
  const Job& p = b.p;
  const int tid = b.tid;
  const float beta = b.s.beta[tid];
  bool whole = b.slice == 0;
  float d;
  if (!(fabsf(beta) < kFaint)) {
    const auto* own = reinterpret_cast<const float*>(b.s.pairs.cells[tid / 8 * 8 + tid / 8] + 256);
    d = own[cell_row(tid % 8) + tid % 8] / beta;
  } else {
    d = b.s.beta_v[tid];
#pragma unroll
    for (int s = 0; s < 4; ++s) d -= b.s.pairs.beta_k[s][tid];
    // Of the two slices of K, the first to get here leaves its half and the second adds: a + b is b + a.
    if constexpr (Block<V>::kSlices > 1) {
      const unsigned other =
          atomicExch(p.beta_half + 64 * static_cast<std::int64_t>(b.item) + tid, __float_as_uint(d));
      whole = other != kNoHalf;
      d += __uint_as_float(other);
    }
  }
  if (whole)
    store_real(p.d_beta, index_of(p.d_beta, b.c.row, b.c.token + tid, b.hv), beta_gradient(p, beta, d));
}

// The chunk's sums for d_dt_bias and d_a_log.
template <class V>
__device__ inline void store_parameters(const Block<V>& b, ParameterSums& sums) {
  auto& s = b.s.pairs;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int off = 1; off < 4; off *= 2) {
      sums.bias[r] += __shfl_xor_sync(~0u, sums.bias[r], off);
      sums.rate[r] += __shfl_xor_sync(~0u, sums.rate[r], off);
    }
    if (b.member == 0) {
      s.bias[b.warpgroup][0][b.channel + 8 * r] = sums.bias[r];
      s.bias[b.warpgroup][1][b.channel + 8 * r] = sums.rate[r];
    }
  }
  __syncthreads();
  if (b.tid < kSlice) {
    const std::int64_t to = static_cast<std::int64_t>(b.item) * V::K + b.slice * kSlice + b.tid;
    b.p.bias_part[to] = s.bias[0][0][b.tid] + s.bias[1][0][b.tid];
    double rate = static_cast<double>(s.bias[0][1][b.tid]) + static_cast<double>(s.bias[1][1][b.tid]);
#pragma unroll
    for (int off = 16; off > 0; off /= 2) rate += __shfl_xor_sync(~0u, rate, off);
    if (b.lane == 0) b.p.a_log_part[to / 32] = rate;
  }
}

}  // namespace rlk::cuda::kda::gradients
