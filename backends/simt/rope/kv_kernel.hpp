// The key-value split of multi-head latent attention (rope_mla_kv and its backward). Portable: HIP, CUDA,
// host fibers. Arithmetic id "rope32".
//
// Traffic: forward reads kv and the shared embedding once and writes key and value once; a thread turns its
// slot of the embedding for its heads and finds it in L1. Backward copies the two gradients into d_kv and
// sums the embedding's over heads in fp32, ascending, one thread per slot: the sum blocks come first in the
// grid because each walks over all heads. Slots, rows and the order of blocks are those of kernel.hpp.
#pragma once

#include "simt/rope/launch.hpp"

namespace rlk::simt::rope {

inline constexpr int kSumUnroll = 4;
inline constexpr int kSplitHeads = 2;    // neighbouring heads of a thread, which turns the embedding once
inline constexpr int kSplitBlock = 160;  // threads that a block should have, at most

// threadIdx.z: 0 turns the embedding (forward), the next k_roles copy the key's own dims, the others the
// value. Backward the embedding has blocks of its own instead, the first `sum_tiles` of each batch.
struct KvCut {
  Ground ground;
  Steps steps;
  std::int32_t k_slots, v_slots, k_roles;
  std::uint32_t sum_tiles;
};

template <class T>
__device__ __forceinline__ T* kv_at(const rotary::Strided& s, std::uint32_t batch, std::uint32_t token,
                                    std::uint32_t head) {
  return static_cast<T*>(s.data) + along(batch, s.by_batch) + along(token, s.by_token) +
         along(head, s.by_head);
}

// Gradient of the shared embedding: one thread per (token, slot), all heads.
template <class T, int Vec, bool InAdjacent, bool OutAdjacent, Find How>
__device__ __forceinline__ void sum_slots(const rotary::KvGeometry& kv, const KvCut& cut, unsigned tile) {
  const rotary::Geometry& g = kv.turn;
  const std::uint32_t batch = cut.ground.first_batch + blockIdx.z,
                      token = (tile * blockDim.z + threadIdx.z) * blockDim.y + threadIdx.y;
  if (token >= g.tokens) return;
  for (auto slot = static_cast<std::int32_t>(threadIdx.x); slot < cut.steps.slots;
       slot += static_cast<std::int32_t>(blockDim.x)) {
    const T* x = kv_at<T>(kv.key, batch, token, 0) + kv.k_dim + slot * cut.steps.in_step;
    float sum[2][Vec] = {};
    for (std::int64_t head = 0; head < kv.heads; head += kSumUnroll, x += kSumUnroll * kv.key.by_head) {
      Pack<T, Vec> v[kSumUnroll][2] = {};  // the compiler cannot see that unread ones stay unread
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) {
        if (head + u < kv.heads) {
          v[u][0] = load<T, Vec>(x + u * kv.key.by_head);
          v[u][1] = load<T, Vec>(x + u * kv.key.by_head + cut.steps.in_gap);
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
    Factors<Vec, true> f;
    read_factors<T, void, Vec, How>(g, cut.steps, batch, token, slot, f);
    Pack<T, Vec> out[2];
    Pack<float, Vec> total[2];
#pragma unroll
    for (int i = 0; i < 2 * Vec; ++i) total[i / Vec].v[i % Vec] = sum[i / Vec][i % Vec];
    rotate_packs<float, T, Vec, InAdjacent, OutAdjacent>(total, out, f);
    T* y = kv_at<T>(kv.emb, batch, token, 0) + slot * cut.steps.out_step;
    store<T, Vec>(y, out[0]);
    store<T, Vec>(y + cut.steps.out_gap, out[1]);
  }
}

// A thread's neighbouring heads, the last of which may be missing: those are read as the first again.
struct Heads {
  std::int32_t there;

  __device__ __forceinline__ std::int64_t read_at(int i, std::int64_t by_head) const {
    return i < there ? i * by_head : 0;
  }
};

// The shared embedding, turned once for the heads of a thread.
template <class T, int Vec, bool InAdjacent, bool OutAdjacent, Find How>
__device__ __forceinline__ void spread_slot(const rotary::KvGeometry& kv, const Steps& steps, T* key,
                                            Heads heads, std::uint32_t batch, std::uint32_t token, int slot) {
  const T* x = kv_at<T>(kv.emb, batch, token, 0) + slot * steps.in_step;
  T* y = key + kv.k_dim + slot * steps.out_step;
  const Pack<T, Vec> in[2] = {load<T, Vec>(x), load<T, Vec>(x + steps.in_gap)};
  Factors<Vec, true> f;
  read_factors<T, void, Vec, How>(kv.turn, steps, batch, token, slot, f);
  Pack<T, Vec> out[2];
  rotate_packs<T, T, Vec, InAdjacent, OutAdjacent>(in, out, f);
#pragma unroll
  for (int i = 0; i < kSplitHeads; ++i) {
    if (i < heads.there) {
      store<T, Vec>(y + i * kv.key.by_head, out[0]);
      store<T, Vec>(y + i * kv.key.by_head + steps.out_gap, out[1]);
    }
  }
}

// Pack `slot` of a run of `length` elements and the one `slots` behind it, of the heads of a thread.
template <class T, int Vec>
__device__ __forceinline__ void copy_run(const T* from, std::int64_t from_head, T* to, std::int64_t to_head,
                                         Heads heads, int slot, int slots, int length) {
  const int first = slot * Vec, behind = (slot + slots) * Vec;
  const bool two = behind < length;
  Pack<T, Vec> v[kSplitHeads][2];
#pragma unroll
  for (int i = 0; i < kSplitHeads; ++i) {
    const T* row = from + heads.read_at(i, from_head);
    v[i][0] = load<T, Vec>(row + first);
    v[i][1] = load<T, Vec>(row + (two ? behind : first));
  }
#pragma unroll
  for (int i = 0; i < kSplitHeads; ++i) {
    if (i < heads.there) {
      store<T, Vec>(to + i * to_head + first, v[i][0]);
      if (two) store<T, Vec>(to + i * to_head + behind, v[i][1]);
    }
  }
}

template <class T, int Vec, bool InAdjacent, bool OutAdjacent, Find How, bool Backward>
__global__ void __launch_bounds__(kThreads, How == Find::entries ? 2 : 3)
    split_rows(const rotary::KvGeometry kv, const KvCut cut) {
  if constexpr (Backward) {
    const unsigned tile = cut.ground.tiles_first ? blockIdx.x : blockIdx.y;
    if (tile < cut.sum_tiles) {
      if ((cut.ground.tiles_first ? blockIdx.y : blockIdx.x) == 0) {
        sum_slots<T, Vec, InAdjacent, OutAdjacent, How>(kv, cut, tile);
      }
      return;
    }
  }
  const Spot spot = spot_of(cut.ground, Backward ? cut.sum_tiles : 0u);
  const std::uint32_t head = (spot.group * cut.ground.group_heads + spot.head) * kSplitHeads,
                      all = static_cast<std::uint32_t>(kv.heads);
  if (spot.token >= static_cast<std::uint32_t>(kv.turn.tokens) || head >= all) return;
  const Heads heads{static_cast<std::int32_t>(all - head)};
  T* both = kv_at<T>(kv.kv, spot.batch, spot.token, head);
  T* key = kv_at<T>(kv.key, spot.batch, spot.token, head);
  const auto lane = static_cast<std::int32_t>(threadIdx.x), lanes = static_cast<std::int32_t>(blockDim.x);
  std::int32_t role = static_cast<std::int32_t>(threadIdx.z), roles = static_cast<std::int32_t>(blockDim.z);
  if constexpr (!Backward) {
    if (role == 0) {
      for (std::int32_t slot = lane; slot < cut.steps.slots; slot += lanes) {
        spread_slot<T, Vec, InAdjacent, OutAdjacent, How>(kv, cut.steps, key, heads, spot.batch, spot.token,
                                                          slot);
      }
      return;
    }
    --role, --roles;
  }
  const bool value = role >= cut.k_roles;
  if (value) both += kv.k_dim, role -= cut.k_roles;
  T* own = value ? kv_at<T>(kv.value, spot.batch, spot.token, head) : key;
  const std::int64_t by_head = value ? kv.value.by_head : kv.key.by_head;
  const std::int32_t slots = value ? cut.v_slots : cut.k_slots, length = value ? kv.v_dim : kv.k_dim,
                     copiers = value ? roles - cut.k_roles : cut.k_roles;
  for (std::int32_t slot = lane + role * lanes; slot < slots; slot += copiers * lanes) {
    if constexpr (Backward) {
      copy_run<T, Vec>(own, by_head, both, kv.kv.by_head, heads, slot, slots, length);
    } else {
      copy_run<T, Vec>(both, kv.kv.by_head, own, by_head, heads, slot, slots, length);
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

template <class T, int Vec, Find How>
hipError_t launch_split(const rotary::KvGeometry& kv, bool backward, hipStream_t stream) {
  const rotary::Geometry& g = kv.turn;
  KvCut c{};
  c.steps = steps_of(g, Vec, 1);
  c.k_slots = (kv.k_dim + 2 * Vec - 1) / (2 * Vec), c.v_slots = (kv.v_dim + 2 * Vec - 1) / (2 * Vec);
  const int lanes = std::clamp(c.steps.slots, 1, kThreads / 4);
  const auto roles = [&](int slots) {
    return std::min((slots + lanes - 1) / lanes, std::min(kThreads / lanes, kMostRoles) / 3);
  };
  c.k_roles = roles(c.k_slots);
  const int all = (backward ? 0 : 1) + c.k_roles + roles(c.v_slots);
  Shape shape =
      shape_of(g, lanes, std::max(all, 1), (kv.heads + kSplitHeads - 1) / kSplitHeads, 0, false, kSplitBlock);
  if (backward) {
    const std::int64_t rows = std::int64_t{shape.block.y} * shape.block.z;
    c.sum_tiles = static_cast<std::uint32_t>((g.tokens + rows - 1) / rows);
    (shape.ground.tiles_first ? shape.grid.x : shape.grid.y) += c.sum_tiles;
  }
  const auto go = [&](auto kernel) {
    return launch_batches(g, shape, [&] {
      c.ground = shape.ground;
      hipLaunchKernelGGL(kernel, shape.grid, shape.block, 0, stream, kv, c);
      return hipGetLastError();
    });
  };
  // The second table entry of a pair is the first when the table is half: one form serves both.
  if constexpr (Vec == 1) {
    return backward ? go(&split_rows<T, 1, false, false, How, true>)
                    : go(&split_rows<T, 1, false, false, How, false>);
  } else if (kv.turn.in_adjacent == kv.turn.out_adjacent) {
    return backward ? go(&split_rows<T, Vec, true, true, How, true>)
                    : go(&split_rows<T, Vec, true, true, How, false>);
  } else {
    return backward ? go(&split_rows<T, Vec, false, true, How, true>)
                    : go(&split_rows<T, Vec, true, false, How, false>);
  }
}

template <class T>
hipError_t launch_kv(const rotary::KvGeometry& kv, bool backward, hipStream_t stream) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  if (!data_vectors(kv)) return launch_split<T, 1, Find::entries>(kv, backward, stream);
  return table_vectors(kv.turn) ? launch_split<T, kVec, Find::rows>(kv, backward, stream)
                                : launch_split<T, kVec, Find::entries>(kv, backward, stream);
}

inline hipError_t launch_kv(const rotary::KvGeometry& kv, bool backward, hipStream_t stream) {
  switch (kv.turn.type) {
    case Float::f32:
      return launch_kv<float>(kv, backward, stream);
    case Float::bf16:
      return launch_kv<bf16>(kv, backward, stream);
    default:
      return launch_kv<fp16>(kv, backward, stream);
  }
}

}  // namespace rlk::simt::rope
