// The gradients kernel's products over V: wgmma straight from the tiles as they arrive, 64 channels x 32
// tokens per warpgroup, and all of dP by the first, all of dM by the second. do comes as swizzled rows, the
// rest as 8 x 8 blocks, which wgmma takes transposed.
#pragma once

#include "cuda/kda/gradients/load.cuh"

namespace rlk::cuda::kda::gradients {

// What wgmma reads, 16 steps of V at byte `at`: a tile of 8 x 8 blocks, [V / 8][8], whose columns are the
// operand's rows; and a tile of swizzled rows. Of an address in a cluster a descriptor takes no rank.
__device__ inline std::uint64_t of_blocks(std::uint32_t base, std::uint32_t at) {
  return Descriptor(base >> 4 & 0x3fff, 1024 / 16, 128 / 16, Swizzle::none).at(at >> 4);
}
__device__ inline std::uint64_t of_rows(std::uint32_t base, std::uint32_t at) {
  return Descriptor(base >> 4 & 0x3fff, 1, 1024 / 16, Swizzle::bytes128).at(at >> 4);
}

// Where tiles lie, and which warpgroup this is. With a gate there are so many descriptors that the compiler
// would make them lane by lane, and keep them for later groups of wgmmas; a reduction's result it knows to be
// the same in all lanes, and it begins anew for every group.
template <class V>
struct Places {
  const char* smem;
  std::uint32_t base, warpgroup;

  __device__ explicit Places(const Block<V>& b) : smem(b.smem) {
    const std::uint32_t own = shared_address(b.smem), group = static_cast<std::uint32_t>(b.warpgroup);
    base = V::Gated ? __reduce_or_sync(~0u, own) : own;
    warpgroup = V::Gated ? __reduce_or_sync(~0u, group) : group;
  }
  __device__ std::uint32_t of(const char* tile) const {
    return base + static_cast<std::uint32_t>(tile - smem);
  }
};

// dP_ij and -dM_ij against v_new, or against what rounding left of it.
template <class V>
__device__ inline void multiply_entries(const Block<V>& b, Sums& x, const char* v_new, bool more) {
  const auto& tiles = b.s.operands;
  const Places<V> at(b);
  if (at.warpgroup == 0) {
#pragma unroll
    for (int ks = 0; ks < V::K / 16; ++ks)
      wgmma<bf16, false, true>(x.entries, of_rows(at.of(tiles.d_out), ks / 4 * 8192 + ks % 4 * 32),
                               of_blocks(at.of(v_new), 2048 * ks), more || ks > 0);
  } else {
#pragma unroll
    for (int ks = 0; ks < V::K / 16; ++ks)
      wgmma<bf16, true, true>(x.entries, of_blocks(at.of(tiles.d_x), 2048 * ks),
                              of_blocks(at.of(v_new), 2048 * ks), more || ks > 0);
  }
}
// dS v_new, of either in one term.
template <class V>
__device__ inline void multiply_keys(const Block<V>& b, Sums& x, const char* d_state, const char* v_new,
                                     bool more) {
  const Places<V> at(b);
#pragma unroll
  for (int ks = 0; ks < V::K / 16; ++ks)
    wgmma<bf16, true, true>(x.u, of_blocks(at.of(d_state), 2048 * ks),
                            of_blocks(at.of(v_new) + 512 * at.warpgroup, 2048 * ks), more || ks > 0);
}
// S do and S D.
template <class V>
__device__ inline void multiply_state(const Block<V>& b, Sums& x) {
  const auto& tiles = b.s.operands;
  const Places<V> at(b);
#pragma unroll
  for (int ks = 0; ks < V::K / 16; ++ks)
    wgmma<bf16, true, false>(x.q, of_blocks(at.of(tiles.state), 2048 * ks),
                             of_rows(at.of(tiles.d_out) + 4096 * at.warpgroup, ks / 4 * 8192 + ks % 4 * 32),
                             ks > 0);
#pragma unroll
  for (int ks = 0; ks < V::K / 16; ++ks)
    wgmma<bf16, true, true>(x.w, of_blocks(at.of(tiles.state), 2048 * ks),
                            of_blocks(at.of(tiles.d_x) + 512 * at.warpgroup, 2048 * ks), ks > 0);
}
// Two groups of wgmmas: what second terms take part in, and the entries, S do, S D and dS v_new.
template <class V>
__device__ inline void multiply(const Block<V>& b, Sums& x) {
  const auto& tiles = b.s.operands;
  wgmma_fence();
  if constexpr (V::Gated) {
    multiply_entries(b, x, b.s.rests.v_new, false);
    multiply_keys(b, x, tiles.d_state, b.s.rests.v_new, false);
    multiply_keys(b, x, b.s.rests.d_state, tiles.v_new, true);
    wgmma_commit();
  }
  multiply_entries(b, x, tiles.v_new, V::Gated);
  multiply_state(b, x);
  multiply_keys(b, x, tiles.d_state, tiles.v_new, V::Gated);
  wgmma_commit();
}

// For a faint beta D . v of this warp's 8 tokens over 64 columns: the diagonal of an 8 x 8 product, beside
// the wgmmas.
template <class V>
__device__ inline void sum_strengths(const Block<V>& b, const std::uint32_t (&v)[8]) {
  const int mat = b.lane / 8, r = b.lane % 8;
  std::uint32_t d[4];
  // Of a product's 16 rows only 8 are wanted, so the other half of its operand may be anything at hand.
  float x[4] = {0.f, 0.f, 0.f, 0.f}, x8[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const int block = 8 * b.slice + i + (mat >> 1) + 2 * (mat & 1);
    ldmatrix_transposed(d, shared_address(b.s.operands.d_x) + ((block * 8 + b.warp) * 8 + r) * 16);
    mma_bf16(x, d, v[i], v[i + 1]);
    mma_bf16(x8, d, v[i + 2], v[i + 3]);
  }
  if (b.group / 2 == b.member) b.s.beta_v[8 * b.warp + b.group] = b.group % 2 ? x[1] + x8[3] : x[0] + x8[2];
}

// rowsum(S dS) of this warp's 8 channels over all of V, likewise.
template <class V>
__device__ inline void sum_states(const Block<V>& b) {
  const int mat = b.lane / 8, r = b.lane % 8;
  std::uint32_t d[4];
  float y[4] = {0.f, 0.f, 0.f, 0.f};
  auto add = [&](const char* d_state) {
#pragma unroll
    for (int vb = 0; vb < V::K / 8; vb += 2) {
      ldmatrix_transposed(d, shared_address(mat & 1 ? d_state : b.s.operands.state) +
                                 (((vb + (mat >> 1)) * 8 + b.warp) * 8 + r) * 16);
      mma_bf16(y, d, d[1], d[3]);
    }
  };
  add(b.s.operands.d_state);
  if constexpr (V::Gated) add(b.s.rests.d_state);
  if (b.group / 2 == b.member) b.s.last[8 * b.warp + b.group] = b.group % 2 ? y[1] : y[0];
}

// Unfused: from one kernel to the next through memory.
template <class V>
__device__ inline void store_inter(const Block<V>& b, const Sums& x, bool by_sums) {
  float* const inter = b.inter();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float* to = inter + i * kThreads + b.tid;
    to[0] = x.entries[i], to[16 * kThreads] = x.entries[16 + i];
    to[32 * kThreads] = x.q[i], to[48 * kThreads] = x.w[i], to[64 * kThreads] = x.u[i];
  }
  __syncthreads();
  if (b.tid < 64 && by_sums) inter[80 * kThreads + b.tid] = b.s.beta_v[b.tid];
  if (b.tid < kSlice) inter[80 * kThreads + 64 + b.tid] = b.s.last[b.tid];
}
template <class V>
__device__ inline void load_inter(const Block<V>& b, Sums& x, bool by_sums) {
  const float* const inter = b.inter();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float* from = inter + i * kThreads + b.tid;
    x.entries[i] = from[0], x.entries[16 + i] = from[16 * kThreads];
    x.q[i] = from[32 * kThreads], x.w[i] = from[48 * kThreads], x.u[i] = from[64 * kThreads];
  }
  if (b.tid < 64 && by_sums) b.s.beta_v[b.tid] = inter[80 * kThreads + b.tid];
  if (b.tid < kSlice) b.s.last[b.tid] = inter[80 * kThreads + 64 + b.tid];
}

}  // namespace rlk::cuda::kda::gradients
