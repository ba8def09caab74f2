// The key-value split of multi-head latent attention (rope_mla_kv and its backward). Portable: HIP, CUDA,
// host fibers. Arithmetic id "rope32".
//
// Traffic: forward reads kv and the shared embedding once and writes key and value once; the rotation is
// computed once per token and group of heads and stored to every head. Backward copies the two gradients into
// d_kv and sums the embedding's over heads in fp32, ascending, one thread per slot: the sum blocks come first
// in the grid because each walks over all heads. A slot is 32 bytes of a row, as in rope_kernel.hpp.
#pragma once

#include "rope_launch.hpp"

namespace rlk::simt::rope_kernel {

struct KvCut {
  std::int32_t vec, rotary_slots, k_slots, v_slots;
  std::int32_t lanes;                      // threads of a row
  std::int32_t block_tokens, block_heads;  // rows of a block
  std::int32_t head_groups, heads_per_block;
  std::int32_t token_blocks;
  std::int32_t sum_tokens, sum_lanes, sum_token_blocks;  // backward: tokens of a sum block
  std::int64_t sum_blocks, blocks;
};

inline constexpr int kKvUnroll = 4;
inline constexpr int kSumUnroll = 8;

template <class T>
__device__ __forceinline__ T* kv_at(const rotary::Strided& s, std::int64_t batch, std::int64_t token,
                                    std::int64_t head) {
  return static_cast<T*>(s.data) + batch * s.by_batch + token * s.by_token + head * s.by_head;
}

// Copies pack `slot` of a run of `length` elements, and the pack `slots` behind it, in `rows` rows.
template <class T, int Vec>
__device__ __forceinline__ void copy_run(const T* from, T* to, std::int64_t from_step, std::int64_t to_step,
                                         int rows, int slot, int slots, int length) {
  const int at = slot * Vec, behind = (slot + slots) * Vec;
  const bool two = behind < length;
  for (; rows > 0; rows -= kKvUnroll, from += kKvUnroll * from_step, to += kKvUnroll * to_step) {
    Pack<T, Vec> v[kKvUnroll][2];
#pragma unroll
    for (int u = 0; u < kKvUnroll; ++u) {
      if (u < rows) {
        v[u][0] = load<T, Vec, true>(from + u * from_step + at);
        if (two) v[u][1] = load<T, Vec, true>(from + u * from_step + behind);
      }
    }
#pragma unroll
    for (int u = 0; u < kKvUnroll; ++u) {
      if (u < rows) {
        store<T, Vec>(to + u * to_step + at, v[u][0]);
        if (two) store<T, Vec>(to + u * to_step + behind, v[u][1]);
      }
    }
  }
}

// Gradient of the shared embedding: one thread per (token, slot), all heads.
template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full>
__device__ __forceinline__ void sum_slot(const rotary::KvGeometry& kv, const KvCut& cut, unsigned block) {
  const rotary::Geometry& g = kv.turn;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % cut.sum_lanes,
            row = thread / cut.sum_lanes;
  const std::int64_t batch = block / unsigned(cut.sum_token_blocks);
  const std::int64_t token = std::int64_t{block % unsigned(cut.sum_token_blocks)} * cut.sum_tokens + row;
  if (row >= cut.sum_tokens || token >= g.tokens) return;
  for (int slot = lane; slot < cut.rotary_slots; slot += cut.sum_lanes) {
    const Places p = places_of<Vec>(g, slot, cut.rotary_slots);
    const T* x = kv_at<T>(kv.key, batch, token, 0) + kv.k_dim;
    float sum[2][Vec] = {};
    for (std::int64_t head = 0; head < kv.heads; head += kSumUnroll, x += kSumUnroll * kv.key.by_head) {
      Pack<T, Vec> v[kSumUnroll][2] = {};  // the compiler cannot see that unread ones stay unread
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) {
        if (head + u < kv.heads) {
          v[u][0] = load<T, Vec, false>(x + u * kv.key.by_head + p.in0);
          v[u][1] = load<T, Vec, false>(x + u * kv.key.by_head + p.in1);
        }
      }
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) {
        if (head + u < kv.heads) {
#pragma unroll
          for (int i = 0; i < 2 * Vec; ++i) {
            const float add = to_float(v[u][i / Vec].v[i % Vec]);
            float& total = sum[i / Vec][i % Vec];
            total = head + u == 0 ? add : add_rn(total, add);
          }
        }
      }
    }
    Factors<Vec, Full> f;
    read_factors<T, Vec, Full, true>(g, batch, token, p.pair0, p.pair1, f);
    Pack<T, Vec> out[2];
    Pack<float, Vec> total[2];
#pragma unroll
    for (int i = 0; i < 2 * Vec; ++i) total[i / Vec].v[i % Vec] = sum[i / Vec][i % Vec];
    rotate_packs<float, T, Vec, InAdjacent, OutAdjacent, Full>(total, out, f);
    T* y = kv_at<T>(kv.emb, batch, token, 0);
    store<T, Vec>(y + p.out0, out[0]);
    store<T, Vec>(y + p.out1, out[1]);
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full>
__device__ __forceinline__ void spread_slot(const rotary::KvGeometry& kv, const KvCut& cut,
                                            std::int64_t batch, std::int64_t token, std::int64_t head,
                                            int rows, int slot) {
  const rotary::Geometry& g = kv.turn;
  const Places p = places_of<Vec>(g, slot, cut.rotary_slots);
  const T* x = kv_at<T>(kv.emb, batch, token, 0);
  Pack<T, Vec> in[2], out[2];
  in[0] = load<T, Vec, false>(x + p.in0);
  in[1] = load<T, Vec, false>(x + p.in1);
  Factors<Vec, Full> f;
  read_factors<T, Vec, Full, true>(g, batch, token, p.pair0, p.pair1, f);
  rotate_packs<T, T, Vec, InAdjacent, OutAdjacent, Full>(in, out, f);
  T* y = kv_at<T>(kv.key, batch, token, head) + kv.k_dim;
  for (; rows > 0; --rows, y += cut.block_heads * kv.key.by_head) {
    store<T, Vec>(y + p.out0, out[0]);
    store<T, Vec>(y + p.out1, out[1]);
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, bool Full, bool Backward>
__global__ void __launch_bounds__(kThreads) split_rows(const rotary::KvGeometry kv, const KvCut cut) {
  if constexpr (Backward) {
    if (blockIdx.x < unsigned(cut.sum_blocks)) {
      return sum_slot<T, Vec, InAdjacent, OutAdjacent, Full>(kv, cut, blockIdx.x);
    }
  }
  const unsigned block = blockIdx.x - (Backward ? unsigned(cut.sum_blocks) : 0u);
  const unsigned group = block % unsigned(cut.head_groups), tile = block / unsigned(cut.head_groups);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % cut.lanes, row = thread / cut.lanes;
  if (row >= cut.block_tokens * cut.block_heads) return;
  const std::int64_t batch = tile / unsigned(cut.token_blocks);
  const std::int64_t token =
      std::int64_t{tile % unsigned(cut.token_blocks)} * cut.block_tokens + row / cut.block_heads;
  const std::int64_t head = std::int64_t{group} * cut.heads_per_block + row % cut.block_heads;
  std::int64_t end = std::int64_t{group + 1} * cut.heads_per_block;
  if (end > kv.heads) end = kv.heads;
  if (token >= kv.turn.tokens || head >= end) return;
  const int rows = static_cast<int>((end - head + cut.block_heads - 1) / cut.block_heads);

  const std::int64_t kv_step = kv.kv.by_head * cut.block_heads, key_step = kv.key.by_head * cut.block_heads;
  const std::int64_t value_step = kv.value.by_head * cut.block_heads;
  T* both = kv_at<T>(kv.kv, batch, token, head);
  T* key = kv_at<T>(kv.key, batch, token, head);
  T* value = kv_at<T>(kv.value, batch, token, head);
  const int rotary_slots = Backward ? 0 : cut.rotary_slots, slots = rotary_slots + cut.k_slots + cut.v_slots;
  for (int slot = lane; slot < slots; slot += cut.lanes) {
    if (slot < rotary_slots) {
      spread_slot<T, Vec, InAdjacent, OutAdjacent, Full>(kv, cut, batch, token, head, rows, slot);
    } else if (slot < rotary_slots + cut.k_slots) {
      const int at = slot - rotary_slots;
      if constexpr (Backward) {
        copy_run<T, Vec>(key, both, key_step, kv_step, rows, at, cut.k_slots, kv.k_dim);
      } else {
        copy_run<T, Vec>(both, key, kv_step, key_step, rows, at, cut.k_slots, kv.k_dim);
      }
    } else {
      const int at = slot - rotary_slots - cut.k_slots;
      if constexpr (Backward) {
        copy_run<T, Vec>(value, both + kv.k_dim, value_step, kv_step, rows, at, cut.v_slots, kv.v_dim);
      } else {
        copy_run<T, Vec>(both + kv.k_dim, value, kv_step, value_step, rows, at, cut.v_slots, kv.v_dim);
      }
    }
  }
}

inline bool data_vectors(const rotary::KvGeometry& kv) {
  const std::int64_t size = kv.turn.bytes_per_element(), vec = 16 / size;
  if (kv.k_dim % vec != 0 || kv.v_dim % vec != 0 || kv.turn.rotary_dim % (2 * vec) != 0) return false;
  for (const rotary::Strided* s : {&kv.kv, &kv.emb, &kv.key, &kv.value}) {
    if (!on_16(s->data) || !on_16(s->by_batch, size, kv.turn.batch) ||
        !on_16(s->by_token, size, kv.turn.tokens) || !on_16(s->by_head, size, kv.heads)) {
      return false;
    }
  }
  return true;
}

inline KvCut cut(const rotary::KvGeometry& kv, bool vectors, bool backward) {
  const rotary::Geometry& g = kv.turn;
  KvCut c{};
  c.vec = vectors ? static_cast<int>(16 / g.bytes_per_element()) : 1;
  c.rotary_slots = g.rotary_dim / 2 / c.vec;
  c.k_slots = (kv.k_dim + 2 * c.vec - 1) / (2 * c.vec);
  c.v_slots = (kv.v_dim + 2 * c.vec - 1) / (2 * c.vec);
  c.lanes = std::clamp((backward ? 0 : c.rotary_slots) + c.k_slots + c.v_slots, 1, kThreads);
  const auto tokens = std::max<std::int64_t>(g.tokens, 1);
  const int rows = kThreads / c.lanes;
  c.block_heads = static_cast<int>(std::clamp<std::int64_t>(kv.heads, 1, rows));
  c.block_tokens = static_cast<int>(std::min<std::int64_t>(rows / c.block_heads, tokens));
  c.token_blocks = static_cast<std::int32_t>((tokens + c.block_tokens - 1) / c.block_tokens);
  c.heads_per_block = c.block_heads * kKvUnroll * 2;
  c.head_groups = static_cast<std::int32_t>((kv.heads + c.heads_per_block - 1) / c.heads_per_block);
  c.blocks = g.batch * std::int64_t{c.token_blocks} * c.head_groups;
  if (backward) {
    c.sum_lanes = std::min(c.rotary_slots, kThreads);
    c.sum_tokens =
        static_cast<std::int32_t>(std::min<std::int64_t>(std::max(1, kThreads / 2 / c.sum_lanes), tokens));
    c.sum_token_blocks = static_cast<std::int32_t>((tokens + c.sum_tokens - 1) / c.sum_tokens);
    c.sum_blocks = g.batch * std::int64_t{c.sum_token_blocks};
    c.blocks += c.sum_blocks;
  }
  if (kv.heads == 0 || g.tokens == 0) c.blocks = 0;
  return c;
}

template <class T, int Vec>
hipError_t launch_kv_vec(const rotary::KvGeometry& kv, const KvCut& c, bool backward, hipStream_t stream) {
  const auto go = [&](auto kernel) {
    hipLaunchKernelGGL(kernel, dim3(static_cast<unsigned>(c.blocks)), dim3(kThreads), 0, stream, kv, c);
    return hipGetLastError();
  };
  // The second table entry of a pair is the first when the table is half: one form serves both.
  if constexpr (Vec == 1) {
    return backward ? go(&split_rows<T, 1, false, false, true, true>)
                    : go(&split_rows<T, 1, false, false, true, false>);
  } else if (kv.turn.in_adjacent == kv.turn.out_adjacent) {
    return backward ? go(&split_rows<T, Vec, true, true, true, true>)
                    : go(&split_rows<T, Vec, true, true, true, false>);
  } else {
    return backward ? go(&split_rows<T, Vec, false, true, true, true>)
                    : go(&split_rows<T, Vec, true, false, true, false>);
  }
}

inline hipError_t launch_kv(const rotary::KvGeometry& kv, bool backward, hipStream_t stream) {
  const bool vectors = data_vectors(kv);
  const KvCut c = cut(kv, vectors, backward);
  if (c.blocks == 0) return hipSuccess;
  switch (kv.turn.type) {
    case rotary::Float::f32:
      return vectors ? launch_kv_vec<float, 4>(kv, c, backward, stream)
                     : launch_kv_vec<float, 1>(kv, c, backward, stream);
    case rotary::Float::bf16:
      return vectors ? launch_kv_vec<bf16, 8>(kv, c, backward, stream)
                     : launch_kv_vec<bf16, 1>(kv, c, backward, stream);
    default:
      return vectors ? launch_kv_vec<fp16, 8>(kv, c, backward, stream)
                     : launch_kv_vec<fp16, 1>(kv, c, backward, stream);
  }
}

}  // namespace rlk::simt::rope_kernel
