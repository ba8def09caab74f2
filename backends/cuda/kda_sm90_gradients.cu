// KDA backward, everything that is local to a chunk, in one kernel: a block per (chunk, value head, 64
// channels of K), two blocks on a multiprocessor, so that one loads or multiplies while the other walks along
// its channels.
//
// With S the state before the chunk, dS the gradient of the state after it, D = A^T dvnew (from the reverse
// scan):
//   dP_ij = scale do_i . v_new_j  (i >= j)         dM_ij = -D_i . v_new_j  (i > j)
//   Q_i = scale e^{G_i} (S do_i) + sum_j dP_ij E_ij k_j
//   W_i = -e^{G_i} (S D_i) + sum_j dM_ij E_ij k_j
//   U_j = e^{G_L - G_j} (dS v_new_j) + sum_i E_ij (dP_ij q_i + dM_ij beta_i k_i)
//   dq = Q     dk = U + beta W     dbeta = D . v + W . k     dG = q Q + beta k W - k U,
//   and on the last row also e^{G_L} rowsum(S dS) + sum_j e^{G_L - G_j} k_j (dS v_new_j)
// The gradient of the inverse needs no 64^3 products: x = (I + M) v_new is a linear solve, so dM = -stril(D
// v_new^T).
//
// Decays: a 16-token block I has p_i = e^{G_i - G_a} (a its first row) and s_j = e^{G_a' - G_j} (a' the next
// block's first row), running products in registers. Between blocks the accumulators are carried from anchor
// to anchor by per-channel factors (Horner), so each token has one scaled copy per role and no factor
// exceeds 1. Inside a 16-token block every pair is summed in fp32, E_ij as a running product. The products
// between blocks run in tf32.
//
// The products over V are wgmma straight from the tiles as they arrive: 64 tokens x 32 channels (or x 32
// columns of dP and dM) per warpgroup; do comes as swizzled rows, the rest as 8 x 8 blocks, which wgmma takes
// turned.
//
// Per token and head, K = V = 128: reads 10K (states) + 10K (v_new, D, do, q, k, v: 2K each, less v) + 4K
// (g), writes 4K + 4K: 4.1 kB; dP, dM and fp32 dq, dk never reach memory. With Call::unfused they do: the
// same code in two kernels, 2 x 12K + 2 x 512 bytes more per token, kept to show what the fusion is worth.
#include <algorithm>

#include "kda_sm90_device.cuh"
#include "lm_head_wgmma.cuh"

namespace rlk::cuda::kda90 {
namespace {

enum class Part { all, inter, intra };

// One channel of 16 tokens of q, k (bf16, as the halves of a word) and g (bf16 or fp32); steps in bytes. One
// predicate per token and no branch, so that all loads are in flight together.
template <bool HalfG>
__device__ inline void load_column(std::uint32_t (&qk)[16], float (&g)[16], const char* q,
                                   std::int64_t q_step, const char* k, std::int64_t k_step, const char* from,
                                   std::int64_t g_step, int left) {
  std::uint16_t x[16], y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if constexpr (HalfG) {
      std::uint16_t z;
      asm("{\n.reg .pred p;\nsetp.gt.s32 p, %6, %7;\nmov.b16 %0, 0;\nmov.b16 %1, 0;\nmov.b16 %2, 0;\n"
          "@p ld.global.nc.u16 %0, [%3];\n@p ld.global.nc.u16 %1, [%4];\n@p ld.global.nc.u16 %2, [%5];\n}"
          : "=&h"(x[i]), "=&h"(y[i]), "=&h"(z)
          : "l"(q), "l"(k), "l"(from), "r"(left), "r"(i));
      g[i] = __uint_as_float(static_cast<std::uint32_t>(z) << 16);
    } else {
      asm("{\n.reg .pred p;\nsetp.gt.s32 p, %6, %7;\nmov.b16 %0, 0;\nmov.b16 %1, 0;\nmov.f32 %2, "
          "0f00000000;\n"
          "@p ld.global.nc.u16 %0, [%3];\n@p ld.global.nc.u16 %1, [%4];\n@p ld.global.nc.f32 %2, [%5];\n}"
          : "=&h"(x[i]), "=&h"(y[i]), "=&f"(g[i])
          : "l"(q), "l"(k), "l"(from), "r"(left), "r"(i));
    }
    q += q_step, k += k_step, from += g_step;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) qk[i] = x[i] | static_cast<std::uint32_t>(y[i]) << 16;
}

// What wgmma reads, 16 steps of V at byte `at`: a tile of 8 x 8 blocks, [V / 8][8], whose columns are the
// operand's rows; and a tile of swizzled rows.
__device__ inline std::uint64_t of_blocks(std::uint32_t at) {
  return (at >> 4 & 0x3fff) | std::uint64_t{1024 / 16} << 16 | std::uint64_t{128 / 16} << 32;
}
__device__ inline std::uint64_t of_rows(std::uint32_t at) {
  return (at >> 4 & 0x3fff) | std::uint64_t{1} << 16 | std::uint64_t{1024 / 16} << 32 |
         std::uint64_t{1} << 62;
}
template <int N, bool TurnedA>
__device__ inline void multiply(float (&acc)[N / 2], std::uint64_t a, std::uint64_t b, bool more) {
  hopper::Wgmma<bf16, N, TurnedA, true>::run(acc, a, b, more);
}

// tf32 operands are cut, not rounded, by the tensor cores: this factor, part of a scaling that happens
// anyhow, takes out the mean of what is cut (0.361 units in the last of 11 bits), which leaves the error of
// rounding.
constexpr float kNudge = 1.f + 0.361f / 1024;

constexpr int kPad = 4;     // floats between rows of the scaled copies
constexpr int kPitch = 20;  // of a 16 x 16 block of dP or dM

constexpr int kSlice = 64;             // channels of K per block
constexpr unsigned kGridRows = 32768;  // chunk slots along the grid's second dimension

template <int V>
struct Layout {
  static constexpr int kState = 0;                         // S        blocks, this slice of K
  static constexpr int kDState = kState + 2 * V * kSlice;  // dS       blocks
  static constexpr int kNew = kDState + 2 * V * kSlice;    // v_new    blocks
  static constexpr int kDx = kNew + 128 * V;               // D        blocks
  static constexpr int kDOut = kDx + 128 * V;              // do       rows
  static constexpr int kTilesEnd = kDOut + 128 * V;
  // In their place, once the products are done: q p, beta k p of blocks 1-3, k s of blocks 0-2, and dS v_new;
  // then the accumulators of Q, W, U in the place of the former.
  static constexpr int kRow = kSlice + kPad;
  static constexpr int kQ = 0, kKb = kQ + 48 * kRow * 4, kKs = kKb + 48 * kRow * 4;
  static constexpr int kSums = 0;  // [Q, W, U][64][kSlice]
  static constexpr int kPlain = 3 * 64 * kSlice * 4;
  static constexpr int kPlainEnd = kPlain + 64 * kSlice * 4;
  static_assert(kKs + 48 * kRow * 4 <= kPlain);
  static constexpr int kLow = kTilesEnd > kPlainEnd ? kTilesEnd : kPlainEnd;  // [6 pairs][dP, dM][16][kPitch]
  static constexpr int kPairs = kLow + 6 * 2 * 16 * kPitch * 4;               // [4][i][j]{dP, dM}
  static constexpr int kFirst = kPairs + 4 * 256 * 8;
  static constexpr int kRest = kFirst + 16 * kSlice;
  static constexpr int kBlockSum = kRest + 16 * kSlice;
  static constexpr int kKeySum = kBlockSum + 16 * kSlice;
  static constexpr int kLast = kKeySum + 16 * kSlice;  // rowsum(S dS)
  static constexpr int kBetaV = kLast + 4 * kSlice;    // [64]
  static constexpr int kBetaK = kBetaV + 256;          // [2][64]
  static constexpr int kBeta = kBetaK + 512;
  static constexpr int kBar = kBeta + 256;
  static constexpr int kSize = kBar + 16;
};

// Swapping groups of 8 floats by row keeps the fragments' float2 stores free of bank conflicts.
__device__ inline int sum_index(int row, int channel) { return row * kSlice + (channel ^ ((row & 3) << 3)); }

// Brings into L2 what the block that will follow on this multiprocessor reads. Blocks start in order and last
// equally long, so without this they wait for memory all at once, at its full speed, and then leave it idle.
constexpr unsigned kAhead = 2 * 132;  // blocks at a time on an H100 or H200; a wrong guess costs speed only
template <int K>
__device__ inline void prefetch_inputs(const Job& p) {
  const unsigned next = blockIdx.x + kAhead, column = next % gridDim.x;
  const unsigned row = blockIdx.y + next / gridDim.x + blockIdx.z * kGridRows;
  Chunk c;
  if (row >= p.slots() || !find_chunk(p, static_cast<int>(row), c)) return;
  constexpr int kSlices = K / kSlice;
  const int slice = column % kSlices, hv = column / kSlices, tid = threadIdx.x;
  const int h = p.heads == p.value_heads ? hv : hv / (p.value_heads / p.heads);
  if (tid == 0) {
    const std::int64_t item = static_cast<std::int64_t>(row) * p.value_heads + hv;
    const std::int64_t state = (static_cast<std::int64_t>(row) + c.sequence) * p.value_heads + hv;
    bulk_prefetch(p.v_new + item * 64 * K + slice * 64 * K / kSlices, 128 * K / kSlices);
    bulk_prefetch(p.d_x + item * 64 * K + slice * 64 * K / kSlices, 128 * K / kSlices);
    bulk_prefetch(p.d_states + (item * K + slice * kSlice) * K, 2 * K * kSlice);
    bulk_prefetch(p.states + (state * K + slice * kSlice) * K, 2 * K * kSlice);
  }
  const int t = tid % 64, what = tid / 64;  // 256 threads: 64 tokens of q and k, v and do, g
  if (t >= c.length) return;
  const std::int64_t token = c.token + t;
  if (what == 0) {
    prefetch_line(p.l2norm ? p.q_norm + ((c.row * p.tokens + token) * p.heads + h) * K + slice * 64
                           : row_of(p.q, c.row, token, h) + slice * 64);
    prefetch_line(p.l2norm ? p.k_norm + ((c.row * p.tokens + token) * p.heads + h) * K + slice * 64
                           : row_of(p.k, c.row, token, h) + slice * 64);
  } else if (what == 1) {
    prefetch_line(row_of(p.v, c.row, token, hv) + slice * 64);
    prefetch_line(row_of(p.d_out, c.row, token, hv) + slice * 64);
  } else {
    const std::int64_t at = index_of(p.g, c.row, token, hv) + slice * 64 + (what - 2) * 32;
    prefetch_line(static_cast<const char*>(p.g.data) + at * (p.g.bf16 ? 2 : 4));
  }
}

template <int K, Part part, bool Gated>
__global__ void __launch_bounds__(256, 2) gradients_kernel(const Job p) {
  using L = Layout<K>;
  constexpr int C = kSlice, kThreads = 256, kSlices = K / C;
  extern __shared__ __align__(1024) char smem[];
  const std::uint32_t base = shared_address(smem), bar = base + L::kBar;
  auto floats = [&](int at) { return reinterpret_cast<float*>(smem + at); };
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int lc = tid % C, block = tid / C;  // of the walk along tokens: channel of the slice, 16-token block
  const int tokens16 = warp % 4, quarter = warp / 4;  // of the products: 16 tokens x 32 channels
  const int slice = blockIdx.x % kSlices, hv = blockIdx.x / kSlices, channel = slice * C + lc;
  const int slot = blockIdx.y + blockIdx.z * kGridRows, item = slot * p.value_heads + hv;
  Chunk c;
  if (slot >= static_cast<int>(p.slots()) || !find_chunk(p, slot, c)) return;
  const int h = p.heads == p.value_heads ? hv : hv / (p.value_heads / p.heads);
  float* inter = p.inter + (static_cast<std::int64_t>(item) * kSlices + slice) * kInter;

  if constexpr (part != Part::intra) {
    if (tid == 0) {
      barrier_init(bar, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      barrier_expect(bar, L::kDOut);
      const std::int64_t state = (static_cast<std::int64_t>(c.slot) + c.sequence) * p.value_heads + hv;
      bulk_copy(base + L::kNew, p.v_new + static_cast<std::int64_t>(item) * 64 * K, 128 * K, bar);
      bulk_copy(base + L::kDx, p.d_x + static_cast<std::int64_t>(item) * 64 * K, 128 * K, bar);
      bulk_copy(base + L::kDState, p.d_states + (static_cast<std::int64_t>(item) * K + slice * C) * K,
                2 * K * C, bar);
      bulk_copy(base + L::kState, p.states + (state * K + slice * C) * K, 2 * K * C, bar);
    }
    const bf16* from = row_of(p.d_out, c.row, c.token, hv);
    const int step = static_cast<int>(p.d_out.token);
#pragma unroll
    for (int i = tid; i < 8 * K; i += kThreads) {
      const int row = i / (K / 8), piece = i % (K / 8);
      const bool valid = row < c.length;
      copy16(base + L::kDOut + row_tile(64, row, piece), from + (valid ? row : 0) * step + 8 * piece, valid);
    }
    copy_commit();
  }

  // e^{g} and q, k of this thread's channel and 16 tokens.
  float e[16];
  std::uint32_t qk[16];
  float rate = 1.f, bias = 0.f;
  if (Gated) {
    if (p.a_log) rate = expf(p.a_log[hv]);
    if (p.dt_bias) bias = p.dt_bias[hv * K + channel];
  }
  const std::int64_t g_row = index_of(p.g, c.row, c.token, hv) + channel;
  {
    const char *q_row, *k_row;
    std::int64_t q_step = p.q.token, k_step = p.k.token;
    const std::int64_t token = c.token + 16 * block;
    if (p.l2norm) {
      const std::int64_t row = (c.row * p.tokens + token) * p.heads + h;
      q_row = reinterpret_cast<const char*>(p.q_norm + row * K + channel);
      k_row = reinterpret_cast<const char*>(p.k_norm + row * K + channel);
      q_step = k_step = p.heads * K;
    } else {
      q_row = reinterpret_cast<const char*>(row_of(p.q, c.row, token, h) + channel);
      k_row = reinterpret_cast<const char*>(row_of(p.k, c.row, token, h) + channel);
    }
    const int left = c.length - 16 * block;  // tokens from here on; those past the end count as zero
    by_type(p.g, [&](auto is_bf16) {
      constexpr bool kHalf = is_bf16.value;
      const char* from =
          static_cast<const char*>(p.g.data) + (g_row + 16 * block * p.g.token) * (kHalf ? 2 : 4);
      const std::int64_t g_step = p.g.token * (kHalf ? 2 : 4);
      load_column<kHalf>(qk, e, q_row, 2 * q_step, k_row, 2 * k_step, from, g_step, left);
    });
  }
  for (int i = tid; i < 64; i += kThreads) {
    floats(L::kBeta)[i] =
        i < c.length ? beta_value(p, load_real(p.beta, index_of(p.beta, c.row, c.token + i, hv))) : 0.f;
  }
  {
    float product = 1.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (Gated) e[i] = 16 * block + i < c.length ? gate_value(p, e[i] + bias, rate) : 0.f;
      e[i] = exp2_fast(e[i] * kLog2e);
      if (i > 0) product *= e[i];
    }
    floats(L::kFirst)[block * C + lc] = e[0];
    floats(L::kRest)[block * C + lc] = product;
  }
  __syncthreads();  // A: first and rest are written, the barrier is initialised
  // From here `rest` is the step from this block's anchor to the next one's.
  if (block < 3) floats(L::kRest)[block * C + lc] *= floats(L::kFirst)[(block + 1) * C + lc];
  // v for D . v: this warp's 8 tokens, 64 columns.
  std::uint32_t v[8];
  if constexpr (part != Part::intra) {
    const int token = 8 * warp + lane / 4;
    const bf16* from = row_of(p.v, c.row, c.token + token, hv) + 64 * slice + 2 * (lane % 4);
#pragma unroll
    for (int x = 0; x < 8; ++x) v[x] = load32(from + 8 * x, token < c.length);
  }
  if constexpr (part != Part::intra) {
    copy_wait<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_wait(bar, 0);
  }
  __syncthreads();  // B: all tiles are there

  if constexpr (part == Part::all) prefetch_inputs<K>(p);
  float aq[16], aw[16], au[16];
  if constexpr (part != Part::intra) {
    // 32 columns of dP and dM per warpgroup, then 32 channels of the products with the states.
    float dp[16], dm[16];
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) {
      const std::uint32_t at = 2048 * ks, half = at + 512 * quarter;
      multiply<32, false>(dp, of_rows(base + L::kDOut + ks / 4 * 8192 + ks % 4 * 32),
                          of_blocks(base + L::kNew + half), ks > 0);
      multiply<32, true>(dm, of_blocks(base + L::kDx + at), of_blocks(base + L::kNew + half), ks > 0);
    }
    wgmma_commit();
    // D . v: this warp's 8 tokens and 64 columns of V.
    {
      const int token = 8 * warp + lane / 4, mat = lane / 8, r = lane % 8;
      float sum = 0.f;
#pragma unroll
      for (int x = 0; x < 8; x += 4) {
        std::uint32_t d[4];
        ldmatrix_t(d, base + L::kDx + (((8 * slice + x + mat) * 8 + warp) * 8 + r) * 16);
#pragma unroll
        for (int y = 0; y < 4; ++y) {
          sum = fmaf(low(d[y]), low(v[x + y]), sum);
          sum = fmaf(high(d[y]), high(v[x + y]), sum);
        }
      }
      sum = token < c.length ? sum : 0.f;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) floats(L::kBetaV)[token] = sum;
    }
    // rowsum over V of S dS: warp = block column of 8 channels.
    {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int vb = 0; vb < K / 8; ++vb) {
        const int word = (vb * 8 + warp) * 32 + lane;
        const std::uint32_t x = reinterpret_cast<const std::uint32_t*>(smem + L::kState)[word];
        const std::uint32_t y = reinterpret_cast<const std::uint32_t*>(smem + L::kDState)[word];
        sum.x = fmaf(low(x), low(y), sum.x);
        sum.y = fmaf(high(x), high(y), sum.y);
      }
#pragma unroll
      for (int off = 4; off < 32; off *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, off);
        sum.y += __shfl_xor_sync(~0u, sum.y, off);
      }
      if (lane < 4) *reinterpret_cast<float2*>(floats(L::kLast) + 8 * warp + 2 * lane) = sum;
    }
    wgmma_wait<0>();
    // Lane (g, t) holds rows g, g + 8 and columns 2t, 2t + 1 of each 8 columns.
    {
      const int g = lane / 4, t = lane % 4;
      float* on_diagonal = floats(L::kPairs) + ((tokens16 * 16 + g) * 16 + 2 * t) * 2;
      float* below = floats(L::kLow) + (tokens16 * (tokens16 - 1) * 16 + g) * kPitch + 2 * t;
      float* out = inter + 3 * 64 * C + (16 * tokens16 + g) * 64 + 32 * quarter + 2 * t;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int column = 2 * quarter + b;
#pragma unroll
        for (int y = 0; y < 4; ++y) {
          const int at = 8 * b + 2 * y, i = y % 2 * 8, j = y / 2 * 8;  // less g and 2t
          const float2 x = make_float2(dp[at] * p.scale, dp[at + 1] * p.scale);
          const float2 z = make_float2(-dm[at], -dm[at + 1]);
          if constexpr (part == Part::inter) {
            *reinterpret_cast<float2*>(out + i * 64 + b * 16 + j) = x;
            *reinterpret_cast<float2*>(out + i * 64 + b * 16 + j + 4096) = z;
          } else if (column == tokens16) {
            const int above = j + 2 * t - i - g;  // column less row
            *reinterpret_cast<float4*>(on_diagonal + (i * 16 + j) * 2) =
                make_float4(above > 0 ? 0.f : x.x, above >= 0 ? 0.f : z.x, above >= 0 ? 0.f : x.y,
                            above >= -1 ? 0.f : z.y);
          } else if (column < tokens16) {
            float* to = below + (column * 32 + i) * kPitch + j;
            *reinterpret_cast<float2*>(to) = make_float2(x.x * kNudge, x.y * kNudge);
            *reinterpret_cast<float2*>(to + 16 * kPitch) = make_float2(z.x * kNudge, z.y * kNudge);
          }
        }
      }
    }
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) {
      const std::uint32_t at = 2048 * ks, half = at + 512 * quarter;
      multiply<32, false>(aq, of_rows(base + L::kDOut + ks / 4 * 8192 + ks % 4 * 32),
                          of_blocks(base + L::kState + half), ks > 0);
      multiply<32, true>(aw, of_blocks(base + L::kDx + at), of_blocks(base + L::kState + half), ks > 0);
      multiply<32, true>(au, of_blocks(base + L::kNew + at), of_blocks(base + L::kDState + half), ks > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  const int r0 = 16 * tokens16 + lane / 4;  // rows r0, r0 + 8 of the fragments
  auto each = [&](auto body) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int ch = 32 * quarter + 8 * n + 2 * (lane % 4);
      body(n, ch);
    }
  };
  if constexpr (part == Part::inter) {
    each([&](int n, int ch) {
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const int at = (r0 + 8 * y) * C + ch;
        *reinterpret_cast<float2*>(inter + at) = make_float2(aq[4 * n + 2 * y], aq[4 * n + 2 * y + 1]);
        *reinterpret_cast<float2*>(inter + 64 * C + at) =
            make_float2(aw[4 * n + 2 * y], aw[4 * n + 2 * y + 1]);
        *reinterpret_cast<float2*>(inter + 2 * 64 * C + at) =
            make_float2(au[4 * n + 2 * y], au[4 * n + 2 * y + 1]);
      }
    });
    __syncthreads();
    if (tid < 64) inter[3 * 64 * C + 8192 + tid] = floats(L::kBetaV)[tid];
    if (tid < C) inter[3 * 64 * C + 8256 + tid] = floats(L::kLast)[tid];
    return;
  }
  if constexpr (part == Part::intra) {
    each([&](int n, int ch) {
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        const float* at = inter + (r0 + y / 2 * 8) * C + ch + y % 2;
        aq[4 * n + y] = at[0], aw[4 * n + y] = at[64 * C], au[4 * n + y] = at[2 * 64 * C];
      }
    });
    for (int x = tid; x < 8192; x += kThreads) {
      const int m = x / 4096, i = x / 64 % 64, j = x % 64, ib = i / 16, jb = j / 16;
      if (jb > ib) continue;
      const float value = inter[3 * 64 * C + x];
      if (ib == jb) {
        floats(L::kPairs)[((jb * 16 + i % 16) * 16 + j % 16) * 2 + m] = (m ? i <= j : i < j) ? 0.f : value;
      } else {
        floats(L::kLow)[(((ib * (ib - 1) / 2 + jb) * 2 + m) * 16 + i % 16) * kPitch + j % 16] =
            value * kNudge;
      }
    }
    if (tid < 64) floats(L::kBetaV)[tid] = inter[3 * 64 * C + 8192 + tid];
    if (tid < C) floats(L::kLast)[tid] = inter[3 * 64 * C + 8256 + tid];
  }
  __syncthreads();  // C: the tiles are free
  if (block > 0) {
    float f = kNudge;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i > 0) f *= e[i];
      const int at = (16 * (block - 1) + i) * L::kRow + lc;
      floats(L::kQ)[at] = low(qk[i]) * f;
      floats(L::kKb)[at] = high(qk[i]) * f * floats(L::kBeta)[16 * block + i];
    }
  }
  if (block < 3) {
    float f = floats(L::kFirst)[(block + 1) * C + lc] * kNudge;
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      floats(L::kKs)[(16 * block + i) * L::kRow + lc] = high(qk[i]) * f;
      f *= e[i];
    }
  }

  // dS v_new as it is, for the last row's share of dG.
  each([&](int n, int ch) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      *reinterpret_cast<float2*>(floats(L::kPlain) + sum_index(r0 + 8 * y, ch)) =
          make_float2(au[4 * n + 2 * y], au[4 * n + 2 * y + 1]);
    }
  });
  __syncthreads();  // the scaled copies, dP and dM are written
  // Between the 16-token blocks.
  {
    auto scale_by = [&](float(&acc)[16], float2 f, int n) {
      acc[4 * n] *= f.x, acc[4 * n + 1] *= f.y, acc[4 * n + 2] *= f.x, acc[4 * n + 3] *= f.y;
    };
    auto factor = [&](int at, int block, int ch) {
      return *reinterpret_cast<const float2*>(floats(at) + block * C + ch);
    };
    auto bits = [&](int at) { return __float_as_uint(*reinterpret_cast<const float*>(smem + at)); };
    const int g = lane / 4, t = lane % 4;
    each([&](int n, int ch) {
      const float2 f = factor(L::kFirst, 0, ch);
      scale_by(aq, make_float2(p.scale * f.x, p.scale * f.y), n);
      scale_by(aw, make_float2(-f.x, -f.y), n);
    });
#pragma unroll 1
    for (int jb = 0; jb < tokens16; ++jb) {
      each([&](int n, int ch) {
        const float2 f = factor(L::kRest, jb, ch);
        scale_by(aq, f, n), scale_by(aw, f, n);
      });
      const int pair = tokens16 * (tokens16 - 1) / 2 + jb;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        std::uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int at = L::kLow + (((pair * 2 + m) * 16 + g) * kPitch + 8 * s + t) * 4;
          a[m][0] = bits(at), a[m][1] = bits(at + 8 * kPitch * 4);
          a[m][2] = bits(at + 16), a[m][3] = bits(at + 8 * kPitch * 4 + 16);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int at = L::kKs + ((16 * jb + 8 * s + t) * L::kRow + 32 * quarter + 8 * n + g) * 4;
          const std::uint32_t b0 = bits(at), b1 = bits(at + 4 * L::kRow * 4);
          mma_tf32(aq + 4 * n, a[0], b0, b1);
          mma_tf32(aw + 4 * n, a[1], b0, b1);
        }
      }
    }
#pragma unroll 1
    for (int ib = 3; ib > tokens16; --ib) {
      each([&](int n, int ch) { scale_by(au, factor(L::kRest, ib, ch), n); });
      const int pair = ib * (ib - 1) / 2 + tokens16;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        std::uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int at = L::kLow + (((pair * 2 + m) * 16 + 8 * s + t) * kPitch + g) * 4;
          a[m][0] = bits(at), a[m][1] = bits(at + 32);
          a[m][2] = bits(at + 4 * kPitch * 4), a[m][3] = bits(at + 4 * kPitch * 4 + 32);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int at = ((16 * (ib - 1) + 8 * s + t) * L::kRow + 32 * quarter + 8 * n + g) * 4;
          mma_tf32(au + 4 * n, a[0], bits(L::kQ + at), bits(L::kQ + at + 4 * L::kRow * 4));
          mma_tf32(au + 4 * n, a[1], bits(L::kKb + at), bits(L::kKb + at + 4 * L::kRow * 4));
        }
      }
    }
  }
  __syncthreads();  // D: the scaled copies are free
  each([&](int n, int ch) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      float* at = floats(L::kSums) + sum_index(r0 + 8 * y, ch);
      *reinterpret_cast<float2*>(at) = make_float2(aq[4 * n + 2 * y], aq[4 * n + 2 * y + 1]);
      *reinterpret_cast<float2*>(at + 64 * C) = make_float2(aw[4 * n + 2 * y], aw[4 * n + 2 * y + 1]);
      *reinterpret_cast<float2*>(at + 2 * 64 * C) = make_float2(au[4 * n + 2 * y], au[4 * n + 2 * y + 1]);
    }
  });
  __syncthreads();  // E: the sums are there

  // Rows i from the last to the first, each against the j before it: U_i is complete when its turn comes,
  // so Q and W need no arrays. d_gate[i] = dG_i + ... + dG_15.
  float d_gate[16], wk[16];
  {
    const float* sums = floats(L::kSums);
    float u[16], k[16], before[16];
    {
      float key_sum = 0.f, f = 1.f, to_end = 1.f;
      if (block < 3) to_end = floats(L::kFirst)[(block + 1) * C + lc];
      for (int b = block + 1; b < 4; ++b) to_end *= floats(L::kRest)[b * C + lc];
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        k[i] = high(qk[i]);
        key_sum = fmaf(k[i] * f, floats(L::kPlain)[sum_index(16 * block + i, lc)], key_sum);
        f *= e[i];
      }
      key_sum *= to_end;
      if (block == 0) key_sum = fmaf(to_end * f, floats(L::kLast)[lc], key_sum);  // e^{G_L} rowsum(S dS)
      floats(L::kKeySum)[block * C + lc] = key_sum;
      f = block < 3 ? floats(L::kFirst)[(block + 1) * C + lc] : 1.f;
#pragma unroll
      for (int i = 15; i >= 0; --i) {
        u[i] = f * sums[sum_index(16 * block + i, lc) + 2 * 64 * C];
        f *= e[i];
      }
      before[0] = 1.f;
#pragma unroll
      for (int i = 1; i < 16; ++i) before[i] = before[i - 1] * e[i];
    }
    const float* beta = floats(L::kBeta) + 16 * block;
    const float4* pairs = reinterpret_cast<const float4*>(smem + L::kPairs) + block * 128;
    // Pointers to the row at hand; dq and dk go out as bf16, or as fp32 parts of a sum over heads.
    const bool parts = p.q_part != nullptr;
    const int q_step = static_cast<int>(p.d_q.token), k_step = static_cast<int>(p.d_k.token);
    const int part_step = p.value_heads * K;
    const std::int64_t token = c.token + 16 * block + 15;
    const std::int64_t at_part = ((c.row * p.tokens + token) * p.value_heads + hv) * K + channel;
    float *q_part = p.q_part + at_part, *k_part = p.k_part + at_part;
    bf16 *dq = row_of(p.d_q, c.row, token, hv) + channel, *dk = row_of(p.d_k, c.row, token, hv) + channel;
    float carry = 0.f;
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      const int at = sum_index(16 * block + i, lc), t = 16 * block + i;
      const float q = low(qk[i]), b = beta[i], bk = b * k[i];
      float x = before[i] * sums[at], w = before[i] * sums[at + 64 * C], decay = e[i];
      auto visit = [&](int j, float dp, float dm) {
        if (j > i) return;
        if (j == i) {
          x = fmaf(dp, k[i], x);
          u[i] = fmaf(dp, q, u[i]);
          return;
        }
        const float kd = k[j] * decay;
        x = fmaf(dp, kd, x);
        w = fmaf(dm, kd, w);
        u[j] = fmaf(decay, fmaf(dp, q, dm * bk), u[j]);
        decay *= e[j];
      };
#pragma unroll
      for (int j = i / 2 * 2; j >= 0; j -= 2) {
        const float4 d = pairs[i * 8 + j / 2];
        visit(j + 1, d.z, d.w);
        visit(j, d.x, d.y);
      }
      const float bw = b * w, d_k = u[i] + bw;
      const bool valid = t < c.length;
      if (!parts) {
        store16(dq, x, valid), store16(dk, d_k, valid);
        dq -= q_step, dk -= k_step;
      } else {
        store32(q_part, x, valid), store32(k_part, d_k, valid);
        q_part -= part_step, k_part -= part_step;
      }
      carry += fmaf(q, x, k[i] * (bw - u[i]));
      d_gate[i] = carry;
      wk[i] = w * k[i];
    }
  }
  floats(L::kBlockSum)[block * C + lc] = d_gate[0];
  reduce_many<16>(wk, [](float a, float b) { return a + b; });
  if (lane % 2 == 0) floats(L::kBetaK)[lc / 32 * 64 + 16 * block + lane / 2] = wk[0];
  __syncthreads();  // F

  float after = 0.f;
#pragma unroll
  for (int b = 0; b < 4; ++b) after += floats(L::kKeySum)[b * C + lc];
  for (int b = 3; b > block; --b) after += floats(L::kBlockSum)[b * C + lc];
  float bias_sum = 0.f, rate_sum = 0.f;
  {
    const int step = static_cast<int>(p.d_g.token);
    const std::int64_t out = index_of(p.d_g, c.row, c.token, hv) + channel;
    if constexpr (Gated) {
      const int g_step = static_cast<int>(p.g.token);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int t = 16 * block + i;
        if (t >= c.length) continue;
        float of_rate;
        d_gate[i] =
            gate_gradient(p, load_real(p.g, g_row + t * g_step) + bias, rate, d_gate[i] + after, of_rate);
        bias_sum += d_gate[i], rate_sum += of_rate;
      }
      after = 0.f;
    }
    by_type(p.d_g, [&](auto is_bf16) {
      using T = std::conditional_t<is_bf16.value, bf16, float>;
      T* to = static_cast<T*>(p.d_g.data) + out + 16 * block * p.d_g.token;
      const int left = c.length - 16 * block;
#pragma unroll
      for (int i = 0; i < 16; ++i, to += step) {
        if constexpr (is_bf16.value) {
          store16(to, d_gate[i] + after, i < left);
        } else {
          store32(to, d_gate[i] + after, i < left);
        }
      }
    });
  }
  if (tid < c.length) {
    const float d = floats(L::kBetaV)[tid] + floats(L::kBetaK)[tid] + floats(L::kBetaK)[64 + tid];
    if constexpr (kSlices > 1) {
      p.beta_part[(static_cast<std::int64_t>(item) * kSlices + slice) * 64 + tid] = d;
    } else {
      store_real(p.d_beta, index_of(p.d_beta, c.row, c.token + tid, hv),
                 beta_gradient(p, floats(L::kBeta)[tid], d));
    }
  }
  if (p.bias_part) {
    __syncthreads();
    floats(L::kSums)[block * C + lc] = bias_sum;
    floats(L::kSums)[(4 + block) * C + lc] = rate_sum;
    __syncthreads();
    if (block == 0) {
      float b = 0.f, r = 0.f;
#pragma unroll
      for (int x = 0; x < 4; ++x) b += floats(L::kSums)[x * C + lc], r += floats(L::kSums)[(4 + x) * C + lc];
      p.bias_part[static_cast<std::int64_t>(item) * K + channel] = b;
      p.a_log_part[static_cast<std::int64_t>(item) * K + channel] = r;
    }
  }
}

template <int K, Part part, bool Gated>
void launch(const Job& job, cudaStream_t stream) {
  const auto slots = static_cast<unsigned>(job.slots());
  const dim3 blocks(static_cast<unsigned>(job.value_heads) * (K / kSlice), std::min(slots, kGridRows),
                    (slots + kGridRows - 1) / kGridRows);
  cudaFuncSetAttribute(gradients_kernel<K, part, Gated>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       Layout<K>::kSize);
  gradients_kernel<K, part, Gated><<<blocks, 256, Layout<K>::kSize, stream>>>(job);
}

// dbeta from the two slices of K.
__global__ void beta_kernel(const Job p) {
  const int item = blockIdx.x * 4 + threadIdx.x / 64, i = threadIdx.x % 64, hv = item % p.value_heads;
  Chunk c;
  if (item >= static_cast<int>(p.slots()) * p.value_heads || !find_chunk(p, item / p.value_heads, c) ||
      i >= c.length)
    return;
  const float* part = p.beta_part + static_cast<std::int64_t>(item) * 128 + i;
  const float b = beta_value(p, load_real(p.beta, index_of(p.beta, c.row, c.token + i, hv)));
  store_real(p.d_beta, index_of(p.d_beta, c.row, c.token + i, hv), beta_gradient(p, b, part[0] + part[64]));
}

template <int K, bool Gated>
void launch_parts(const Job& job, cudaStream_t stream) {
  if (job.unfused) {
    launch<K, Part::inter, Gated>(job, stream);
    launch<K, Part::intra, Gated>(job, stream);
  } else {
    launch<K, Part::all, Gated>(job, stream);
  }
  if (K > kSlice) {
    beta_kernel<<<static_cast<unsigned>((job.slots() * job.value_heads + 3) / 4), 256, 0, stream>>>(job);
  }
}

}  // namespace

void launch_gradients(const Job& job, cudaStream_t stream) {
  if (job.slots() == 0) return;
  const bool gated = job.gate != Gate::none;
  if (job.dim == 128) {
    gated ? launch_parts<128, true>(job, stream) : launch_parts<128, false>(job, stream);
  } else {
    gated ? launch_parts<64, true>(job, stream) : launch_parts<64, false>(job, stream);
  }
}

}  // namespace rlk::cuda::kda90
