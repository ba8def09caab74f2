// The consumers of attention's backward: two warpgroups of 64 still rows each, or, of wide heads, of the same 64. Scores, and what comes of them, stay in
// registers from one product to the next: with the still side in rows, P and dS are the left operands of the sums over the
// moving side.
#pragma once

#include "cuda/attention/bwd_block.cuh"
#include "cuda/attention/exponential.cuh"
#include "cuda/hopper/mma.cuh"

namespace rlk::cuda::attention {

// What comes next of tiles and items.
template <class S>
struct ConsumerTurns {
  Turn<S::kStages> front{S::kStages - 1, 1},
      back;  // of the tile that is multiplied, and of the one whose sums are there next
  Turn<S::kItems> items;
};

template <class S, Side Still>
class BackwardConsumer {
  using T = typename S::Element;
  static constexpr bool kKeys = Still == Side::keys;
  static constexpr bool kShared = S::kShared;  // the warpgroups have the same still rows
  static constexpr int kColumns =
      kShared ? S::kMoving / 2 : S::kMoving;             // moving rows of a warpgroup's scores
  static constexpr int kScores = kColumns / 2;           // a thread
  static constexpr int kChunks = S::kMoving / 16;        // of moving rows, as many as a product adds up
  static constexpr int kTilesOfRule = 128 / S::kMoving;  // tiles here that one of the rule is
  // Of a thread: of the first tensor, and of keys' second one or, of queries, what the first's go to.
  static constexpr int kSums = S::sums_of(0) / 2, kOthers = kKeys ? S::sums_of(1) / 2 : kSums;
  using Scores = float[kScores];

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardJob& job, const BackwardShared<S>& s,
                                              const ConsumerTurns<S>& turns)
      : turns(turns),
        job_(job),
        g_(job.g),
        s_(s),
        thread_(static_cast<int>(threadIdx.x)),
        group_(uniform(thread_ / 128)) {}

  ConsumerTurns<S> turns;

  // The item that comes next, if it is of this side. While a warpgroup makes weights of a tile's scores, the tensor cores
  // compute its dP and take the other warpgroup's products.
  __device__ __forceinline__ bool run() {
    barrier_wait(s_.item_full + turns.items.stage, turns.items.phase);
    if (work().still != Still) return false;
    begin_ = uniform(work().begin), end_ = uniform(work().end);
    by_tma_ = S::kPrefixed ? 0 : uniform(work().by_tma);
    all_from_ = uniform(work().all_from), all_to_ = uniform(work().all_to);
    fence_async_proxy();
    begin();
    if (begin_ < end_) tiles();
    leave_still();
    if (!kKeys)
      store_rows(g_.d_q, b_, g_.p.scale, g_.p.width, first_channel(0));
    else if (!S::kPrefixed || ends_)
      finish_keys();
    turns.items.next();
    return true;
  }

 private:
  __device__ __forceinline__ void begin() {
    if constexpr (!kKeys) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_of_thread(h);
        stat_[h] = {0, 0};
        if (row < work().count)
          stat_[h] = job_.gathered.stats[work().head * g_.rows() + work().row_begin + work().first + row];
      }
    }
    if (!kKeys || !S::kPrefixed || !work().goes_on) clear();
  }
  __device__ __forceinline__ const BackwardWork& work() const { return s_.work[turns.items.stage]; }
  // What storing needs of the item is kept; its still rows and description are not needed any more.
  __device__ __forceinline__ void leave_still() {
    const BackwardWork& w = work();
    n_ = w.n, row_ = (kKeys ? w.k_begin : w.q_begin) + w.first;
    count_ = w.count, head_ = w.head, place_ = w.place, ends_ = w.ends;
    barrier_arrive(s_.item_empty + turns.items.stage);
  }

  __device__ __forceinline__ void tiles() {
    if constexpr (S::kSteps == Steps::turns)
      by_turns();
    else if constexpr (S::kSteps == Steps::ahead)
      ahead();
    else if constexpr (kShared)
      together();
    else
      in_pieces();
  }
  // Each warpgroup makes half of a tile's P and dS, and sums over all of them of half the channels. What it leaves in shared
  // memory it leaves by turns in two places: when both have come with one, both have done with the other.
  __device__ __forceinline__ void together() {
    Scores x, y;
    std::uint32_t first[S::held(0)][4], second[S::held(1)][4];
    hold(first, 0);
    hold(second, 1);
    next_tile(begin_);
    multiply(x, 0, first);
    wait(x);
    multiply(y, 1, second);
    for (int tile = begin_; tile < end_; ++tile) {
      stage_ = turns.front.stage;
      weigh(x);
      wait(y);
      slope(x, y);
      mask(x, y, tile * S::kMoving);
      add_slopes(leave_slopes(x, y), continued(tile));
      // Behind the last tile products of whatever lies there: ptxas does not let products run on past a branch.
      next_tile(tile + 1, tile + 1 < end_);
      multiply(x, 0, first);
      multiply(y, 1, second);
      wgmma_wait<1>();
      wgmma_fence_operand(x);
      end_tile(tile);
    }
    wait(y);
  }
  // Still rows as left operands: 16 channels a step, as many steps as there are registers for. From shared memory each warpgroup
  // would bring them for every tile, and that has not the speed of products so narrow.
  template <int Steps>
  __device__ __forceinline__ void hold(std::uint32_t (&to)[Steps][4], int tensor) const {
    const int lane = thread_ % 32, row = thread_ % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < Steps; ++k)
      ldmatrix(to[k], still_of(tensor) + swizzled(S::kStill, row, 2 * k + lane / 16));
  }
  template <int Steps>
  __device__ __forceinline__ void multiply(Scores& x, int tensor,
                                           const std::uint32_t (&held)[Steps][4]) const {
    const Descriptor still(shared_address(still_of(tensor)) >> 4, 1, 64, Swizzle::bytes128),
        moving(shared_address(moving_of(tensor) + first_column() * 128) >> 4, 1, 64, Swizzle::bytes128);
    wgmma_fence_operand(x);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::width(tensor) / 16; ++k) {
      const std::uint64_t right = moving.at(k / 4 * (S::kMoving * 8) + k % 4 * 2);
      if (k < Steps)
        wgmma<T, false>(x, held[k], right, k > 0);
      else
        wgmma<T, false, false>(x, still.at(k / 4 * (S::kStill * 8) + k % 4 * 2), right, k > 0);
    }
    wgmma_commit();
  }
  // The place of both warpgroups' P and dS, which are there.
  __device__ __forceinline__ const unsigned char* leave_slopes(const Scores& x, const Scores& y) {
    unsigned char* const to = s_.slopes + place_of_slopes_ * 2 * S::kSlopeBytes;
    if constexpr (kKeys) leave_slopes(x, to);
    leave_slopes(y, to + S::kSlopeBytes);
    place_of_slopes_ ^= 1;
    fence_async_proxy();
    role_sync(2, S::kConsumers);
    return to;
  }
  // A warpgroup's half of P or dS, [still][moving] in lines of 128 bytes as wgmma has them.
  __device__ __forceinline__ void leave_slopes(const Scores& x, unsigned char* to) const {
    static_assert(!kShared || S::kMoving == 64, "a line");
#pragma unroll
    for (int e = 0; e < kScores; e += 2) {
      const int row = row_of_thread(e / 2 % 2), piece = (first_column() + e / 4 * 8) / 8;
      *reinterpret_cast<std::uint32_t*>(to + swizzled(S::kStill, row, piece) + thread_ % 4 * 4) =
          pack<T>(x[e], x[e + 1]);
    }
  }
  __device__ __forceinline__ void add_slopes(const unsigned char* from, bool continued) {
    const Descriptor weights(shared_address(from) >> 4, 1, 64, Swizzle::bytes128),
        ds(shared_address(from + S::kSlopeBytes) >> 4, 1, 64, Swizzle::bytes128);
    wgmma_fence_operand(a_);
    if constexpr (kKeys) wgmma_fence_operand(b_);
    wgmma_fence();
    if constexpr (kKeys) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
        wgmma<T, false, true>(b_, weights.at(2 * k), moving_rows(1).at(k * 128), true);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      wgmma<T, false, true>(a_, ds.at(2 * k), moving_rows(0).at(k * 128), continued || k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void by_turns() {
    Scores x, y;
    next_tile(begin_);
    multiply(x, 0);
    wait(x);
    multiply(y, 1);
    int tile = begin_;
    for (;; ++tile) {
      weigh(x);
      wait(y);
      slope(x, y);
      mask(x, y, tile * S::kMoving);
      add(x, y, continued(tile));
      if (tile + 1 == end_) break;
      next_tile(tile + 1);
      multiply(x, 0);
      wait(x);
      end_tile(tile);
      multiply(y, 1);
    }
    wgmma_wait<0>();
    end_tile(tile);
  }
  // Products are handed over a few at a time between pieces of P and dS: a warp that hands over many at once is held until
  // nearly all of them are done.
  __device__ __forceinline__ void in_pieces() {
    Scores x, y;
    next_tile(begin_);
    multiply(x, 0);
    wait(x);
    int tile = begin_;
    for (;; ++tile) {
      weigh_beside(x, y);
      mask(x, tile * S::kMoving);
      wait(y);
      slope_beside(x, y, continued(tile));
      if (tile + 1 == end_) break;
      next_tile(tile + 1);
      multiply(x, 0);
      wait(x);
      end_tile(tile);
    }
    wgmma_wait<0>();
    end_tile(tile);
  }
  // The tensor cores have a tile's last products to do when the next tile's scores are there.
  __device__ __forceinline__ void ahead() {
    Scores x, y;
    next_tile(begin_);
    multiply(x, 0);
    wait(x);
    for (int tile = begin_; tile < end_; ++tile) {
      stage_ = turns.front.stage;
      weigh(x);
      mask(x, tile * S::kMoving);
      wgmma_wait<0>();
      wgmma_fence_operand(a_);
      if constexpr (kKeys) wgmma_fence_operand(b_);
      products_of_values(y);
      if (tile != begin_) end_tile(tile - 1);
      add_weights(x);
      wgmma_wait<kKeys ? 1 : 0>();
      wgmma_fence_operand(y);
      std::uint32_t ds[kChunks][4];
      float2 pair = {};
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        slope_chunk(x, y, k, pair);
        pack_chunk(y, k, ds[k]);
      }
      // Behind the last tile scores of whatever lies there: ptxas does not let products run on past a branch.
      next_tile(tile + 1, tile + 1 < end_);
      multiply(x, 0);
      wgmma_fence_operand(a_);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunks; ++k)
        wgmma<T, true>(a_, ds[k], moving_rows(0).at(k * 128), continued(tile) || k > 0);
      wgmma_commit();
      wgmma_wait<1>();
      wgmma_fence_operand(x);
    }
    wgmma_wait<0>();
    end_tile(end_ - 1);
  }

  __device__ __forceinline__ void products_of_values(Scores& y) const {
    wgmma_fence_operand(y);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kChannels / 16; ++i) product_of_values(y, i);
    wgmma_commit();
  }

  // P of a chunk of scores.
  __device__ __forceinline__ void weigh_chunk(Scores& x, int k, float2& pair) const {
#pragma unroll
    for (int e = 8 * k; e < 8 * k + 8; ++e) asm volatile("" : "+f"(x[e]));
    if constexpr (S::kUnit) {
#pragma unroll
      for (int e = 8 * k; e < 8 * k + 8; ++e) x[e] = weight<true>(x[e], g_.p.c, -base(e, pair));
    } else {
      float some[8];
      bool inside = true;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        some[i] = __fmaf_rn(x[8 * k + i], g_.p.c, -base(8 * k + i, pair));
        inside = inside && fabsf(some[i]) <= kMostMagnitude;
      }
      if (__all_sync(~0u, inside)) {
        exp2_inside(some);
      } else {
#pragma unroll
        for (float& one : some) one = simt::exp2(one);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) x[8 * k + i] = some[i];
    }
#pragma unroll
    for (int e = 8 * k; e < 8 * k + 8; ++e) asm volatile("" : "+f"(x[e]));
  }
  // dS of a chunk, in place of dP.
  __device__ __forceinline__ void slope_chunk(const Scores& x, Scores& y, int k, float2& pair) const {
#pragma unroll
    for (int e = 8 * k; e < 8 * k + 8; ++e) y[e] = __fmul_rn(x[e], __fadd_rn(y[e], -delta(e, pair)));
  }
  __device__ __forceinline__ static void pack_chunk(const Scores& x, int k, std::uint32_t (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = pack<T>(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
  }
  // dP's products between pieces of P.
  __device__ __forceinline__ void weigh_beside(Scores& x, Scores& y) const {
    constexpr int kProducts = S::kChannels / 16;
    float2 pair = {};
    wgmma_fence_operand(y);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      wgmma_fence();
#pragma unroll
      for (int i = k * kProducts / kChunks; i < (k + 1) * kProducts / kChunks; ++i) product_of_values(y, i);
      if (k + 1 == kChunks) wgmma_commit();
      weigh_chunk(x, k, pair);
    }
  }
  // P is there: d_v's products.
  __device__ __forceinline__ void add_weights(const Scores& x) {
    if constexpr (kKeys) {
      std::uint32_t weights[kChunks][4];
#pragma unroll
      for (int k = 0; k < kChunks; ++k) pack_chunk(x, k, weights[k]);
      wgmma_fence_operand(b_);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kChunks; ++k) wgmma<T, true>(b_, weights[k], moving_rows(1).at(k * 128), true);
      wgmma_commit();
    }
  }
  // d_k's or d_q's products, and d_v's, each when its piece of dS is there.
  __device__ __forceinline__ void slope_beside(const Scores& x, Scores& y, bool continued) {
    float2 pair = {};
    wgmma_fence_operand(a_);
    if constexpr (kKeys) wgmma_fence_operand(b_);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      std::uint32_t weights[4], ds[4];
      if constexpr (kKeys) pack_chunk(x, k, weights);
      slope_chunk(x, y, k, pair);
      pack_chunk(y, k, ds);
      wgmma_fence();
      if constexpr (kKeys) wgmma<T, true>(b_, weights, moving_rows(1).at(k * 128), true);
      wgmma<T, true>(a_, ds, moving_rows(0).at(k * 128), continued || k > 0);
    }
    wgmma_commit();
  }
  // Whether a tile's chain goes on from the tile before: d_k's always does.
  __device__ __forceinline__ bool continued(int tile) const {
    return kKeys || (tile % kTilesOfRule != 0 && tile != begin_);
  }
  __device__ __forceinline__ void next_tile(int tile, bool there = true) {
    if (!there) return;
    turns.front.next();
    barrier_wait(s_.full + turns.front.stage, turns.front.phase);
    if (tile >= by_tma_) fence_async_proxy();
  }
  // Scores or dP: 64 still rows by the tile's, chains over channels.
  __device__ __forceinline__ void multiply(Scores& x, int tensor) const {
    const Descriptor still(shared_address(still_of(tensor)) >> 4, 1, 64, Swizzle::bytes128),
        moving(shared_address(moving_of(tensor)) >> 4, 1, 64, Swizzle::bytes128);
    wgmma_fence_operand(x);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < S::kChannels; d += 16)
      wgmma<T, false, false>(x, still.at(d / 64 * (S::kStill * 8) + d % 64 / 8),
                             moving.at(d / 64 * (S::kMoving * 8) + d % 64 / 8), d > 0);
    wgmma_commit();
  }
  // The warpgroup's still rows.
  __device__ __forceinline__ const unsigned char* still_of(int tensor) const {
    return s_.still[tensor] + turns.items.stage * S::still_bytes(tensor) + (kShared ? 0 : group_ * 64 * 128);
  }
  // The tile that comes next.
  __device__ __forceinline__ const unsigned char* moving_of(int tensor) const {
    return s_.moving[tensor] + turns.front.stage * S::moving_bytes(tensor);
  }
  // The first moving row of the warpgroup's scores, and the first channel of its sums.
  __device__ __forceinline__ int first_column() const { return kShared ? group_ * kColumns : 0; }
  __device__ __forceinline__ int first_channel(int tensor) const {
    return kShared ? group_ * S::sums_of(tensor) : 0;
  }
  // One of dP's products, over channels from 16 i on.
  __device__ __forceinline__ void product_of_values(Scores& y, int i) const {
    const int d = 16 * i;
    const std::uint64_t moving = Descriptor(shared_address(moving_of(1)) >> 4, 1, 64, Swizzle::bytes128)
                                     .at(d / 64 * (S::kMoving * 8) + d % 64 / 8);
    const std::uint64_t still = Descriptor(shared_address(still_of(1)) >> 4, 1, 64, Swizzle::bytes128)
                                    .at(d / 64 * (S::kStill * 8) + d % 64 / 8);
    wgmma<T, false, false>(y, still, moving, d > 0);
  }
  __device__ __forceinline__ static void wait(Scores& x) {
    wgmma_wait<0>();
    wgmma_fence_operand(x);
  }
  // P and dS as left operands: d_k and d_v go on by chains over the tile's rows; or the chain over a tile of the rule does, or starts.
  __device__ __forceinline__ void add(const Scores& x, const Scores& y, bool continued) {
    std::uint32_t weights[kChunks][4], ds[kChunks][4];

#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if constexpr (kKeys) pack_chunk(x, k, weights[k]);
      pack_chunk(y, k, ds[k]);
    }
    wgmma_fence_operand(a_);
    if constexpr (kKeys) wgmma_fence_operand(b_);
    wgmma_fence();
    if constexpr (kKeys) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) wgmma<T, true>(b_, weights[k], moving_rows(1).at(k * 128), true);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      wgmma<T, true>(a_, ds[k], moving_rows(0).at(k * 128), continued || k > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ Descriptor moving_rows(int tensor) const {
    return {shared_address(s_.moving[tensor] + stage() * S::moving_bytes(tensor) +
                           first_channel(tensor) / 64 * S::kMoving * 128) >>
                4,
            S::kMoving * 8, 64, Swizzle::bytes128};
  }
  // Of the tile that is weighed.
  __device__ __forceinline__ int stage() const {
    return S::kSteps == Steps::ahead || kShared ? stage_ : static_cast<int>(turns.back.stage);
  }
  // The tile's sums are there.
  __device__ __forceinline__ void end_tile(int tile) {
    wgmma_fence_operand(a_);
    if constexpr (kKeys) wgmma_fence_operand(b_);
    barrier_arrive(s_.empty + turns.back.stage);
    turns.back.next();
    if constexpr (!kKeys) {
      if (tile % kTilesOfRule + 1 != kTilesOfRule && tile + 1 != end_) return;  // the rule's goes on
#pragma unroll
      for (int e = 0; e < kSums; ++e) b_[e] = __fadd_rn(b_[e], a_[e]);
    }
  }

  // What the query of element e has for all keys alike. Asked for in ascending order.
  __device__ __forceinline__ float base(int e, float2& pair) const {
    return kKeys ? of_pair(0, e, pair) : stat_[e / 2 % 2].base;
  }
  __device__ __forceinline__ float delta(int e, float2& pair) const {
    return kKeys ? of_pair(S::kMoving, e, pair) : stat_[e / 2 % 2].delta;
  }
  __device__ __forceinline__ float of_pair(int first, int e, float2& pair) const {
    const int at = stage() * 2 * S::kMoving + first + first_column() + thread_ % 4 * 2 + e / 4 * 8;
    if (e % 4 == 0) pair = *reinterpret_cast<const float2*>(s_.stats + at);
    return e % 2 == 0 ? pair.x : pair.y;
  }
  // Scores become P.
  __device__ __forceinline__ void weigh(Scores& x) const {
    if constexpr (S::kCapped) return;  // scores are wanted later
    float2 pair = {};
    if constexpr (S::kUnit) {
#pragma unroll
      for (int e = 0; e < kScores; ++e) x[e] = weight<true>(x[e], g_.p.c, -base(e, pair));
      return;
    }
    bool inside = true;
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      x[e] = __fmaf_rn(x[e], g_.p.c, -base(e, pair));
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
  __device__ __forceinline__ void slope(Scores& x, Scores& y) const {
    float2 bases = {}, deltas = {};
#pragma unroll
    for (int e = 0; e < kScores; ++e) {
      if constexpr (S::kCapped) {
        const Stat row{base(e, bases), delta(e, deltas)};
        const attn128::Capped<float> score = attn128::capped_with_slope<float>(g_.p, x[e]);
        const auto both =
            attn128::slope_of(g_.p, score, weight<S::kUnit>(score.score, g_.p.c, -row.base), y[e], row);
        x[e] = both.p, y[e] = both.ds;
      } else {
        y[e] = __fmul_rn(x[e], __fadd_rn(y[e], -delta(e, deltas)));
      }
    }
  }
  // Both are +0 where a pair is masked; or P alone, of which dS will be made: its zero may have a sign then, which no chain shows.
  __device__ __forceinline__ void mask(Scores& x, int at) const { mask(x, x, at); }
  __device__ __forceinline__ void mask(Scores& x, Scores& y, int at) const {
    if (all_from_ <= at && at + S::kMoving <= all_to_) return;
    const int j = at + first_column() + thread_ % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_thread(h), i = work().first + row;
      const attn128::Visible seen = kKeys ? g_.queries(work().queries, work().keys, i, i + 1)
                                          : g_.p.visible(work().keys - work().queries + i, work().keys);
      const int first = static_cast<int>(seen.first),
                last = row < work().count ? static_cast<int>(seen.last) : 0;
#pragma unroll
      for (int e = 0; e < kScores; ++e)
        if (const int other = j + e / 4 * 8 + e % 2; e / 2 % 2 == h && (other < first || other >= last))
          x[e] = y[e] = 0;
    }
  }
  __device__ __forceinline__ int row_of_thread(int h) const {
    return (kShared ? thread_ % 128 : thread_) / 32 * 16 + thread_ % 32 / 4 + 8 * h;
  }

  // A query head's d_k and d_v are there.
  __device__ __forceinline__ void finish_keys() {
    const int together = job_.gathered.together;
    if (together > 1) join(place_, together);
    if (place_ + 1 < together) return;
    if (together < g_.p.group) return store_part();
    store_rows(g_.d_k, a_, g_.p.scale, g_.p.width, first_channel(0));
    store_rows(g_.d_v, b_, 1, g_.p.value_width, first_channel(1));
  }
  // Sums over some of the heads that share keys, to be joined with those of the others.
  __device__ __forceinline__ void store_part() const {
    const int width = g_.p.width, both = width + g_.p.value_width, together = job_.gathered.together;
    const int parts = g_.all_heads() / together, part = head_ / together;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_thread(h);
      if (row >= count_) continue;
      const std::int64_t key = (g_.p.cu_k ? 0 : n_ * g_.p.room) + row_ + row;
      float* const to = job_.gathered.parts + (key * parts + part) * both;
      store_part(to, a_, h, first_channel(0), width);
      store_part(to + width, b_, h, first_channel(1), g_.p.value_width);
    }
  }
  template <int Size>
  __device__ __forceinline__ void store_part(float* to, const float (&sums)[Size], int h, int channel,
                                             int width) const {
#pragma unroll
    for (int i = 0; i < Size / 4; ++i) {
      const int d = channel + 8 * i + thread_ % 4 * 2, e = 4 * i + 2 * h;
      if (d < width) *reinterpret_cast<float2*>(to + d) = make_float2(sums[e], sums[e + 1]);
    }
  }
  // Rows of the still side, finished, from `channel` on.
  template <int Size>
  __device__ __forceinline__ void store_rows(const attn128::Tensor& tensor, const float (&sums)[Size],
                                             float scale, int width, int channel) const {
    if (!tensor) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_thread(h);
      if (row >= count_) continue;
      void* const to = tensor.at(n_, row_ + row, kKeys ? head_ / g_.p.group : head_);
#pragma unroll
      for (int i = 0; i < Size / 4; ++i) {
        const int d = channel + 8 * i + thread_ % 4 * 2, e = 4 * i + 2 * h;
        if (d >= width) continue;
        const float2 x = make_float2(__fmul_rn(sums[e], scale), __fmul_rn(sums[e + 1], scale));
        if (tensor.type == rows::Type::f32)
          *reinterpret_cast<float2*>(static_cast<float*>(to) + d) =
              make_float2(simt::from_float<float>(x.x), simt::from_float<float>(x.y));
        else
          *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(to) + d) = pack<T>(x.x, x.y);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& e : a_) e = 0;
#pragma unroll
    for (float& e : b_) e = 0;
  }
  // The sums of head i of those that a block has are there. Those of heads before wait in memory, each thread's own: as a binary
  // counter has them, which is the tree of neighbours, or ascending.
  __device__ __forceinline__ void join(int i, int together) {
    constexpr int kEach = kSums / 4 * S::kConsumers, kBoth = (kSums + kOthers) / 4 * S::kConsumers;
    float4* at = reinterpret_cast<float4*>(job_.gathered.waiting) +
                 std::int64_t{blockIdx.x} * waiting_levels(together) * kBoth + thread_;
    const bool pairs = (together & (together - 1)) == 0;
    for (int left = pairs ? i : i > 0; left & 1; left = pairs ? left >> 1 : 0) {
      take_in(at, a_), take_in(at + kEach, b_);
      if (pairs) at += kBoth;
    }
    if (i + 1 < together) leave(at, a_), leave(at + kEach, b_);
  }
  template <int Size>
  __device__ __forceinline__ static void take_in(const float4* from, float (&sums)[Size]) {
#pragma unroll
    for (int e = 0; e < Size; e += 4) {
      const float4 x = __ldcg(from + e / 4 * S::kConsumers);
      sums[e] = __fadd_rn(x.x, sums[e]), sums[e + 1] = __fadd_rn(x.y, sums[e + 1]);
      sums[e + 2] = __fadd_rn(x.z, sums[e + 2]), sums[e + 3] = __fadd_rn(x.w, sums[e + 3]);
    }
  }
  template <int Size>
  __device__ __forceinline__ static void leave(float4* to, const float (&sums)[Size]) {
#pragma unroll
    for (int e = 0; e < Size; e += 4)
      __stcg(to + e / 4 * S::kConsumers, make_float4(sums[e], sums[e + 1], sums[e + 2], sums[e + 3]));
  }

  // Where exp2_inside is exp2: results, and 2^n by itself, are normal.
  static constexpr float kMostMagnitude = 125;

  const BackwardJob& job_;
  const Backward& g_;
  int begin_ = 0, end_ = 0, all_from_ = 0, all_to_ = 0, by_tma_ = 0;  // of the item, as BackwardWork has them
  const BackwardShared<S>& s_;
  const int thread_, group_;
  Stat stat_[2];
  float a_[kSums], b_[kOthers];  // d_k and d_v; or the chain of a tile, and d_q
  int stage_ = 0;
  std::int64_t n_ = 0, row_ = 0;
  int count_ = 0, head_ = 0, place_ = 0;
  int place_of_slopes_ = 0;
  bool ends_ = true;
};

}  // namespace rlk::cuda::attention
