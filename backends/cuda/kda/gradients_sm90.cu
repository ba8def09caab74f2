// KDA backward, everything that is local to a chunk, in one kernel: a block per (chunk, value head, 64
// channels of K), two blocks on a multiprocessor, so that one loads while the other multiplies.
//
// With S the state before the chunk, dS the gradient of the state after it, D = A^T dvnew (from the reverse
// scan):
//   dP_ij = scale do_i . v_new_j  (i >= j)         dM_ij = -D_i . v_new_j  (i > j)
//   Q_i = scale e^{G_i} (S do_i) + sum_j dP_ij E_ij k_j
//   W_i = -e^{G_i} (S D_i) + sum_j dM_ij E_ij k_j
//   U_j = e^{G_L - G_j} (dS v_new_j) + sum_i E_ij (dP_ij q_i + dM_ij beta_i k_i)
//   dq = Q     dk = U + beta W     dbeta = D . v_new / beta     dG = q Q + beta k W - k U,
//   and on the last row also e^{G_L} rowsum(S dS) + sum_j e^{G_L - G_j} k_j (dS v_new_j)
// A beta too small to divide by has dbeta = D . v + W . k, which is the same but for rounding, and for that
// cancels where keys are nearly parallel.
// The gradient of the inverse needs no 64^3 products: x = (I + M) v_new is a linear solve, so dM = -stril(D
// v_new^T). The code holds -dM and -W and multiplies -beta k: no sign is ever changed.
//
// Everything lies as wgmma leaves it, channels down and tokens across: a warp owns 16 channels of 32 tokens,
// a lane the channels g, g + 8 (g = lane / 4) of the tokens 2t, 2t + 1 (t = lane % 4) of each group of 8.
// What was accumulated is the next operand, so no sum moves between lanes.
//
// Decays: pairs of tokens meet by halving. Blocks of 16 tokens are taken one after the other; inside a block
// the upper 8 tokens meet the lower 8, then 4 meet 4, 2 meet 2, by tensor cores, and neighbours in fp32. Each
// factor runs from a token to the bound between the two sides, so none exceeds 1: the upper side has p_i, the
// product of e^{g} from the bound to i, the lower side s_j, the product behind j up to the bound. Sums
// already taken are carried from bound to bound by the product of the group crossed (Horner).
//
// All products of this kind run in tf32. dP and dM are rounded to it once and serve both tokens of a pair, so
// their rounding cancels in dG as the pair does. Where the gate is computed here d_a_log, a sum over all
// tokens of what is left, needs more: inside a block, where gates leave most of the weight, k s, q p and k p
// are in two terms and their rounding nearly cancels too. In one term d_a_log was up to 7 times further off;
// no other gradient was, so log decays that come from outside make do with one. For the same sum v_new and dS
// come in two terms of bf16 there, the second where q, k and g are loaded later.
//
// The products over V are wgmma straight from the tiles as they arrive: 64 channels x 32 tokens
// per warpgroup, and all of dP by the first, all of dM by the second; do comes as swizzled rows, the rest as
// 8 x 8 blocks, which wgmma takes turned.
//
// Where sequences are rows of a batch and g is fp32, the copy engine brings every tile and takes dq, dk and
// dg away: it knows where a tensor ends, and computes the addresses that were a seventh of the instructions.
//
// Per token and head, K = V = 128: reads 8K (states) + 10K (v_new, D, do, q, k: 2K each) + 4K
// (g), writes 4K + 4K: 3.8 kB; dP, dM and fp32 dq, dk never reach memory. With Call::unfused they do: the
// same code in two kernels, 2 x 12K + 2 x 512 bytes more per token, kept to show what the fusion is worth.
#include <algorithm>

#include "cuda/hopper/wgmma.cuh"
#include "cuda/kda/maps.cuh"

namespace rlk::cuda::kda {
namespace {

enum class Part { all, inter, intra };

// What wgmma reads, 16 steps of V at byte `at`: a tile of 8 x 8 blocks, [V / 8][8], whose columns are the
// operand's rows; and a tile of swizzled rows.
__device__ inline std::uint64_t of_blocks(std::uint32_t base, std::uint32_t at) {
  return Descriptor(base >> 4, 1024 / 16, 128 / 16, Swizzle::none).at(at >> 4);
}
__device__ inline std::uint64_t of_rows(std::uint32_t base, std::uint32_t at) {
  return Descriptor(base >> 4, 1, 1024 / 16, Swizzle::bytes128).at(at >> 4);
}
template <bool TurnedA, bool TurnedB, int Size>
__device__ inline void multiply(float (&acc)[Size], std::uint64_t a, std::uint64_t b, bool more) {
  wgmma<bf16, TurnedA, TurnedB>(acc, a, b, more);
}

// Tensor cores cut tf32 operands: rounded first, they have no bias.
__device__ inline std::uint32_t tf32(float x) {
  std::uint32_t y;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

constexpr float kFaint = 0x1p-64f;     // a beta below this is not divided by
constexpr unsigned kNoHalf = ~0u;      // a NaN that no sum gives
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
  // In their place, once the products are done.
  static constexpr int kCells = 0;                    // [i / 8][j / 8][P, M][8][8], see cell_row
  static constexpr int kLower = kCells + 64 * 512;    // k s of 8-groups 0-5: [group][strip][lane] fragments
  static constexpr int kUpper = kLower + 6 * 2048;    // q p of 8-groups 2-7
  static constexpr int kWrite = kUpper + 6 * 2048;    // -beta k p of 8-groups 2-7
  static constexpr int kPass = kWrite + 6 * 2048;     // [16-block][channel]: product of its e^{g}
  static constexpr int kKey = kPass + 16 * kSlice;    // [half][channel]
  static constexpr int kGates = kKey + 8 * kSlice;    // [channel]: sum of dG over the later half
  static constexpr int kBetaK = kGates + 4 * kSlice;  // [strip][token]
  static constexpr int kBias = kBetaK + 1024;         // [half][d_dt_bias, d_a_log][channel]
  static constexpr int kAfterEnd = kBias + 16 * kSlice;
  // Throughout.
  static constexpr int kQ = (std::max(kTilesEnd, kAfterEnd) + 1023) / 1024 * 1024;  // q, later dq   rows
  static constexpr int kK = kQ + 8192;                                              // k, later dk   rows
  // g: bf16 rows, or fp32: two slices of 32 channels as rows, see Maps, or whole rows with pieces permuted.
  static constexpr int kG = kK + 8192;
  static constexpr int kBeta = kG + 16384;    // [token]
  static constexpr int kBetaV = kBeta + 256;  // D . v
  static constexpr int kLast = kBetaV + 256;  // rowsum(S dS)
  // Where the gate is computed here, until q, k and g are loaded.
  static constexpr int kNewRest = kG;     // what rounding left of v_new
  static constexpr int kDStateRest = kQ;  // of dS
  static constexpr int kBar = kLast + 4 * kSlice;
  static constexpr int kSize = kBar + 16;
  static_assert(kSize <= 113 * 1024);
  static_assert(kNewRest + 128 * V <= kBeta && kDStateRest + 2 * V * kSlice <= kG);
};

// Rows of an 8 x 8 fp32 cell are permuted so that lanes which read (g, 2t), (g, 2t + 1) and lanes which read
// (2t, g) or (2t + 1, g) all meet 32 banks.
__device__ inline int cell_row(int i) { return (i >> 2) * 32 + ((i >> 1 & 1) + 2 * ((i ^ i >> 2) & 1)) * 8; }

// What a lane's tokens 2t, 2t + 1 need to know of the others of its channel in the same 8 tokens: the product
// over the neighbouring pair and over the other four, and that of all eight.
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

template <bool BySequence>
__device__ inline bool chunk_of_block(const Job& p, Chunk& c) {
  if (!BySequence && !by_sequence(p)) {
    const std::int64_t slot = blockIdx.y + static_cast<std::int64_t>(blockIdx.z) * kGridRows;
    return slot < p.slots() && find_chunk(p, static_cast<int>(slot), c);
  }
  c.sequence = blockIdx.z, c.index = blockIdx.y, c.slot = c.sequence * p.slots_each + c.index;
  c.row = c.sequence, c.token = c.index * kChunk;
  c.length = static_cast<int>(min(p.tokens - c.token, std::int64_t{kChunk}));
  return true;
}

struct Maps {
  CUtensorMap d_out, q, k, g, d_q, d_k, d_g;
};
template <int K, Part part, bool Gated, bool Parts, class M>
__global__ void __launch_bounds__(256, 2) gradients_kernel(const Job p, const __grid_constant__ M maps) {
  using L = Layout<K>;
  constexpr int C = kSlice, kThreads = 256, kSlices = K / C;
  constexpr bool kMapped = std::is_same_v<M, Maps>;
  extern __shared__ __align__(1024) char smem[];
  const std::uint32_t base = shared_address(smem), bar = base + L::kBar;
  auto floats = [&](int at) { return reinterpret_cast<float*>(smem + at); };
  const unsigned thread = threadIdx.x;  // unsigned: division by powers of two is a shift
  const int tid = thread, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const int strip = warp & 3, half = warp >> 2;  // this warp's 16 channels and 32 tokens
  const int g = thread % 32 / 4, t = thread % 4, lc = 16 * strip + g;
  const int slice = blockIdx.x % kSlices, hv = blockIdx.x / kSlices;
  Chunk c;
  if (!chunk_of_block<kMapped>(p, c)) return;
  const int item = c.slot * p.value_heads + hv;
  const int h = p.heads == p.value_heads ? hv : hv / (p.value_heads / p.heads);
  // Unfused: what one kernel leaves to the next, by thread; [80] registers, then D . v and rowsum(S dS).
  float* inter = p.inter + (static_cast<std::int64_t>(item) * kSlices + slice) * kInter;

  if constexpr (part != Part::intra) {
    if (tid == 0) {
      barrier_init(bar, 1);
      barrier_init(bar + 8, 1);
      fence_barrier_init();
      fence_async_proxy();
      barrier_expect(bar, L::kDOut + (Gated ? 128 * K + 2 * K * C : 0) + (kMapped ? 128 * K : 0));
      const std::int64_t state = (static_cast<std::int64_t>(c.slot) + c.sequence) * p.value_heads + hv;
      bulk_load(base + L::kNew, p.v_new + static_cast<std::int64_t>(item) * 64 * K, 128 * K, bar);
      bulk_load(base + L::kDx, p.d_x + static_cast<std::int64_t>(item) * 64 * K, 128 * K, bar);
      bulk_load(base + L::kDState, p.d_states + (static_cast<std::int64_t>(item) * K + slice * C) * K,
                2 * K * C, bar);
      bulk_load(base + L::kState, p.states + (state * K + slice * C) * K, 2 * K * C, bar);
      if constexpr (Gated) {
        bulk_load(base + L::kNewRest, p.v_new_rest + static_cast<std::int64_t>(item) * 64 * K, 128 * K, bar);
        bulk_load(base + L::kDStateRest,
                  p.d_states_rest + (static_cast<std::int64_t>(item) * K + slice * C) * K, 2 * K * C, bar);
      }
      if constexpr (kMapped) {
#pragma unroll
        for (int i = 0; i < K / 64; ++i)
          tma_load(base + L::kDOut + i * 8192, &maps.d_out, bar, 64 * i, hv, static_cast<int>(c.token),
                   static_cast<int>(c.row));
        barrier_expect(bar + 8, 2 * 8192 + 16384);
        tma_load(base + L::kQ, &maps.q, bar + 8, slice * C, h, static_cast<int>(c.token),
                 static_cast<int>(c.row));
        tma_load(base + L::kK, &maps.k, bar + 8, slice * C, h, static_cast<int>(c.token),
                 static_cast<int>(c.row));
#pragma unroll
        for (int i = 0; i < 2; ++i)
          tma_load(base + L::kG + i * 8192, &maps.g, bar + 8, slice * C + 32 * i, hv,
                   static_cast<int>(c.token), static_cast<int>(c.row));
      }
    }
  }
  // 64 rows of 16-byte pieces, rows of the tile `pitch` bytes apart; past the end zeros.
  auto load_rows = [&](auto pieces, const void* from, int step, int pitch, auto place) {
    constexpr unsigned kPieces = decltype(pieces)::value, kRows = kThreads / kPieces;
    const int row = thread / kPieces, piece = thread % kPieces;
    const char* at = static_cast<const char*>(from) + 16 * piece;
    const std::uint32_t to = base + place(row, piece);
#pragma unroll
    for (int i = 0; i < static_cast<int>(64 / kRows); ++i) {
      const int r = row + static_cast<int>(kRows) * i;
      const bool valid = r < c.length;
      copy16(to + i * kRows * pitch, rows_on(at, valid ? r : 0, step), valid ? 16 : 0);
    }
  };
  auto tile_at = [](int at) { return [at](int row, int piece) { return at + row_tile(64, row, piece); }; };
  if constexpr (part != Part::intra && !kMapped) {
    load_rows(std::integral_constant<int, K / 8>{}, row_of(p.d_out, c.row, c.token, hv),
              2 * static_cast<int>(p.d_out.token), 128, tile_at(L::kDOut));
  }
  const std::int64_t g_row = index_of(p.g, c.row, c.token, hv) + slice * C;
  auto load_inputs = [&] {  // q, k and g
    constexpr std::integral_constant<int, 8> kEight;
    if (p.l2norm) {
      const std::int64_t row = ((c.row * p.tokens + c.token) * p.heads + h) * K + slice * C;
      load_rows(kEight, p.q_norm + row, 2 * p.heads * K, 128, tile_at(L::kQ));
      load_rows(kEight, p.k_norm + row, 2 * p.heads * K, 128, tile_at(L::kK));
    } else {
      load_rows(kEight, row_of(p.q, c.row, c.token, h) + slice * C, 2 * static_cast<int>(p.q.token), 128,
                tile_at(L::kQ));
      load_rows(kEight, row_of(p.k, c.row, c.token, h) + slice * C, 2 * static_cast<int>(p.k.token), 128,
                tile_at(L::kK));
    }
    if (p.g.bf16) {
      load_rows(kEight, static_cast<const bf16*>(p.g.data) + g_row, 2 * static_cast<int>(p.g.token), 128,
                tile_at(L::kG));
    } else {
      load_rows(std::integral_constant<int, 16>{}, static_cast<const float*>(p.g.data) + g_row,
                4 * static_cast<int>(p.g.token), 256,
                [](int row, int piece) { return L::kG + row * 256 + ((piece ^ (row & 6)) << 4); });
    }
  };
  constexpr bool kLater = Gated && part == Part::all;  // their places are taken
  if constexpr (part != Part::inter && !kLater && !kMapped) load_inputs();
  if constexpr (!kMapped) copy_commit();
  // v of this warp's 8 tokens, 64 columns, for D . v; where that is rare, not before it is needed.
  std::uint32_t v[8];
  auto load_v = [&] {
    const int token = 8 * warp + g;
    const bf16* from = row_of(p.v, c.row, c.token + token, hv) + 64 * slice + 2 * t;
#pragma unroll
    for (int x = 0; x < 8; ++x) v[x] = load32(from + 8 * x, token < c.length);
  };
  if constexpr (Gated && part != Part::intra) load_v();
  bool faint = false;
  if (tid < 64) {
    const float beta =
        tid < c.length ? beta_value(p, load_real(p.beta, index_of(p.beta, c.row, c.token + tid, hv))) : 0.f;
    floats(L::kBeta)[tid] = beta;
    faint = tid < c.length && fabsf(beta) < kFaint;
  }
  if constexpr (!kMapped) {
    copy_wait<0>();
    fence_async_proxy();
  }
  // A: what threads copied is there, the barrier is initialised
  const bool by_sums = __syncthreads_or(faint) || Gated;

  // [4 n + 2 r + x]: token 8 n + 2 t + x of this half, channel g + 8 r of this strip. Of the entries (dP in
  // the first half, -dM in the second): row 16 strip + g + 8 r, column 8 n + 2 t + x.
  float entries[32], aq[16], aw[16], au[16];
  if constexpr (part != Part::intra) {
    barrier_wait(bar, 0);
    const std::uint32_t tokens = base + 512 * half, token_rows = base + 4096 * half;  // of this half
    wgmma_fence();
    auto pairs_with = [&](int at, bool more) {
      if (half == 0) {
#pragma unroll
        for (int ks = 0; ks < K / 16; ++ks)
          multiply<false, true>(entries, of_rows(base, L::kDOut + ks / 4 * 8192 + ks % 4 * 32),
                                of_blocks(base, at + 2048 * ks), more || ks > 0);
      } else {
#pragma unroll
        for (int ks = 0; ks < K / 16; ++ks)
          multiply<true, true>(entries, of_blocks(base, L::kDx + 2048 * ks), of_blocks(base, at + 2048 * ks),
                               more || ks > 0);
      }
    };
    auto keys_with = [&](int d_state, int at, bool more) {
#pragma unroll
      for (int ks = 0; ks < K / 16; ++ks)
        multiply<true, true>(au, of_blocks(base, d_state + 2048 * ks), of_blocks(tokens, at + 2048 * ks),
                             more || ks > 0);
    };
    pairs_with(L::kNew, false);
    if constexpr (Gated) pairs_with(L::kNewRest, true);
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks)
      multiply<true, false>(aq, of_blocks(base, L::kState + 2048 * ks),
                            of_rows(token_rows, L::kDOut + ks / 4 * 8192 + ks % 4 * 32), ks > 0);
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks)
      multiply<true, true>(aw, of_blocks(base, L::kState + 2048 * ks), of_blocks(tokens, L::kDx + 2048 * ks),
                           ks > 0);
    keys_with(L::kDState, L::kNew, false);
    if constexpr (Gated) {
      keys_with(L::kDState, L::kNewRest, true);
      keys_with(L::kDStateRest, L::kNew, true);
    }
    wgmma_commit();
    // rowsum(S dS) of this warp's 8 channels over all of V, and for a faint beta D . v of its 8 tokens over
    // 64 columns: the diagonals of 8 x 8 products.
    const int mat = lane / 8, r = lane % 8;
    std::uint32_t d[4];
    if (by_sums) {
      if constexpr (!Gated) load_v();
      // Of a product's 16 rows one 8 are wanted, so the other half of its operand may be anything at hand.
      float x[4] = {0.f, 0.f, 0.f, 0.f}, x8[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const int block = 8 * slice + i + (mat >> 1) + 2 * (mat & 1);
        ldmatrix_transposed(d, base + L::kDx + ((block * 8 + warp) * 8 + r) * 16);
        mma_bf16(x, d, v[i], v[i + 1]);
        mma_bf16(x8, d, v[i + 2], v[i + 3]);
      }
      if (g / 2 == t) floats(L::kBetaV)[8 * warp + g] = g % 2 ? x[1] + x8[3] : x[0] + x8[2];
    }
    {
      float y[4] = {0.f, 0.f, 0.f, 0.f};
      auto add = [&](int d_state) {
#pragma unroll
        for (int vb = 0; vb < K / 8; vb += 2) {
          ldmatrix_transposed(
              d, base + (mat & 1 ? d_state : L::kState) + (((vb + (mat >> 1)) * 8 + warp) * 8 + r) * 16);
          mma_bf16(y, d, d[1], d[3]);
        }
      };
      add(L::kDState);
      if constexpr (Gated) add(L::kDStateRest);
      if (g / 2 == t) floats(L::kLast)[8 * warp + g] = g % 2 ? y[1] : y[0];
    }
    if constexpr (part == Part::inter) {
      wgmma_wait<0>();
      wgmma_fence_operand(entries), wgmma_fence_operand(aq), wgmma_fence_operand(aw), wgmma_fence_operand(au);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float* to = inter + i * kThreads + tid;
        to[0] = entries[i], to[16 * kThreads] = entries[16 + i];
        to[32 * kThreads] = aq[i], to[48 * kThreads] = aw[i], to[64 * kThreads] = au[i];
      }
      __syncthreads();
      if (tid < 64 && by_sums) inter[80 * kThreads + tid] = floats(L::kBetaV)[tid];
      if (tid < C) inter[80 * kThreads + 64 + tid] = floats(L::kLast)[tid];
      return;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float* from = inter + i * kThreads + tid;
      entries[i] = from[0], entries[16 + i] = from[16 * kThreads];
      aq[i] = from[32 * kThreads], aw[i] = from[48 * kThreads], au[i] = from[64 * kThreads];
    }
    if (tid < 64 && by_sums) floats(L::kBetaV)[tid] = inter[80 * kThreads + tid];
    if (tid < C) floats(L::kLast)[tid] = inter[80 * kThreads + 64 + tid];
  }

  if constexpr (kLater) {
    wgmma_wait<0>();
    wgmma_fence_operand(entries), wgmma_fence_operand(aq), wgmma_fence_operand(aw), wgmma_fence_operand(au);
    __syncthreads();
    load_inputs();
    copy_commit();
    copy_wait<0>();
    __syncthreads();
  }
  // e^{g} by the same index.
  float e[16], rate = 1.f, bias[2] = {0.f, 0.f};
  if (Gated) {
    if (p.a_log) rate = expf(p.a_log[hv]);
    if (p.dt_bias) {
#pragma unroll
      for (int r = 0; r < 2; ++r) bias[r] = p.dt_bias[hv * K + slice * C + lc + 8 * r];
    }
  }
  // Of a tile of rows: 8-groups n, n + 1 and channels r = 0, 1 as pairs of tokens, [2 n + r]; ldmatrix and
  // stmatrix.
  const int pieces = row_tile(64, 32 * half + lane / 16 * 8 + lane % 8, 2 * strip + lane / 8 % 2);
  // The token of entry i of such an array.
  auto token_of = [&](int i) { return 32 * half + i / 4 * 8 + 2 * t + i % 2; };
  // Of the slices of fp32 rows: entry i, from this lane's place in row 2 t of its half.
  auto gate_piece = [&](int i) {
    return i / 4 * 1024 + i % 2 * 128 + ((4 * (strip % 2) + 2 * (i / 2 % 2) + g / 4 ^ 2 * t ^ i % 2) << 4);
  };
  if constexpr (kMapped) {
    barrier_wait(bar + 8, 0);
    const char* from = smem + L::kG + strip / 2 * 8192 + (32 * half + 2 * t) * 128 + g % 4 * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) e[i] = *reinterpret_cast<const float*>(from + gate_piece(i));
  } else if (p.g.bf16) {
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t x[4];
      ldmatrix_transposed(x, base + L::kG + pieces + n * 1024);
#pragma unroll
      for (int i = 0; i < 4; ++i) e[4 * n + 2 * i] = low(x[i]), e[4 * n + 2 * i + 1] = high(x[i]);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* from = smem + L::kG + (32 * half + 2 * t) * 256 +
                         (((4 * strip + 2 * r + g / 4) ^ (2 * t)) << 4) + g % 4 * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        e[i / 2 * 4 + 2 * r + i % 2] = *reinterpret_cast<const float*>(from + (i / 2 * 8 + i % 2) * 256);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (Gated) e[i] = token_of(i) < c.length ? gate_value(p, e[i] + bias[i / 2 % 2], rate) : 0.f;
    e[i] = exp2_fast(e[i] * kLog2e);
  }
  if constexpr (part == Part::all && !kLater) {
    wgmma_wait<0>();
    wgmma_fence_operand(entries), wgmma_fence_operand(aq), wgmma_fence_operand(aw), wgmma_fence_operand(au);
  }
  __syncthreads();  // B: the tiles are free

  auto cell = [](int ig, int jg) { return L::kCells + (ig * 8 + jg) * 512; };
  const int by_row = (cell_row(g) + 2 * t) * 4;  // (g, 2t), (g, 2t + 1) of a cell
  const int by_column = (cell_row(2 * t) + g) * 4, next_row = (cell_row(2 * t + 1) - cell_row(2 * t)) * 4;
  const float unit = half == 0 ? p.scale : 1.f;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int ig = 2 * strip + r, i = 4 * n + 2 * r;
      if (n > ig) continue;
      *reinterpret_cast<uint2*>(smem + cell(ig, n) + by_row + 256 * half) =
          make_uint2(tf32(entries[i] * unit), tf32(entries[i + 1] * unit));
    }
  }
  // This lane's pairs of e^{g} wait where g was, [2 n + r][thread], and q and k where they came.
  float2* pairs = reinterpret_cast<float2*>(smem + L::kG) + tid;
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i * kThreads] = make_float2(e[2 * i], e[2 * i + 1]);
  // What goes into one term is rounded, or cut by the tensor cores and made larger beforehand by what cutting
  // takes from it on the average.
  constexpr float kCut = Gated ? 1.f : 1.f + 0.361f / 1024;
  auto one_term = [](float x) { return Gated ? tf32(x) : __float_as_uint(x); };
  // One tf32 operand of 8 tokens: k_j s_j; q_i p_i and k_i p_i. `step` carries the factor on from the pair,
  // whose e^{g} are `d`.
  using Operand = float[4];
  using Rounded = std::uint32_t[4];
  auto lower_operand = [](Operand& a, int r, std::uint32_t kk, float2 d, float step) {
    a[r] = low(kk) * (step * d.y);
    a[2 + r] = high(kk) * step;
  };
  auto upper_operands = [](Operand& a, Operand& b, int r, std::uint32_t qq, std::uint32_t kk, float2 d,
                           float step, float2 beta) {
    const float f0 = step * d.x, f1 = f0 * d.y;
    a[r] = low(qq) * f0;
    a[2 + r] = high(qq) * f1;
    b[r] = low(kk) * (beta.x * f0);
    b[2 + r] = high(kk) * (beta.y * f1);
  };
  auto beta_of = [&](int n) {
    const float2 b = *reinterpret_cast<const float2*>(floats(L::kBeta) + 32 * half + 8 * n + 2 * t);
    return make_float2(-b.x, -b.y);
  };
  auto store_operand = [&](int at, int group, const Operand& a) {
    *reinterpret_cast<uint4*>(smem + at + ((group * 4 + strip) * 32 + lane) * 16) =
        make_uint4(one_term(a[0]), one_term(a[1]), one_term(a[2]), one_term(a[3]));
  };
  auto load_operand = [&](Rounded& a, int at, int group) {
    const uint4 x = *reinterpret_cast<const uint4*>(smem + at + ((group * 4 + strip) * 32 + lane) * 16);
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  };

  // Between 16-token blocks: operands and the products to pass, for both halves; and of the last row's share
  // sum_j s_j k_j (dS v_new_j), s_j up to the end of the block.
  float key[2][2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int block = 2 * half + b;
    Operand lo[2], up[2], wr[2];
    std::uint32_t q[4], k[4];
    ldmatrix_transposed(q, base + L::kQ + pieces + b * 2048);
    ldmatrix_transposed(k, base + L::kK + pieces + b * 2048);
    const float2 beta0 = beta_of(2 * b), beta1 = beta_of(2 * b + 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 8 * b + 2 * r;
      const float2 d0 = make_float2(e[i], e[i + 1]), d1 = make_float2(e[i + 4], e[i + 5]);
      const Group first(d0.x, d0.y), second(d1.x, d1.y);
      lower_operand(lo[0], r, k[r], d0, first.up2(t) * first.up4(t) * second.eight * kCut);
      lower_operand(lo[1], r, k[2 + r], d1, second.up2(t) * second.up4(t) * kCut);
      upper_operands(up[0], wr[0], r, q[r], k[r], d0, first.down2(t) * first.down4(t) * kCut, beta0);
      upper_operands(up[1], wr[1], r, q[2 + r], k[2 + r], d1,
                     second.down2(t) * second.down4(t) * first.eight * kCut, beta1);
      if (t == 0) floats(L::kPass)[block * C + lc + 8 * r] = first.eight * second.eight;
      float sum = lo[0][r] * au[i];
      sum = fmaf(lo[0][2 + r], au[i + 1], sum);
      sum = fmaf(lo[1][r], au[i + 4], sum);
      key[b][r] = fmaf(lo[1][2 + r], au[i + 5], sum);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (block < 3) store_operand(L::kLower, 2 * block + s, lo[s]);
      if (block > 0) store_operand(L::kUpper, 2 * block - 2 + s, up[s]);
      if (block > 0) store_operand(L::kWrite, 2 * block - 2 + s, wr[s]);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) aq[i] *= p.scale;
  __syncthreads();  // C: cells, operands and products are written

  auto pass = [&](int block, int r) { return floats(L::kPass)[block * C + lc + 8 * r]; };
  {
    float to_end[2] = {1.f, 1.f}, sum[2];
    for (int b = 3; b > 2 * half + 1; --b) to_end[0] *= pass(b, 0), to_end[1] *= pass(b, 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = key[1][r] * (to_end[r] * (1 / kCut));
      to_end[r] *= pass(2 * half + 1, r);
      sum[r] = fmaf(key[0][r], to_end[r] * (1 / kCut), sum[r]);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (half == 0) sum[r] = fmaf(to_end[r] * pass(0, r), floats(L::kLast)[lc + 8 * r], sum[r]);
      if (t == 0) floats(L::kKey)[half * C + lc + 8 * r] = sum[r];
    }
  }
  auto scale_by = [](float* acc, float f0, float f1) {
    acc[0] *= f0, acc[1] *= f0, acc[2] *= f1, acc[3] *= f1;
  };
  struct Entries {
    std::uint32_t p[2], m[2];
  };
  auto row_entries = [&](int at) {
    const uint2 x = *reinterpret_cast<const uint2*>(smem + at + by_row);
    const uint2 y = *reinterpret_cast<const uint2*>(smem + at + by_row + 256);
    return Entries{{x.x, x.y}, {y.x, y.y}};
  };
  auto column_entries = [&](int at) {
    const char* from = smem + at + by_column;
    auto word = [&](int offset) { return *reinterpret_cast<const std::uint32_t*>(from + offset); };
    return Entries{{word(0), word(next_row)}, {word(256), word(256 + next_row)}};
  };
  auto query_step = [&](int n, const Rounded& a, const Entries& x) {
    mma_tf32(aq + 4 * n, a, x.p[0], x.p[1]);
    mma_tf32(aw + 4 * n, a, x.m[0], x.m[1]);
  };
  auto key_step = [&](int n, const Rounded& a, const Rounded& b, const Entries& x) {
    mma_tf32(au + 4 * n, a, x.p[0], x.p[1]);
    mma_tf32(au + 4 * n, b, x.m[0], x.m[1]);
  };
  // The same inside a block.
  auto split = [&](const Operand& a, Rounded& hi, Rounded& rest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      hi[i] = one_term(a[i]);
      rest[i] = __float_as_uint(a[i] - __uint_as_float(hi[i]));
    }
  };
  auto near_queries = [&](int n, const Operand& a, const Entries& x) {
    Rounded hi, rest;
    split(a, hi, rest);
    if constexpr (Gated) query_step(n, rest, x);
    query_step(n, hi, x);
  };
  auto near_keys = [&](int n, const Operand& a, const Operand& b, const Entries& x) {
    Rounded a_hi, a_rest, b_hi, b_rest;
    split(a, a_hi, a_rest);
    split(b, b_hi, b_rest);
    if constexpr (Gated) key_step(n, a_rest, b_rest, x);
    key_step(n, a_hi, b_hi, x);
  };
  // Q and W of 8-groups from `first` on against block jb; U of the 8-groups before `end` against block ib.
  auto queries = [&](auto first, int jb) {
    const float f0 = pass(jb, 0), f1 = pass(jb, 1);
#pragma unroll
    for (int n = decltype(first)::value; n < 4; ++n) {
      scale_by(aq + 4 * n, f0, f1);
      scale_by(aw + 4 * n, f0, f1);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      Rounded a;
      load_operand(a, L::kLower, 2 * jb + s);
#pragma unroll
      for (int n = decltype(first)::value; n < 4; ++n)
        query_step(n, a, row_entries(cell(4 * half + n, 2 * jb + s)));
    }
  };
  auto keys = [&](auto end, int ib) {
    const float f0 = pass(ib, 0), f1 = pass(ib, 1);
#pragma unroll
    for (int n = 0; n < decltype(end)::value; ++n) scale_by(au + 4 * n, f0, f1);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      Rounded a, b;
      load_operand(a, L::kUpper, 2 * ib - 2 + s);
      load_operand(b, L::kWrite, 2 * ib - 2 + s);
#pragma unroll
      for (int n = 0; n < decltype(end)::value; ++n)
        key_step(n, a, b, column_entries(cell(2 * ib + s, 4 * half + n)));
    }
  };
#pragma unroll 1
  for (int jb = 0; jb < 2 * half; ++jb) queries(std::integral_constant<int, 0>{}, jb);
  queries(std::integral_constant<int, 2>{}, 2 * half);
#pragma unroll 1
  for (int ib = 3; ib > 2 * half + 1; --ib) keys(std::integral_constant<int, 4>{}, ib);
  keys(std::integral_constant<int, 2>{}, 2 * half + 1);

  // Inside the blocks. d_gate is dG without the pairs of a token with itself, which cancel.
  float d_gate[16];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int n0 = 2 * b;
    std::uint32_t q[4], k[4];  // [2 s + r]: of 8-group n0 + s
    ldmatrix_transposed(q, base + L::kQ + pieces + b * 2048);
    ldmatrix_transposed(k, base + L::kK + pieces + b * 2048);
    float2 d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = pairs[(4 * b + i) * kThreads];
    float up2[2][2], up4[2][2], down2[2][2], down4[2][2];
    {
      Operand lo, up, wr;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float eight[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const Group x(d[2 * s + r].x, d[2 * s + r].y);
          up2[s][r] = x.up2(t), up4[s][r] = x.up4(t), down2[s][r] = x.down2(t), down4[s][r] = x.down4(t);
          eight[s] = x.eight;
        }
        lower_operand(lo, r, k[r], d[r], up2[0][r] * up4[0][r] * kCut);
        upper_operands(up, wr, r, q[2 + r], k[2 + r], d[2 + r], down2[1][r] * down4[1][r] * kCut,
                       beta_of(n0 + 1));
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          aq[4 * (n0 + 1) + 2 * r + y] *= eight[0], aw[4 * (n0 + 1) + 2 * r + y] *= eight[0];
          au[4 * n0 + 2 * r + y] *= eight[1];
        }
      }
      const int at = cell(4 * half + n0 + 1, 4 * half + n0);
      near_queries(n0 + 1, lo, row_entries(at));
      near_keys(n0, up, wr, column_entries(at));
    }
    std::uint32_t dq[4], dk[4];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int n = n0 + s, at = cell(4 * half + n, 4 * half + n);
      const float2 beta = beta_of(n);
      const Entries rows = row_entries(at), columns = column_entries(at);
      // Entries of one level: 4 tokens against 4, or 2 against 2; the rest of the cell reads as zero.
      auto masked = [](const Entries& x, bool keep) {
        return Entries{{keep ? x.p[0] : 0u, keep ? x.p[1] : 0u}, {keep ? x.m[0] : 0u, keep ? x.m[1] : 0u}};
      };
      Operand lo, up, wr;
      scale_by(aq + 4 * n, down4[s][0], down4[s][1]);
      scale_by(aw + 4 * n, down4[s][0], down4[s][1]);
      scale_by(au + 4 * n, up4[s][0], up4[s][1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lower_operand(lo, r, k[2 * s + r], d[2 * s + r], up2[s][r] * kCut);
        upper_operands(up, wr, r, q[2 * s + r], k[2 * s + r], d[2 * s + r], down2[s][r] * kCut, beta);
      }
      near_queries(n, lo, masked(rows, g >= 4 && t < 2));
      near_keys(n, up, wr, masked(columns, g < 4 && t >= 2));
      scale_by(aq + 4 * n, down2[s][0], down2[s][1]);
      scale_by(aw + 4 * n, down2[s][0], down2[s][1]);
      scale_by(au + 4 * n, up2[s][0], up2[s][1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lower_operand(lo, r, k[2 * s + r], d[2 * s + r], kCut);
        upper_operands(up, wr, r, q[2 * s + r], k[2 * s + r], d[2 * s + r], kCut, beta);
      }
      near_queries(n, lo, masked(rows, t % 2 == 0 && g / 2 == t + 1));
      near_keys(n, up, wr, masked(columns, t % 2 == 1 && g / 2 == t - 1));

      // Tokens 2t and 2t + 1 in fp32.
      const char* own = smem + at + (cell_row(2 * t) + 2 * t) * 4;
      const float p00 = *reinterpret_cast<const float*>(own);
      const float2 p1 = *reinterpret_cast<const float2*>(own + next_row);
      const float p10 = p1.x, p11 = p1.y;
      const float m10 = *reinterpret_cast<const float*>(own + next_row + 256);
      const float bm10 = m10 * beta.y;
      float wk[2] = {0.f, 0.f};  // -W k over this lane's channels
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * n + 2 * r;
        const float k0 = low(k[2 * s + r]), k1 = high(k[2 * s + r]);
        const float q0 = low(q[2 * s + r]), q1 = high(q[2 * s + r]);
        const float e0 = d[2 * s + r].x, e1 = d[2 * s + r].y;
        const float x0 = aq[i] * e0, x1 = fmaf(aq[i + 1], e0, p10 * k0) * e1;
        const float w0 = aw[i] * e0, w1 = fmaf(aw[i + 1], e0, m10 * k0) * e1;
        const float u0 = fmaf(p10, q1, fmaf(bm10, k1, au[i])) * e1, u1 = au[i + 1];
        d_gate[i] = fmaf(q0, x0, k0 * fmaf(beta.x, w0, -u0));
        d_gate[i + 1] = fmaf(q1, x1, k1 * fmaf(beta.y, w1, -u1));
        if (by_sums) wk[0] = fmaf(w0, k0, wk[0]), wk[1] = fmaf(w1, k1, wk[1]);
        const float dq0 = fmaf(p00, k0, x0), dq1 = fmaf(p11, k1, x1);
        const float dk0 = fmaf(p00, q0, fmaf(beta.x, w0, u0)), dk1 = fmaf(p11, q1, fmaf(beta.y, w1, u1));
        dq[2 * s + r] = pack(dq0, dq1), dk[2 * s + r] = pack(dk0, dk1);
        if constexpr (Parts) {  // fp32 parts of a sum over heads, or before the l2norm
          const std::int64_t token = c.token + token_of(i), step = p.value_heads * K;
          const std::int64_t to =
              ((c.row * p.tokens + token) * p.value_heads + hv) * K + slice * C + lc + 8 * r;
          const bool valid0 = token_of(i) < c.length, valid1 = token_of(i) + 1 < c.length;
          store32(p.q_part + to, dq0, valid0), store32(p.q_part + to + step, dq1, valid1);
          store32(p.k_part + to, dk0, valid0), store32(p.k_part + to + step, dk1, valid1);
        }
      }
      if (by_sums) {
        const int own = lane / 16;  // half the lanes go on with each token
        float sum = (own ? wk[1] : wk[0]) + __shfl_xor_sync(~0u, own ? wk[0] : wk[1], 16);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 4);
        if (g % 4 == 0) floats(L::kBetaK)[64 * strip + token_of(4 * n) + own] = sum;
      }
    }
    stmatrix_transposed(base + L::kQ + pieces + n0 * 1024, dq);
    stmatrix_transposed(base + L::kK + pieces + n0 * 1024, dk);
  }
  // dG summed from the end of this half.
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
    if (half == 1 && t == 0) floats(L::kGates)[lc + 8 * r] = later;
  }
  if constexpr (kMapped) fence_async_proxy();
  __syncthreads();  // D: the sums, dq and dk are written
  if constexpr (kMapped) {
    if (tid == 0) {
      tma_store(&maps.d_q, base + L::kQ, slice * C, hv, static_cast<int>(c.token), static_cast<int>(c.row));
      tma_store(&maps.d_k, base + L::kK, slice * C, hv, static_cast<int>(c.token), static_cast<int>(c.row));
      tma_store_commit();
    }
  }

  float after[2], bias_sum[2] = {0.f, 0.f}, rate_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = lc + 8 * r;
    after[r] = floats(L::kKey)[at] + floats(L::kKey)[C + at];
    if (half == 0) after[r] += floats(L::kGates)[at];
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) d_gate[i] += after[i / 2 % 2];
  if constexpr (Gated) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i / 2 % 2;
      if (token_of(i) >= c.length) continue;
      const float raw = load_real(p.g, g_row + token_of(i) * p.g.token + lc + 8 * r);
      float of_rate;
      d_gate[i] = gate_gradient(p, raw + bias[r], rate, d_gate[i], of_rate);
      bias_sum[r] += d_gate[i], rate_sum[r] += of_rate;
    }
  }
  if constexpr (kMapped) {
    char* to = smem + L::kG + strip / 2 * 8192 + (32 * half + 2 * t) * 128 + g % 4 * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) *reinterpret_cast<float*>(to + gate_piece(i)) = d_gate[i];
    fence_async_proxy();
    __syncthreads();
    if (tid == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        tma_store(&maps.d_g, base + L::kG + i * 8192, slice * C + 32 * i, hv, static_cast<int>(c.token),
                  static_cast<int>(c.row));
      tma_store_commit();
    }
  } else {
    by_type(p.d_g, [&](auto is_bf16) {
      using T = std::conditional_t<is_bf16.value, bf16, float>;
      T* to = static_cast<T*>(p.d_g.data) + index_of(p.d_g, c.row, c.token, hv) + slice * C + lc;
      const int step = static_cast<int>(p.d_g.token);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        T* at = rows_on(to, token_of(i), step) + i / 2 % 2 * 8;
        if constexpr (is_bf16.value) {
          store16(at, d_gate[i], token_of(i) < c.length);
        } else {
          store32(at, d_gate[i], token_of(i) < c.length);
        }
      }
    });
  }
  if constexpr (!Parts && !kMapped) {
    const int piece = tid % 8;
    bf16 *d_q = row_of(p.d_q, c.row, c.token, hv) + slice * C + 8 * piece,
         *d_k = row_of(p.d_k, c.row, c.token, hv) + slice * C + 8 * piece;
    const int q_step = static_cast<int>(p.d_q.token), k_step = static_cast<int>(p.d_k.token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tid / 8 + 32 * i, at = row_tile(64, row, piece);
      if (row >= c.length) continue;
      *reinterpret_cast<uint4*>(rows_on(d_q, row, q_step)) =
          *reinterpret_cast<const uint4*>(smem + L::kQ + at);
      *reinterpret_cast<uint4*>(rows_on(d_k, row, k_step)) =
          *reinterpret_cast<const uint4*>(smem + L::kK + at);
    }
  }
  if (tid < c.length) {
    const float beta = floats(L::kBeta)[tid];
    bool whole = slice == 0;
    float d;
    if (!Gated && !(fabsf(beta) < kFaint)) {
      const float* own = floats(cell(tid / 8, tid / 8) + 256);
      d = own[cell_row(tid % 8) + tid % 8] / beta;
    } else {
      d = floats(L::kBetaV)[tid];
#pragma unroll
      for (int s = 0; s < 4; ++s) d -= floats(L::kBetaK)[64 * s + tid];
      // Of the two slices of K, the first to get here leaves its half and the second adds: a + b is b + a.
      if constexpr (kSlices > 1) {
        const unsigned other =
            atomicExch(p.beta_half + 64 * static_cast<std::int64_t>(item) + tid, __float_as_uint(d));
        whole = other != kNoHalf;
        d += __uint_as_float(other);
      }
    }
    if (whole) {
      store_real(p.d_beta, index_of(p.d_beta, c.row, c.token + tid, hv), beta_gradient(p, beta, d));
    }
  }
  if (p.bias_part) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int off = 1; off < 4; off *= 2) {
        bias_sum[r] += __shfl_xor_sync(~0u, bias_sum[r], off);
        rate_sum[r] += __shfl_xor_sync(~0u, rate_sum[r], off);
      }
      if (t == 0) {
        floats(L::kBias)[(2 * half) * C + lc + 8 * r] = bias_sum[r];
        floats(L::kBias)[(2 * half + 1) * C + lc + 8 * r] = rate_sum[r];
      }
    }
    __syncthreads();
    if (tid < C) {
      const float* from = floats(L::kBias) + tid;
      const std::int64_t to = static_cast<std::int64_t>(item) * K + slice * C + tid;
      p.bias_part[to] = from[0] + from[2 * C];
      p.a_log_part[to] = from[C] + from[3 * C];
    }
  }
  // Shared memory stays until the copy engine has read it.
  if (kMapped && tid == 0) tma_store_wait_read();
}

bool map_tensors(Maps& maps, const Job& job) {
  return !job.g.bf16 && !job.d_g.bf16 && map_tensor(maps.d_out, job, job.d_out, job.value_heads) &&
         map_tensor(maps.q, job, job.q, job.heads) && map_tensor(maps.k, job, job.k, job.heads) &&
         map_tensor(maps.g, job, job.g, job.value_heads, true) &&
         map_tensor(maps.d_q, job, job.d_q, job.heads) && map_tensor(maps.d_k, job, job.d_k, job.heads) &&
         map_tensor(maps.d_g, job, job.d_g, job.value_heads, true);
}

template <int K, Part part, bool Gated>
void launch(const Job& job, cudaStream_t stream) {
  const auto slots = static_cast<unsigned>(job.slots());
  dim3 blocks(static_cast<unsigned>(job.value_heads) * (K / kSlice), std::min(slots, kGridRows),
              (slots + kGridRows - 1) / kGridRows);
  if (by_sequence(job)) {
    blocks.y = static_cast<unsigned>(job.slots_each), blocks.z = static_cast<unsigned>(job.sequences);
  }
  const auto run = [&](auto kernel, const auto& maps) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<K>::kSize);
    kernel<<<blocks, 256, Layout<K>::kSize, stream>>>(job, maps);
  };
  if constexpr (part == Part::all && !Gated) {
    if (Maps maps; !job.q_part && map_tensors(maps, job))
      return run(gradients_kernel<K, part, Gated, false, Maps>, maps);
  }
  job.q_part ? run(gradients_kernel<K, part, Gated, true, NoMaps>, NoMaps{})
             : run(gradients_kernel<K, part, Gated, false, NoMaps>, NoMaps{});
}

template <int K, bool Gated>
void launch_parts(const Job& job, cudaStream_t stream) {
  if (K > kSlice) {
    cudaMemsetAsync(job.beta_half, 0xff, sizeof(unsigned) * 64 * job.slots() * job.value_heads, stream);
  }
  if (job.unfused) {
    launch<K, Part::inter, Gated>(job, stream);
    launch<K, Part::intra, Gated>(job, stream);
  } else {
    launch<K, Part::all, Gated>(job, stream);
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

}  // namespace rlk::cuda::kda
