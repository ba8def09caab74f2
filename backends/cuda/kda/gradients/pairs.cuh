// The pairs of tokens inside a chunk: the decays, the entries of dP and dM as tf32 operands, and their sums
// between blocks of 16 tokens and inside them.
#pragma once

#include "cuda/kda/gradients/block.cuh"

namespace rlk::cuda::kda::gradients {

// Tensor cores cut tf32 operands: rounded first, they have no bias.
__device__ inline std::uint32_t tf32(float x) {
  std::uint32_t y;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// e^{g} of a lane's 16, and what the gate was made with.
struct Gates {
  float e[16], rate = 1.f, bias[2] = {0.f, 0.f};
};

// What a lane's two tokens of 8 need to know of the others of its channel: the product over the neighbouring
// pair and over the other four, and that of all eight.
struct Group {
  float pair, four, eight;

  __device__ explicit Group(float e0, float e1) {
    const float own = e0 * e1;
    pair = __shfl_xor_sync(~0u, own, 1);
    const float half = own * pair;
    four = __shfl_xor_sync(~0u, half, 2);
    eight = half * four;
  }
  // Steps over the lower side for a token on the upper one, and the reverse; 1 for the others.
  __device__ float down2(int t) const { return t & 1 ? pair : 1.f; }
  __device__ float down4(int t) const { return t & 2 ? four : 1.f; }
  __device__ float up2(int t) const { return t & 1 ? 1.f : pair; }
  __device__ float up4(int t) const { return t & 2 ? 1.f : four; }
};

// A tf32 operand of 8 tokens before and after rounding, and the entries of a cell that it meets.
using Operand = float[4];
using Rounded = std::uint32_t[4];
struct Entries {
  std::uint32_t p[2], m[2];

  // Those of one level: 4 tokens against 4, or 2 against 2; the rest of the cell reads as zero.
  __device__ Entries masked(bool keep) const {
    return Entries{{keep ? p[0] : 0u, keep ? p[1] : 0u}, {keep ? m[0] : 0u, keep ? m[1] : 0u}};
  }
};

template <class V>
__device__ inline void load_gates(const Block<V>& b, Gates& gates) {
  const Job& p = b.p;
  float(&e)[16] = gates.e;
  if (V::Gated) {
    if (p.a_log) gates.rate = expf(p.a_log[b.hv]);
    if (p.dt_bias) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        gates.bias[r] = p.dt_bias[b.hv * V::K + b.slice * kSlice + b.channel + 8 * r];
    }
  }
  if constexpr (V::Mapped) barrier_wait(&b.s.inputs_arrived, 0);
  if (V::Mapped && !b.half(p.g)) {
    const char* from = b.gate_place();
#pragma unroll
    for (int i = 0; i < 16; ++i) e[i] = *reinterpret_cast<const float*>(from + b.gate_piece(i));
  } else if (b.half(p.g)) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t x[4];
      ldmatrix_transposed(x, shared_address(b.s.inputs.g) + b.pieces() + n * 1024);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[4 * n + 2 * i] = low(x[i]), e[4 * n + 2 * i + 1] = high(x[i]);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* from = b.s.inputs.g + (32 * b.warpgroup + 2 * b.member) * 256 +
                         (((4 * b.strip + 2 * r + b.group / 4) ^ (2 * b.member)) << 4) + b.group % 4 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        e[i / 2 * 4 + 2 * r + i % 2] = *reinterpret_cast<const float*>(from + (i / 2 * 8 + i % 2) * 256);
    }
  }
  if constexpr (V::Gated) {
    by_gate(p, [&](auto softplus) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        e[i] = b.token(i) < b.c.length
                   ? gate_value<softplus.value>(p, e[i] + gates.bias[i / 2 % 2], gates.rate)
                   : 0.f;
    });
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) e[i] = exp2_fast(e[i] * kLog2e);
}

// What takes part in the sums over pairs: shared memory as it lies then, and a lane's sums.
template <class V>
struct Pairs {
  static constexpr float kCut = V::kCut;
  const Block<V>& b;
  Sums& x;
  typename Shared<V::K>::Pairs& s = b.s.pairs;
  int by_row = (cell_row(b.group) + 2 * b.member) * 4;  // (g, 2t), (g, 2t + 1) of a cell
  int by_column = (cell_row(2 * b.member) + b.group) * 4;
  int next_row = (cell_row(2 * b.member + 1) - cell_row(2 * b.member)) * 4;
  // This lane's pairs of e^{g} wait where g was, [2 n + r][thread], and q and k where they came.
  float2* decays = reinterpret_cast<float2*>(b.s.inputs.g) + b.tid;
  float key[2][2];

  __device__ Pairs(const Block<V>& block, Sums& sums) : b(block), x(sums) {}

  __device__ char* cell(int ig, int jg) const { return s.cells[ig * 8 + jg]; }
  __device__ float pass(int block, int r) const { return s.pass[block][b.channel + 8 * r]; }
  __device__ float2 beta_of(int n) const {
    const float2 beta = *reinterpret_cast<const float2*>(b.s.beta + 32 * b.warpgroup + 8 * n + 2 * b.member);
    return make_float2(-beta.x, -beta.y);
  }
  __device__ static std::uint32_t one_term(float y) { return V::Gated ? tf32(y) : __float_as_uint(y); }

  // One operand of 8 tokens: k_j s_j; q_i p_i and k_i p_i. `step` carries the factor on from the pair, whose
  // e^{g} are `d`.
  __device__ static void lower_operand(Operand& to, int r, std::uint32_t k, float2 d, float step) {
    to[r] = low(k) * (step * d.y);
    to[2 + r] = high(k) * step;
  }
  __device__ static void upper_operands(Operand& up, Operand& write, int r, std::uint32_t q, std::uint32_t k,
                                        float2 d, float step, float2 beta) {
    const float f0 = step * d.x, f1 = f0 * d.y;
    up[r] = low(q) * f0;
    up[2 + r] = high(q) * f1;
    write[r] = low(k) * (beta.x * f0);
    write[2 + r] = high(k) * (beta.y * f1);
  }
  __device__ void store_operand(char* group, const Operand& a) const {
    *reinterpret_cast<uint4*>(group + (b.strip * 32 + b.lane) * 16) =
        make_uint4(one_term(a[0]), one_term(a[1]), one_term(a[2]), one_term(a[3]));
  }
  __device__ void load_operand(Rounded& a, const char* group) const {
    const uint4 y = *reinterpret_cast<const uint4*>(group + (b.strip * 32 + b.lane) * 16);
    a[0] = y.x, a[1] = y.y, a[2] = y.z, a[3] = y.w;
  }

  __device__ Entries row_entries(const char* at) const {
    const uint2 y = *reinterpret_cast<const uint2*>(at + by_row);
    const uint2 z = *reinterpret_cast<const uint2*>(at + by_row + 256);
    return Entries{{y.x, y.y}, {z.x, z.y}};
  }
  __device__ Entries column_entries(const char* at) const {
    const char* from = at + by_column;
    auto word = [&](int offset) { return *reinterpret_cast<const std::uint32_t*>(from + offset); };
    return Entries{{word(0), word(next_row)}, {word(256), word(256 + next_row)}};
  }

  __device__ static void scale_by(float* acc, float f0, float f1) {
    acc[0] *= f0, acc[1] *= f0, acc[2] *= f1, acc[3] *= f1;
  }
  __device__ void query_step(int n, const Rounded& a, const Entries& y) {
    mma_tf32(x.q + 4 * n, a, y.p[0], y.p[1]);
    mma_tf32(x.w + 4 * n, a, y.m[0], y.m[1]);
  }
  __device__ void key_step(int n, const Rounded& a, const Rounded& w, const Entries& y) {
    mma_tf32(x.u + 4 * n, a, y.p[0], y.p[1]);
    mma_tf32(x.u + 4 * n, w, y.m[0], y.m[1]);
  }
  // The same inside a block, where a gate computed here has its operands in two terms.
  __device__ static void split(const Operand& a, Rounded& hi, Rounded& rest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      hi[i] = one_term(a[i]);
      rest[i] = __float_as_uint(a[i] - __uint_as_float(hi[i]));
    }
  }
  __device__ void near_queries(int n, const Operand& a, const Entries& y) {
    Rounded hi, rest;
    split(a, hi, rest);
    if constexpr (V::Gated) query_step(n, rest, y);
    query_step(n, hi, y);
  }
  __device__ void near_keys(int n, const Operand& a, const Operand& w, const Entries& y) {
    Rounded a_hi, a_rest, w_hi, w_rest;
    split(a, a_hi, a_rest);
    split(w, w_hi, w_rest);
    if constexpr (V::Gated) key_step(n, a_rest, w_rest, y);
    key_step(n, a_hi, w_hi, y);
  }

  // The entries as cells, and this lane's decays, in the operands' place.
  __device__ void publish(const float (&e)[16]) {
    const float unit = b.warpgroup == 0 ? b.p.scale : 1.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int ig = 2 * b.strip + r, i = 4 * n + 2 * r;
        if (n > ig) continue;
        *reinterpret_cast<uint2*>(cell(ig, n) + by_row + 256 * b.warpgroup) =
            make_uint2(tf32(x.entries[i] * unit), tf32(x.entries[i + 1] * unit));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) decays[i * kThreads] = make_float2(e[2 * i], e[2 * i + 1]);
  }

  // Between 16-token blocks: operands and the products to pass, for both halves; and of the last row's share
  // sum_j s_j k_j (dS v_new_j), s_j up to the end of the block.
  __device__ void write_operands(const float (&e)[16]) {
    const int t = b.member;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = 2 * b.warpgroup + half;
      Operand lo[2], up[2], wr[2];
      std::uint32_t q[4], k[4];
      ldmatrix_transposed(q, shared_address(b.s.inputs.q) + b.pieces() + half * 2048);
      ldmatrix_transposed(k, shared_address(b.s.inputs.k) + b.pieces() + half * 2048);
      const float2 beta0 = beta_of(2 * half), beta1 = beta_of(2 * half + 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 8 * half + 2 * r;
        const float2 d0 = make_float2(e[i], e[i + 1]), d1 = make_float2(e[i + 4], e[i + 5]);
        const Group first(d0.x, d0.y), second(d1.x, d1.y);
        lower_operand(lo[0], r, k[r], d0, first.up2(t) * first.up4(t) * second.eight * kCut);
        lower_operand(lo[1], r, k[2 + r], d1, second.up2(t) * second.up4(t) * kCut);
        upper_operands(up[0], wr[0], r, q[r], k[r], d0, first.down2(t) * first.down4(t) * kCut, beta0);
        upper_operands(up[1], wr[1], r, q[2 + r], k[2 + r], d1,
                       second.down2(t) * second.down4(t) * first.eight * kCut, beta1);
        if (t == 0) s.pass[block][b.channel + 8 * r] = first.eight * second.eight;
        float sum = lo[0][r] * x.u[i];
        sum = fmaf(lo[0][2 + r], x.u[i + 1], sum);
        sum = fmaf(lo[1][r], x.u[i + 4], sum);
        key[half][r] = fmaf(lo[1][2 + r], x.u[i + 5], sum);
      }
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        if (block < 3) store_operand(s.lower[2 * block + g], lo[g]);
        if (block > 0) store_operand(s.upper[2 * block - 2 + g], up[g]);
        if (block > 0) store_operand(s.write[2 * block - 2 + g], wr[g]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) x.q[i] *= b.p.scale;
  }

  // The last row's share of dG, over the half.
  __device__ void sum_keys() {
    float to_end[2] = {1.f, 1.f}, sum[2];
    for (int block = 3; block > 2 * b.warpgroup + 1; --block)
      to_end[0] *= pass(block, 0), to_end[1] *= pass(block, 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = key[1][r] * (to_end[r] * (1 / kCut));
      to_end[r] *= pass(2 * b.warpgroup + 1, r);
      sum[r] = fmaf(key[0][r], to_end[r] * (1 / kCut), sum[r]);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (b.warpgroup == 0) sum[r] = fmaf(to_end[r] * pass(0, r), b.s.last[b.channel + 8 * r], sum[r]);
      if (b.member == 0) s.key[b.warpgroup][b.channel + 8 * r] = sum[r];
    }
  }

  // Q and W of 8-groups from `First` on against block jb; U of the 8-groups before `End` against block ib.
  template <int First>
  __device__ void queries(int jb) {
    const float f0 = pass(jb, 0), f1 = pass(jb, 1);
#pragma unroll
    for (int n = First; n < 4; ++n) {
      scale_by(x.q + 4 * n, f0, f1);
      scale_by(x.w + 4 * n, f0, f1);
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      Rounded a;
      load_operand(a, s.lower[2 * jb + g]);
#pragma unroll
      for (int n = First; n < 4; ++n) query_step(n, a, row_entries(cell(4 * b.warpgroup + n, 2 * jb + g)));
    }
  }
  template <int End>
  __device__ void keys(int ib) {
    const float f0 = pass(ib, 0), f1 = pass(ib, 1);
#pragma unroll
    for (int n = 0; n < End; ++n) scale_by(x.u + 4 * n, f0, f1);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      Rounded a, w;
      load_operand(a, s.upper[2 * ib - 2 + g]);
      load_operand(w, s.write[2 * ib - 2 + g]);
#pragma unroll
      for (int n = 0; n < End; ++n) key_step(n, a, w, column_entries(cell(2 * ib + g, 4 * b.warpgroup + n)));
    }
  }
  __device__ void between_blocks() {
    const int own = 2 * b.warpgroup;
#pragma unroll 1
    for (int jb = 0; jb < own; ++jb) queries<0>(jb);
    queries<2>(own);
#pragma unroll 1
    for (int ib = 3; ib > own + 1; --ib) keys<4>(ib);
    keys<2>(own + 1);
  }
};

}  // namespace rlk::cuda::kda::gradients
