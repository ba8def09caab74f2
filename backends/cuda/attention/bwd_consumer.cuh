// The consumers of attention's backward: two warpgroups of 64 still rows each. Scores, and what comes of them, stay in
// registers from one product to the next: with the still side in rows, P and dS are the left operands of the sums over the
// moving side.
#pragma once

#include "cuda/attention/bwd_block.cuh"
#include "cuda/attention/softmax.cuh"

namespace rlk::cuda::attention {

template <class S>
class BackwardConsumer {
  using T = typename S::Element;
  static constexpr int kSums = S::kWidth / 2;  // a thread
  using Sums = float[kSums];

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardJob& job, const BackwardWork& w,
                                              const BackwardShared<S>& s)
      : job_(job), g_(job.g), w_(w), s_(s), thread_(static_cast<int>(threadIdx.x)), group_(thread_ / 128) {
    if constexpr (!S::kKeys) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_of_thread(h);
        stat_[h] = {0, 0};
        if (row < w.count) stat_[h] = job.gathered.stats[w.head * g_.rows() + w.row_begin + w.first + row];
      }
    }
#pragma unroll
    for (int e = 0; e < kSums; ++e) a_[e] = b_[e] = 0;
  }

  // While a warpgroup makes weights of a tile's scores, the tensor cores compute its dP and take the other warpgroup's products.
  __device__ __forceinline__ void run() {
    load_still();
    if (w_.begin < w_.end) {
      float x[32], y[32];
      next_tile(w_.begin);
      multiply(x, 0);
      wait(x);
      multiply(y, 1);
      int tile = w_.begin;
      for (;; ++tile) {
        weigh(x);
        wait(y);
        slope(x, y);
        mask(x, y, tile * S::kMoving);
        add(x, y, S::kKeys || (tile % 2 != 0 && tile != w_.begin));
        if (tile + 1 == w_.end) break;
        next_tile(tile + 1);
        multiply(x, 0);
        wait(x);
        end_tile(tile);
        multiply(y, 1);
      }
      wgmma_wait<0>();
      end_tile(tile);
    }
    S::kKeys ? store_keys() : store_queries();
  }

 private:
  __device__ __forceinline__ void load_still() const {
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
      const int pieces = (tensor == 0 ? g_.p.width : g_.p.value_width) / 8;
      for (int at = thread_ % 128; at < 64 * S::kPieces; at += 128) {
        const int row = group_ * 64 + at / S::kPieces, piece = at % S::kPieces;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < w_.count && piece < pieces)
          x = static_cast<const uint4*>(row_of<S::kKeys>(g_, w_, tensor, w_.first + row))[piece];
        *reinterpret_cast<uint4*>(s_.still[tensor] + swizzled(S::kStill, row, piece)) = x;
      }
    }
    fence_async_proxy();
    role_sync(2 + group_, 128);
  }

  __device__ __forceinline__ void next_tile(int tile) {
    front_.next();
    barrier_wait(s_.full + front_.stage, front_.phase);
    if (by_threads<S>(job_, w_, tile)) fence_async_proxy();
  }
  // Scores or dP: 64 still rows by the tile's, chains over channels.
  __device__ __forceinline__ void multiply(float (&x)[32], int tensor) const {
    const Descriptor still(shared_address(s_.still[tensor] + group_ * 64 * 128) >> 4, 1, 64,
                           Swizzle::bytes128),
        moving(shared_address(s_.moving[tensor] + front_.stage * S::kMovingBytes) >> 4, 1, 64,
               Swizzle::bytes128);
    wgmma_fence_operand(x);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < S::kWidth; d += 16)
      wgmma<T, false, false>(x, still.at(d / 64 * (S::kStill * 8) + d % 64 / 8),
                             moving.at(d / 64 * (S::kMoving * 8) + d % 64 / 8), d > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ static void wait(float (&x)[32]) {
    wgmma_wait<0>();
    wgmma_fence_operand(x);
  }
  // P and dS as left operands: d_k and d_v go on by chains over the tile's rows; or the chain over a tile of the rule does, or starts.
  __device__ __forceinline__ void add(const float (&x)[32], const float (&y)[32], bool continued) {
    std::uint32_t weights[4][4], ds[4][4];
    if constexpr (S::kKeys) pack32(x, weights);
    pack32(y, ds);
    wgmma_fence_operand(a_);
    if constexpr (S::kKeys) wgmma_fence_operand(b_);
    wgmma_fence();
    if constexpr (S::kKeys) {
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<T, true>(b_, weights[k], moving_rows(1).at(k * 128), true);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<T, true>(a_, ds[k], moving_rows(0).at(k * 128), continued || k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ Descriptor moving_rows(int tensor) const {
    return {shared_address(s_.moving[tensor] + back_.stage * S::kMovingBytes) >> 4, S::kMoving * 8, 64,
            Swizzle::bytes128};
  }
  // The tile's sums are there.
  __device__ __forceinline__ void end_tile(int tile) {
    wgmma_fence_operand(a_);
    if constexpr (S::kKeys) wgmma_fence_operand(b_);
    if (S::kKeys || thread_ % 32 == 0)
      barrier_arrive(s_.empty + back_.stage);  // each lane has read its stats
    back_.next();
    if constexpr (!S::kKeys) {
      // A tile of the rule is two here.
      if (tile % 2 == 0 && tile + 1 != w_.end) return;
#pragma unroll
      for (int e = 0; e < kSums; ++e) b_[e] = __fadd_rn(b_[e], a_[e]);
    }
  }

  // What the row of element e has for all keys alike. Asked for in ascending order.
  __device__ __forceinline__ Stat stat(int e, float4& pair) const {
    if constexpr (!S::kKeys) return stat_[e / 2 % 2];
    if (e % 4 == 0) pair = s_.stats[(back_.stage * S::kMoving + thread_ % 4 * 2 + e / 4 * 8) / 2];
    return e % 2 == 0 ? Stat{pair.x, pair.y} : Stat{pair.z, pair.w};
  }
  // Scores become P.
  __device__ __forceinline__ void weigh(float (&x)[32]) const {
    if constexpr (S::kCapped) return;  // scores are wanted later
    float4 pair = {};
    if constexpr (S::kUnit) {
#pragma unroll
      for (int e = 0; e < 32; ++e) x[e] = weight<true>(x[e], g_.p.c, -stat(e, pair).base);
      return;
    }
    bool inside = true;
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      x[e] = __fmaf_rn(x[e], g_.p.c, -stat(e, pair).base);
      inside = inside && fabsf(x[e]) <= kMostMagnitude;
    }
    if (__all_sync(~0u, inside)) {
#pragma unroll
      for (float& e : x) e = exp2_inside(e);
    } else {
#pragma unroll
      for (float& e : x) e = simt::exp2(e);
    }
  }
  // dP becomes dS.
  __device__ __forceinline__ void slope(float (&x)[32], float (&y)[32]) const {
    float4 pair = {};
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const Stat row = stat(e, pair);
      if constexpr (S::kCapped) {
        const attn128::Capped<float> score = attn128::capped_with_slope<float>(g_.p, x[e]);
        const auto both =
            attn128::slope_of(g_.p, score, weight<S::kUnit>(score.score, g_.p.c, -row.base), y[e], row);
        x[e] = both.p, y[e] = both.ds;
      } else {
        y[e] = __fmul_rn(x[e], __fadd_rn(y[e], -row.delta));
      }
    }
  }
  // Both are +0 where a pair is masked.
  __device__ __forceinline__ void mask(float (&x)[32], float (&y)[32], int at) const {
    if (w_.all_from <= at && at + S::kMoving <= w_.all_to) return;
    const int j = at + thread_ % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_thread(h), i = w_.first + row;
      const attn128::Visible seen =
          S::kKeys ? g_.queries(w_.n, i, i + 1) : g_.p.visible(w_.keys - w_.queries + i, w_.keys);
      const int first = static_cast<int>(seen.first), last = row < w_.count ? static_cast<int>(seen.last) : 0;
#pragma unroll
      for (int e = 0; e < 32; ++e)
        if (const int other = j + e / 4 * 8 + e % 2; e / 2 % 2 == h && (other < first || other >= last))
          x[e] = y[e] = 0;
    }
  }
  __device__ __forceinline__ int row_of_thread(int h) const {
    return thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * h;
  }
  __device__ __forceinline__ static void pack32(const float (&x)[32], std::uint32_t (&to)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[k][i] = pack<T>(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
  }

  // d_k and d_v of one query head, to be joined with those of the others.
  __device__ __forceinline__ void store_keys() const {
    const int width = g_.p.width, both = width + g_.p.value_width;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_thread(h);
      if (row >= w_.count) continue;
      const std::int64_t key = (g_.p.cu_k ? w_.k_begin : w_.n * g_.p.room + w_.k_begin) + w_.first + row;
      float* const to = job_.gathered.parts + (key * g_.all_heads() + w_.head) * both;
#pragma unroll
      for (int i = 0; i < S::kWidth / 8; ++i) {
        const int d = 8 * i + thread_ % 4 * 2, e = 4 * i + 2 * h;
        if (d < width) *reinterpret_cast<float2*>(to + d) = make_float2(a_[e], a_[e + 1]);
        if (d < g_.p.value_width) *reinterpret_cast<float2*>(to + width + d) = make_float2(b_[e], b_[e + 1]);
      }
    }
  }
  __device__ __forceinline__ void store_queries() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_thread(h);
      if (row >= w_.count) continue;
      void* const to = g_.d_q.at(w_.n, w_.q_begin + w_.first + row, w_.head);
#pragma unroll
      for (int i = 0; i < S::kWidth / 8; ++i) {
        const int d = 8 * i + thread_ % 4 * 2, e = 4 * i + 2 * h;
        if (d >= g_.p.width) continue;
        const float2 x = make_float2(__fmul_rn(b_[e], g_.p.scale), __fmul_rn(b_[e + 1], g_.p.scale));
        if (g_.d_q.type == rows::Type::f32)
          *reinterpret_cast<float2*>(static_cast<float*>(to) + d) =
              make_float2(simt::from_float<float>(x.x), simt::from_float<float>(x.y));
        else
          *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(to) + d) = pack<T>(x.x, x.y);
      }
    }
  }

  // Where exp2_inside is exp2: results, and 2^n by itself, are normal.
  static constexpr float kMostMagnitude = 125;

  const BackwardJob& job_;
  const Backward& g_;
  const BackwardWork& w_;
  const BackwardShared<S>& s_;
  const int thread_, group_;
  Stat stat_[2];
  Sums a_, b_;  // d_k and d_v; or the chain of a tile, and d_q
  Turn<S::kStages> front_{S::kStages - 1, 1},
      back_;  // of the tile that is multiplied, and of the one that is weighed
};

}  // namespace rlk::cuda::attention
