// The consumers of the attention kernel: warpgroups of 64 rows. While a warpgroup computes the weights of a tile, the tensor
// cores add the values of the tile before and take the other warpgroup's products.
#pragma once

#include <utility>

#include "cuda/attention/softmax.cuh"

namespace rlk::cuda::attention {

template <class S>
class Consumer {
  using T = typename S::Element;
  static constexpr int kSums = S::kPartWidth / 2;  // of O, a thread

 public:
  __device__ __forceinline__ Consumer(const Job& job, const Work& w, const Shared<S>& s)
      : job_(job), p_(job.p), w_(w), s_(s), thread_(static_cast<int>(threadIdx.x)), group_(thread_ / 128) {
    // From one lane, so that the compiler sees that a warp stays together.
    const int warp = __shfl_sync(~0u, thread_ / 32 % (S::kRows / 16), 0), lane = thread_ % 32;
    live_ = warp * 16 < w.count;
    tiles_of_split_ = p_.split == 0 ? 1 << 30 : static_cast<int>(p_.split) / kTile;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_[h] = warp * 16 + lane / 4 + 8 * h;
      const attn128::Visible seen = p_.visible(w.offset + query(row_[h]), w.keys);
      rows_.first[h] = static_cast<int>(seen.first), rows_.last[h] = static_cast<int>(seen.last);
      begun_[h] = false, total_m_[h] = -__builtin_inff(), total_l_[h] = 0;
    }
    rows_.restart();
    clear();
  }

  // There is a tile.
  __device__ __forceinline__ void run() {
    load_queries();
    if constexpr (S::kOneByOne)
      one_by_one();
    else
      side_by_side();
  }
  // No key is seen.
  __device__ __forceinline__ void run_empty() {
    if constexpr (!S::kSpread) store();
  }

 private:
  // No product is waited for while another could run: of a tile's scores and the values of the tile before, the scores
  // come first.
  __device__ __forceinline__ void side_by_side() {
    float s[64], a[2];
    std::uint32_t weights[8][4];
    multiply_keys(s, w_.begin);
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    release(s_.k_empty, k_);
    weigh_tile(s, w_.begin, a);
    pack<T>(s, weights);
    for (int tile = w_.begin + 1; tile < w_.end; ++tile) {
      multiply_keys(s, tile);
      multiply_values(weights, tile - 1);
      wgmma_wait<1>();
      wgmma_fence_operand(s);
      release(s_.k_empty, k_);
      const bool next =
          !S::kSpread && (tile & (tiles_of_split_ - 1)) == 0;  // the first tile of another split
      Rows ended;
      if constexpr (!S::kSpread) {
        ended = rows_;
        if (next) rows_.restart();
      }
      const bool changed = weigh_tile(s, tile, a);
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      release(s_.v_empty, v_);
      pack<T>(s, weights);
      if (next) {
        end_split(ended, tile);
      } else if (changed) {
#pragma unroll
        for (int e = 0; e < kSums; ++e) o_[e] = __fmul_rn(o_[e], a[e / 2 % 2]);
      }
    }
    multiply_values(weights, w_.end - 1);
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    if constexpr (S::kSpread) {
      store_part();
    } else {
      end_split(rows_, w_.end);
      store();
    }
  }
  // Where registers do not hold the scores of a tile beside the weights of another.
  __device__ __forceinline__ void one_by_one() {
    float s[64], a[2];
    std::uint32_t weights[8][4];
    for (int tile = w_.begin; tile < w_.end; ++tile) {
      if (!S::kSpread && tile != w_.begin && (tile & (tiles_of_split_ - 1)) == 0) {
        end_split(rows_, tile);
        rows_.restart();
      }
      multiply_keys(s, tile);
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      if constexpr (!S::kLatent)
        release(s_.k_empty, k_);
      else if (!job_.values_in_keys && thread_ % 32 == 0)
        barrier_arrive(s_.v_empty);
      if (weigh_tile(s, tile, a)) {
#pragma unroll
        for (int e = 0; e < kSums; ++e) o_[e] = __fmul_rn(o_[e], a[e / 2 % 2]);
      }
      pack<T>(s, weights);
      multiply_values(weights, tile);
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      if constexpr (!S::kLatent)
        release(s_.v_empty, v_);
      else
        v_.next(), release(s_.k_empty, k_);
    }
    if constexpr (S::kSpread) {
      store_part();
    } else {
      end_split(rows_, w_.end);
      store();
    }
  }

  // What the warpgroup has of the block's rows and of the values' channels.
  __device__ __forceinline__ int first_row() const { return S::kParts > 1 ? 0 : group_ * 64; }
  __device__ __forceinline__ int first_channel() const { return S::kParts > 1 ? group_ * S::kPartWidth : 0; }

  // Rows that are not there are copies of the last one.
  __device__ __forceinline__ int held(int row) const { return row < w_.count ? row : w_.count - 1; }
  __device__ __forceinline__ int query(int row) const { return (w_.first + held(row)) / p_.group; }
  __device__ __forceinline__ int head(int row) const {
    return w_.h * p_.group + (w_.first + held(row)) % p_.group;
  }

  // Warps without rows keep whatever their scores are: nobody reads them.
  __device__ __forceinline__ bool weigh_tile(float (&s)[64], int tile, float (&a)[2]) {
    return live_ && weigh<S::kCapped>(p_, s, rows_, tile * kTile, a);
  }

  __device__ __forceinline__ void load_queries() {
    constexpr int kPieces = S::kWidth / 8, kLoaders = 128 * S::kParts;  // those who use them
    for (int at = thread_ % kLoaders; at < 64 * kPieces; at += kLoaders) {
      const int row = first_row() + at / kPieces, piece = at % kPieces;
      const auto* q = static_cast<const uint4*>(p_.q.at(w_.n, w_.q_begin + query(row), head(row)));
      *reinterpret_cast<uint4*>(s_.q + swizzled(S::kRows, row, piece)) =
          piece * 8 < p_.width ? q[piece] : make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    role_sync(2 + first_row() / 64, kLoaders);
  }

  template <int Stages>
  __device__ __forceinline__ void release(std::uint64_t* empty, Turn<Stages>& turn) {
    if (thread_ % 32 == 0) barrier_arrive(empty + turn.stage);
    turn.next();
  }

  // Where an operand starts; not known beforehand, or all steps of all operands would wait in registers.
  __device__ __forceinline__ static std::uint32_t here(const unsigned char* at) {
    std::uint32_t start = shared_address(at) >> 4;
    asm volatile("" : "+r"(start));
    return start;
  }

  // Scores: 64 rows by the keys of a tile, chains over channels.
  __device__ __forceinline__ void multiply_keys(float (&s)[64], int tile) {
    barrier_wait(s_.k_full + k_.stage, k_.phase);
    if (by_threads(w_, job_.maps.box, tile)) fence_async_proxy();
    const Descriptor q(here(s_.q + first_row() * 128), 1, 64, Swizzle::bytes128),
        k(here(s_.k + k_.stage * S::kKeyBytes), 1, 64, Swizzle::bytes128);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < S::kWidth; d += 16)
      wgmma<T, false, false>(s, q.at(d / 64 * (S::kRows * 8) + d % 64 / 8),
                             k.at(d / 64 * (kTile * 8) + d % 64 / 8), d > 0);
    wgmma_commit();
  }
  // O goes on by chains over the tile's keys.
  __device__ __forceinline__ void multiply_values(const std::uint32_t (&weights)[8][4], int tile) {
    if (!S::kLatent || !job_.values_in_keys) {
      barrier_wait(s_.v_full + v_.stage, v_.phase);
      if (by_threads(w_, job_.maps.box, tile)) fence_async_proxy();
    }
    const Descriptor v(here(s_.v + v_.stage * S::kValueBytes + first_channel() / 64 * kTile * 128), kTile * 8,
                       64, Swizzle::bytes128);
    wgmma_fence_operand(o_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) wgmma<T, true>(o_, weights[k], v.at(k * 128), true);
    wgmma_commit();
  }
  // Joins the sums of the split that ends before tile `end` to those before it; O starts again.
  __device__ __forceinline__ void end_split(const Rows& rows, int end) {
    const int begin = ((end - 1) & -tiles_of_split_) * kTile;
    float a[2], b[2];
    bool sees[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sees[h] = rows.first[h] < rows.last[h] && rows.first[h] < end * kTile && rows.last[h] > begin;
      if (!sees[h]) continue;
      const attn128::Join j = attn128::join(total_m_[h], rows.m[h]);
      a[h] = j.a, b[h] = j.b;
      total_l_[h] = begun_[h] ? attn128::joined(total_l_[h], j.a, rows.l[h], j.b) : rows.l[h];
      total_m_[h] = begun_[h] ? j.m : rows.m[h];
    }
    const auto with = [&](int h, float sum, float o) {
      if (!sees[h]) return sum;
      return begun_[h] ? attn128::joined(sum, a[h], o, b[h]) : o;
    };
    float4* const total = s_.total + thread_;
#pragma unroll
    for (int e = 0; e < kSums; e += 4) {
      float4& x = total[e / 4 * S::kConsumers];
      x = make_float4(with(0, x.x, o_[e]), with(0, x.y, o_[e + 1]), with(1, x.z, o_[e + 2]),
                      with(1, x.w, o_[e + 3]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) begun_[h] = begun_[h] || sees[h];
    clear();
  }

  // The compiler would make a loop a memset, and keep O in memory for it.
  __device__ __forceinline__ void clear() {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((o_[I] = 0), ...);
    }(std::make_integer_sequence<int, kSums>());
  }

  // A split's m, l and O in memory.
  __device__ __forceinline__ void store_part() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_[h] >= w_.count) continue;
      const std::int64_t token = p_.cu_q ? w_.q_begin + query(row_[h]) : w_.n * p_.queries + query(row_[h]);
      float* const to =
          job_.parts +
          ((token * p_.heads * p_.group + head(row_[h])) * job_.splits + blockIdx.y) * (p_.value_width + 2);
      if (thread_ % 4 == 0 && first_channel() == 0)
        *reinterpret_cast<float2*>(to) = make_float2(rows_.m[h], rows_.l[h]);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const int d = first_channel() + 8 * i + thread_ % 4 * 2;
        if (d < p_.value_width)
          *reinterpret_cast<float2*>(to + 2 + d) = make_float2(o_[4 * i + 2 * h], o_[4 * i + 2 * h + 1]);
      }
    }
  }

  __device__ __forceinline__ void store() {
    store_row<0>();
    store_row<1>();
  }
  // Not a loop: one that were not unrolled would keep all of a thread's sums in memory.
  template <int H>
  __device__ __forceinline__ void store_row() {
    if (row_[H] >= w_.count) return;
    const std::int64_t token = w_.q_begin + query(row_[H]);
    const int head_here = head(row_[H]);
    float a = 1, b = 0, lse = p_.sinks != nullptr ? p_.sinks[head_here] : -__builtin_inff();
    const bool none = !begun_[H] || total_l_[H] == 0;
    const bool sink = !none && p_.sinks != nullptr;
    if (sink) {
      const attn128::Join j = attn128::join(total_m_[H], __fmul_rn(lse, attn128::kLog2e));
      a = j.a, b = j.b;
      total_l_[H] = attn128::joined(total_l_[H], a, 1.0f, b), total_m_[H] = j.m;
    }
    if (!none) lse = attn128::lse_of(total_m_[H], total_l_[H]);
    const float inverse = none ? 0 : __fdiv_rn(1.0f, total_l_[H]);
    void* const out = p_.out.at(w_.n, token, head_here);
    const float4* const total = s_.total + thread_;
#pragma unroll 8
    for (int i = 0; i < kSums / 4; ++i) {
      const int d = 8 * i + thread_ % 4 * 2;
      if (d >= p_.value_width) break;
      const float4 x = total[i * S::kConsumers];
      float2 y = H == 0 ? make_float2(x.x, x.y) : make_float2(x.z, x.w);
      if (sink) y = make_float2(attn128::joined(y.x, a, 0.0f, b), attn128::joined(y.y, a, 0.0f, b));
      y = none ? make_float2(0, 0) : make_float2(__fmul_rn(y.x, inverse), __fmul_rn(y.y, inverse));
      if (p_.out.type == rows::Type::f32)
        *reinterpret_cast<float2*>(static_cast<float*>(out) + d) =
            make_float2(simt::from_float<float>(y.x), simt::from_float<float>(y.y));
      else
        *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(out) + d) = pack<T>(y.x, y.y);
    }
    if (p_.lse && thread_ % 4 == 0) rows::store(rows::Type::f32, p_.lse.at(w_.n, token, head_here), 0, lse);
  }

  const Job& job_;
  const Problem& p_;
  const Work& w_;
  const Shared<S>& s_;
  const int thread_, group_;
  int row_[2], tiles_of_split_;  // a power of two
  bool live_, begun_[2];
  Rows rows_;
  float total_m_[2], total_l_[2];
  float o_[kSums];
  Turn<S::kKeyStages> k_;
  Turn<S::kValueStages> v_;
};

}  // namespace rlk::cuda::attention
