// The pairs of tokens inside a block of 16, by halving: 8 tokens against 8, 4 against 4, 2 against 2 by
// tensor cores, and neighbours in fp32.
#pragma once

#include "cuda/kda/gradients/pairs.cuh"

namespace rlk::cuda::kda::gradients {

template <class V>
struct Inside {
  Pairs<V>& pairs;
  const Block<V>& b;
  Sums& x;
  bool by_sums;
  int half = 0;              // which block of 16 of this warpgroup's tokens
  std::uint32_t q[4], k[4];  // [2 s + r]: of 8-group 2 half + s
  float2 d[4];
  float up2[2][2], up4[2][2], down2[2][2], down4[2][2];

  __device__ Inside(Pairs<V>& all, bool sums) : pairs(all), b(all.b), x(all.x), by_sums(sums) {}

  __device__ void load(int block) {
    half = block;
    ldmatrix_transposed(q, shared_address(b.s.inputs.q) + b.pieces() + half * 2048);
    ldmatrix_transposed(k, shared_address(b.s.inputs.k) + b.pieces() + half * 2048);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = pairs.decays[(4 * half + i) * kThreads];
  }

  // The upper 8 tokens against the lower 8.
  __device__ void eight() {
    const int n0 = 2 * half, t = b.member;
    Operand lo, up, wr;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float eight[2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const Group y(d[2 * s + r].x, d[2 * s + r].y);
        up2[s][r] = y.up2(t), up4[s][r] = y.up4(t), down2[s][r] = y.down2(t), down4[s][r] = y.down4(t);
        eight[s] = y.eight;
      }
      pairs.lower_operand(lo, r, k[r], d[r], up2[0][r] * up4[0][r] * V::kCut);
      pairs.upper_operands(up, wr, r, q[2 + r], k[2 + r], d[2 + r], down2[1][r] * down4[1][r] * V::kCut,
                           pairs.beta_of(n0 + 1));
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        x.q[4 * (n0 + 1) + 2 * r + y] *= eight[0], x.w[4 * (n0 + 1) + 2 * r + y] *= eight[0];
        x.u[4 * n0 + 2 * r + y] *= eight[1];
      }
    }
    const char* at = pairs.cell(4 * b.warpgroup + n0 + 1, 4 * b.warpgroup + n0);
    pairs.near_queries(n0 + 1, lo, pairs.row_entries(at));
    pairs.near_keys(n0, up, wr, pairs.column_entries(at));
  }

  // In 8-group s, 4 tokens against 4, then 2 against 2.
  __device__ void four_and_two(int s, const char* at, float2 beta) {
    const int n = 2 * half + s, t = b.member, g = b.group;
    const Entries rows = pairs.row_entries(at), columns = pairs.column_entries(at);
    Operand lo, up, wr;
    pairs.scale_by(x.q + 4 * n, down4[s][0], down4[s][1]);
    pairs.scale_by(x.w + 4 * n, down4[s][0], down4[s][1]);
    pairs.scale_by(x.u + 4 * n, up4[s][0], up4[s][1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      pairs.lower_operand(lo, r, k[2 * s + r], d[2 * s + r], up2[s][r] * V::kCut);
      pairs.upper_operands(up, wr, r, q[2 * s + r], k[2 * s + r], d[2 * s + r], down2[s][r] * V::kCut, beta);
    }
    pairs.near_queries(n, lo, rows.masked(g >= 4 && t < 2));
    pairs.near_keys(n, up, wr, columns.masked(g < 4 && t >= 2));
    pairs.scale_by(x.q + 4 * n, down2[s][0], down2[s][1]);
    pairs.scale_by(x.w + 4 * n, down2[s][0], down2[s][1]);
    pairs.scale_by(x.u + 4 * n, up2[s][0], up2[s][1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      pairs.lower_operand(lo, r, k[2 * s + r], d[2 * s + r], V::kCut);
      pairs.upper_operands(up, wr, r, q[2 * s + r], k[2 * s + r], d[2 * s + r], V::kCut, beta);
    }
    pairs.near_queries(n, lo, rows.masked(t % 2 == 0 && g / 2 == t + 1));
    pairs.near_keys(n, up, wr, columns.masked(t % 2 == 1 && g / 2 == t - 1));
  }

  // This lane's two tokens of 8-group s in fp32: dG without the pairs of a token with itself, which cancel,
  // and dq and dk.
  __device__ void neighbours(int s, const char* at, float2 beta, float (&d_gate)[16], std::uint32_t (&dq)[4],
                             std::uint32_t (&dk)[4]) {
    const int n = 2 * half + s, t = b.member;
    const char* own = at + (cell_row(2 * t) + 2 * t) * 4;
    const float p00 = *reinterpret_cast<const float*>(own);
    const float2 p1 = *reinterpret_cast<const float2*>(own + pairs.next_row);
    const float p10 = p1.x, p11 = p1.y;
    const float m10 = *reinterpret_cast<const float*>(own + pairs.next_row + 256);
    const float bm10 = m10 * beta.y;
    float wk[2] = {0.f, 0.f};  // -W k over this lane's channels
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 4 * n + 2 * r;
      const float k0 = low(k[2 * s + r]), k1 = high(k[2 * s + r]);
      const float q0 = low(q[2 * s + r]), q1 = high(q[2 * s + r]);
      const float e0 = d[2 * s + r].x, e1 = d[2 * s + r].y;
      const float x0 = x.q[i] * e0, x1 = fmaf(x.q[i + 1], e0, p10 * k0) * e1;
      const float w0 = x.w[i] * e0, w1 = fmaf(x.w[i + 1], e0, m10 * k0) * e1;
      const float u0 = fmaf(p10, q1, fmaf(bm10, k1, x.u[i])) * e1, u1 = x.u[i + 1];
      d_gate[i] = fmaf(q0, x0, k0 * fmaf(beta.x, w0, -u0));
      d_gate[i + 1] = fmaf(q1, x1, k1 * fmaf(beta.y, w1, -u1));
      if (by_sums) wk[0] = fmaf(w0, k0, wk[0]), wk[1] = fmaf(w1, k1, wk[1]);
      const float dq0 = fmaf(p00, k0, x0), dq1 = fmaf(p11, k1, x1);
      const float dk0 = fmaf(p00, q0, fmaf(beta.x, w0, u0)), dk1 = fmaf(p11, q1, fmaf(beta.y, w1, u1));
      if constexpr (V::Norm) {
        *b.waiting(2 * n + r) = make_float4(dq0, dq1, dk0, dk1);
      } else if constexpr (V::Parts) {
        store_parts(i, r, dq0, dq1, dk0, dk1);
      } else {
        dq[2 * s + r] = pack(dq0, dq1), dk[2 * s + r] = pack(dk0, dk1);
      }
    }
    if (by_sums) sum_writes(n, wk);
  }

  // fp32 parts of a sum over heads.
  __device__ void store_parts(int i, int r, float dq0, float dq1, float dk0, float dk1) {
    const Job& p = b.p;
    const std::int64_t token = b.c.token + b.token(i), step = p.value_heads * V::K;
    const std::int64_t to =
        ((b.c.row * p.tokens + token) * p.value_heads + b.hv) * V::K + b.slice * kSlice + b.channel + 8 * r;
    const bool valid0 = b.token(i) < b.c.length, valid1 = b.token(i) + 1 < b.c.length;
    store32(p.q_part + to, dq0, valid0), store32(p.q_part + to + step, dq1, valid1);
    store32(p.k_part + to, dk0, valid0), store32(p.k_part + to + step, dk1, valid1);
  }
  // W k over the strip's channels.
  __device__ void sum_writes(int n, const float (&wk)[2]) {
    const int own = b.lane / 16;  // half the lanes go on with each token
    float sum = (own ? wk[1] : wk[0]) + __shfl_xor_sync(~0u, own ? wk[0] : wk[1], 16);
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 4);
    if (b.group % 4 == 0) pairs.s.beta_k[b.strip][b.token(4 * n) + own] = sum;
  }

  // All of it; dq and dk take the place of q and k, or wait for the l2norm.
  __device__ void run(float (&d_gate)[16]) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      load(block);
      eight();
      std::uint32_t dq[4], dk[4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int n = 2 * half + s;
        const char* at = pairs.cell(4 * b.warpgroup + n, 4 * b.warpgroup + n);
        const float2 beta = pairs.beta_of(n);
        four_and_two(s, at, beta);
        neighbours(s, at, beta, d_gate, dq, dk);
      }
      if constexpr (!V::Norm && !V::Parts) {
        stmatrix_transposed(shared_address(b.s.inputs.q) + b.pieces() + half * 2048, dq);
        stmatrix_transposed(shared_address(b.s.inputs.k) + b.pieces() + half * 2048, dk);
      }
    }
  }
};

}  // namespace rlk::cuda::kda::gradients
