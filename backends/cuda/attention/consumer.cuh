// The consumers of the attention kernel: warpgroups of 64 rows. While a warpgroup computes the weights of a tile, the tensor
// cores have the others' products.
#pragma once

#include <utility>

#include "cuda/attention/softmax.cuh"
#include "cuda/hopper/mma.cuh"

namespace rlk::cuda::attention {

template <class S>
class Consumer {
  using T = typename S::Element;
  static constexpr int kSums = S::kPartWidth / 2;  // of O, a thread
  // Warpgroups order products by turns.
  static constexpr bool kInTurns = S::kGroups > 1;

 public:
  __device__ __forceinline__ Consumer(const Job& job, const Shared<S>& s)
      : job_(job), p_(job.p), s_(s), thread_(static_cast<int>(threadIdx.x)), group_(uniform(thread_ / 128)) {
    tiles_of_split_ = p_.split == 0 ? 1 << 30 : static_cast<int>(p_.split) / kTile;
    if constexpr (kInTurns)
      if (group_ == S::kGroups - 1) pass_turn();
  }

  // The item that comes next: how many rows it has, or none. (As a bool it would keep the compiler from seeing that a warp
  // stays together, and products would wait for one another.)
  __device__ __forceinline__ int next() {
    barrier_wait(s_.q_full + first_row() / 64, items_.phase);
    fence_async_proxy();
    const Work& w = s_.work[works_.stage];
    items_.next(), works_.next();
    const int count = uniform(w.count);
    if (count > 0)
      begin(w);
    else
      release_queries();
    return count;
  }
  __device__ __forceinline__ void begin(const Work& w) {
    w_ = &w;
    begin_ = uniform(w.begin), end_ = uniform(w.end), keys_ = uniform(w.keys);
    by_tma_ = S::kPrefixed ? 0 : tiles_by_tma(keys_, job_.maps.box);
  }

  __device__ __forceinline__ void run() {
    if constexpr (kInTurns) {
      if (first_row() >= uniform(w_->count)) return pass_by();
    }
    Last last;
    if (begin_ < end_) {
      if constexpr (S::kOneByOne)
        one_by_one(last);
      else
        side_by_side(last);
    } else {
      see();
      release_queries();
      settle(last);
    }
    if constexpr (S::kSpread)
      store_part((end_ - 1) / tiles_of_split_);
    else
      finish(last);
  }

 private:
  // Of a split that ends: what a thread's rows see of it, and what O is joined by.
  struct Ending {
    bool sees[2];
    float a[2], b[2];
    bool whole;  // every row of the warp sees all of its last tile
  };
  // How a thread's two rows end: the last split's sums are joined to the others', a sink comes last, and rows go to memory.
  struct Last {
    Ending split;
    bool both;           // every row of the warp sees the split and others
    bool others;         // or some have seen others
    float sink[2][2];    // what O is multiplied by, and 0, where there are sinks
    float inverse[2];    // of l
    bool none;           // its own row sees no key
    long long place[2];  // of the result, in bytes
  };
  // Of a warpgroup without rows: its part of what the others wait for.
  __device__ __forceinline__ void pass_by() {
    release_queries();
#pragma unroll 1
    for (int tile = begin_; tile < end_; ++tile) {
      barrier_wait(s_.k_full + k_.stage, k_.phase), release(s_.k_empty, k_);
      barrier_wait(s_.v_full + v_.stage, v_.phase), release(s_.v_empty, v_);
      role_sync(4 + group_, 256);
      pass_turn();
    }
  }

  // What a thread's rows see, and no sums.
  __device__ __forceinline__ void see() {
    const int warp = uniform(thread_ / 32 % (S::kRows / 16)), lane = thread_ % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_[h] = warp * 16 + lane / 4 + 8 * h;
      const int2 seen = s_.seen[row_[h]];
      rows_.first[h] = seen.x, rows_.last[h] = seen.y;
      begun_[h] = false;
    }
    all_begun_ = some_begun_ = false;
    total_m_ = -__builtin_inff(), total_l_ = 0;
    rows_.whole = __reduce_max_sync(~0u, (max(rows_.first[0], rows_.first[1]) + kTile - 1) / kTile);
    const int end = __reduce_min_sync(~0u, min(rows_.last[0], rows_.last[1]) / kTile);
    rows_.wholes = max(end - rows_.whole, 0);
    sums_.m[0] = sums_.m[1] = -__builtin_inff();
    lacking_ = true;
    clear();
  }

  // A warp that orders products is held until all but the last are done, so there are weights of a tile and products of the
  // next by turns. Weights take the registers of those of the tile before: of each half of the keys when its products
  // are done. The vote between the halves is needed nowhere, but without a branch the compiler waits for both at once.
  __device__ __forceinline__ void side_by_side(Last& last) {
    float s[64];
    std::uint32_t weights[8][4];
    int boundary = (begin_ | (tiles_of_split_ - 1)) + 1;  // the tile that begins the next split
    await_keys(begin_);
    multiply_keys(s);
    see();
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    bool special = true;  // more than its weights is to be done for the tile
    for (int tile = begin_;;) {
      release(s_.k_empty, k_);
      const bool more = tile + 1 < end_;
      bool starts = tile == begin_, sure = false;
      if (special) [[unlikely]] {
        if (!more) release_queries();
        mask<S::kCapped>(p_, s, rows_, tile, rows_.partly(tile));
        wgmma_fence_operand(s);
        sure = starts || tile == boundary || lacking_;
        if (sure) {
          float top[2];
          greatest(s, top);
          if (starts) {
            start_split(top);
          } else if (tile == boundary) {
            next_split(top, tile);
            boundary += tiles_of_split_, starts = true;
          } else {
            move(top, starts);
          }
        }
      }
      float sum[2];
      bool there;
      for (;; sure = true, move(s, starts)) {
        float low[4][2], high[4][2], p[8];
        wgmma_wait<1>();
        weigh_into<0>(s, p, low[0], weights), weigh_into<1>(s, p, low[1], weights);
        weigh_into<2>(s, p, low[2], weights), weigh_into<3>(s, p, low[3], weights);
        const float most = fmaxf(fmaxf(low[0][0], low[0][1]), fmaxf(low[1][0], low[1][1]));
        if (!__all_sync(~0u, sure || most < kMuch)) continue;
        wgmma_wait<0>();
        wgmma_fence_operand(o_);
        weigh_into<4>(s, p, high[0], weights), weigh_into<5>(s, p, high[1], weights);
        weigh_into<6>(s, p, high[2], weights);
        // Mostly both have been there for long.
        there = barrier_test(s_.k_full + k_.stage, k_.phase) & barrier_test(s_.v_full + v_.stage, v_.phase) &
                (tile + 1 < by_tma_);
        weigh_into<7>(s, p, high[3], weights);
        sum_up(low, high, sum);
        if (__all_sync(~0u, sure || (sum[0] < kMuch && sum[1] < kMuch))) break;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) sums_.l[h] = __fadd_rn(sums_.l[h], sum[h]);
      if (tile != begin_) barrier_arrive_if(elected(), s_.v_empty + last_values());
      here(weights);
      wgmma_fence_operand(o_);
      if (!there) [[unlikely]] {
        if (more) await_keys(tile + 1);
        await_values(tile);
      }
      if constexpr (kInTurns) role_sync(4 + group_, 256);
      if (more) multiply_keys(s);
      multiply_values<2>(weights, starts);
      v_.next();
      if constexpr (kInTurns) pass_turn();
      special = S::kCapped || rows_.partly(tile + 1) || tile + 1 == boundary || lacking_ || tile + 2 >= end_;
      wgmma_wait<2>();
      wgmma_fence_operand(s);
      if (++tile == end_) break;
    }
    settle(last);
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    barrier_arrive_if(elected(), s_.v_empty + last_values());
  }
  // Sums of a lane's weights from here on ask for a look at the scores: one of them may be above 2^kHeld.
  static constexpr float kMuch = 128;
  template <int K>
  __device__ __forceinline__ void weigh_into(const float (&s)[64], float (&p)[8], float (&sum)[2],
                                             std::uint32_t (&weights)[8][4]) const {
    weigh<K>(s, p_.c, sums_.minus, p, sum);
    pack<T>(p, weights[K]);
  }
  // Bits 6, 4 and 5 of the index.
  static __device__ __forceinline__ void sum_up(const float (&low)[4][2], const float (&high)[4][2],
                                                float (&sum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = __fadd_rn(low[k][h], high[k][h]);
      sum[h] = __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3]));
    }
  }
  __device__ __forceinline__ void start_split(const float (&top)[2]) {
    sums_.start(top, p_.c);
    lacking_ = sums_.lack();
  }
  // The split before the tile ends, and the tile's starts.
  __device__ __forceinline__ void next_split(const float (&top)[2], int tile) {
    l_ = sums_.folded();
    if constexpr (S::kSpread) {
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      store_part((tile - 1) / tiles_of_split_);
    } else {
      const Ending ending = ending_split(tile);
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      end_split(ending);
    }
    start_split(top);
  }
  // m moves, and O with it; of a split's first products nothing is there yet.
  __device__ __forceinline__ void move(const float (&s)[64], bool starts) {
    float top[2];
    greatest(s, top);
    move(top, starts);
  }
  __device__ __forceinline__ void move(const float (&top)[2], bool starts) {
    float by[2];
    sums_.move(top, p_.c, by);
    lacking_ = sums_.lack();
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    if (starts) return;
#pragma unroll
    for (int e = 0; e < kSums; ++e) o_[e] = __fmul_rn(o_[e], by[e / 2 % 2]);
  }
  // Computed by here, not where it is used.
  static __device__ __forceinline__ void here(std::uint32_t (&x)[8][4]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(x[i / 4][i % 4]));
  }
  // The place of the values that the last products were of.
  __device__ __forceinline__ int last_values() const {
    return (v_.stage + S::kValueStages - 1) % S::kValueStages;
  }
  // The next warpgroup may order its products.
  __device__ __forceinline__ void pass_turn() const {
    asm volatile("bar.arrive %0, 256;" ::"r"(4 + (group_ + 1) % S::kGroups) : "memory");
  }
  // Where registers do not hold the scores of a tile beside its weights: scores become weights in place, so that whether one is
  // far above m is asked of them first. A turn is a tile's values and the next one's keys, if no split ends between the two.
  __device__ __forceinline__ void one_by_one(Last& last) {
    see();
    float s[64];
    std::uint32_t weights[8][4];
    for (int tile = begin_; tile < end_; ++tile) {
      const bool first = tile == begin_, next = !first && (tile & (tiles_of_split_ - 1)) == 0;
      if (next) {
        l_ = sums_.folded();
        if constexpr (S::kSpread)
          store_part((tile - 1) / tiles_of_split_);
        else
          end_split(ending_split(tile));
      }
      await_keys(tile);
      multiply_keys(s);
      if constexpr (kInTurns)
        if (!first && !next) pass_turn();
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      if constexpr (!S::kLatent)
        release(s_.k_empty, k_);
      else if (!job_.values_in_keys)
        barrier_arrive_if(elected(), s_.v_empty);
      if (tile + 1 == end_) release_queries();
      mask<S::kCapped>(p_, s, rows_, tile, rows_.partly(tile));
      if (first || next || lacking_ || any_above(s)) {
        float top[2];
        greatest(s, top);
        if (first || next)
          start_split(top);
        else
          move(top, false);
      }
      weigh_all(s, weights);
      await_values(tile);
      if constexpr (kInTurns) role_sync(4 + group_, 256);
      multiply_values<1>(weights, first || next);
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      if constexpr (kInTurns)
        if (tile + 1 == end_ || ((tile + 1) & (tiles_of_split_ - 1)) == 0) pass_turn();
      if constexpr (!S::kLatent)
        release(s_.v_empty, v_);
      else
        v_.next(), release(s_.k_empty, k_);
    }
    settle(last);
  }
  // Whether a score of the warp's is far above its row's m.
  __device__ __forceinline__ bool any_above(const float (&s)[64]) const {
    float top[2];
    greatest_of_lane(s, top);
    return __any_sync(~0u, sums_.above(top[0], p_.c, 0) || sums_.above(top[1], p_.c, 1));
  }
  __device__ __forceinline__ void weigh_all(const float (&s)[64], std::uint32_t (&weights)[8][4]) {
    float low[4][2], high[4][2], p[8], sum[2];
    weigh_into<0>(s, p, low[0], weights), weigh_into<1>(s, p, low[1], weights);
    weigh_into<2>(s, p, low[2], weights), weigh_into<3>(s, p, low[3], weights);
    weigh_into<4>(s, p, high[0], weights), weigh_into<5>(s, p, high[1], weights);
    weigh_into<6>(s, p, high[2], weights), weigh_into<7>(s, p, high[3], weights);
    sum_up(low, high, sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) sums_.l[h] = __fadd_rn(sums_.l[h], sum[h]);
  }
  // Whether row h sees anything of the split that ends before tile `end`.
  __device__ __forceinline__ bool sees_split(int h, int end) const {
    const int begin = (max(end - 1, 0) & -tiles_of_split_) * kTile;
    return rows_.first[h] < rows_.last[h] && rows_.first[h] < end * kTile && rows_.last[h] > begin;
  }
  // All that does not need the last products of values, which may be under way. What is done once a row is done for a thread's own
  // one: half the code, which is not in the instruction cache.
  __device__ __forceinline__ void settle(Last& last) {
    l_ = begin_ < end_ ? sums_.folded() : 0;
    if constexpr (S::kSpread) return;
    last.split = ending_split(end_);
    last.both = __all_sync(~0u, last.split.sees[0] && last.split.sees[1] && begun_[0] && begun_[1]);
    last.others = some_begun_;
    float m = total_m_, l = total_l_;
    last.none = !(own(begun_) || own(last.split.sees)) || l == 0;
    const int row = own(row_), at = query(row), of = head(row);
    float lse = -__builtin_inff();
    if (p_.sinks != nullptr) [[unlikely]] {
      lse = p_.sinks[of];
      const attn128::Join j = attn128::join(m, __fmul_rn(lse, attn128::kLog2e));
      if (!last.none) l = attn128::joined(l, j.a, 1.0f, j.b), m = j.m;
      both_rows(j.a, last.sink[0]), both_rows(j.b, last.sink[1]);
    }
    if (!last.none) lse = attn128::lse_of(m, l);
    if (p_.lse && thread_ % 2 == 0 && row < w_->count)
      rows::store(rows::Type::f32, p_.lse.at(w_->n, w_->q_begin + at, of), 0, lse);
    both_rows(last.none ? 0.0f : __fdiv_rn(1.0f, l), last.inverse);
    both_rows(static_cast<char*>(p_.out.at(w_->n, w_->q_begin + at, of)) - static_cast<char*>(p_.out.data),
              last.place);
  }
  // Rows that see no key are zeros.
  __device__ __forceinline__ void finish(const Last& last) {
    join_last(last);
    if (p_.sinks != nullptr) [[unlikely]] {
#pragma unroll
      for (int e = 0; e < kSums; ++e)
        o_[e] = attn128::joined(o_[e], last.sink[0][e / 2 % 2], 0.0f, last.sink[1][e / 2 % 2]);
    }
    if (__any_sync(~0u, last.none)) [[unlikely]] {
      int nones[2];
      both_rows(static_cast<int>(last.none), nones);
#pragma unroll
      for (int e = 0; e < kSums; ++e) o_[e] = nones[e / 2 % 2] ? 0.0f : o_[e];
    }
#pragma unroll
    for (int e = 0; e < kSums; ++e) o_[e] = __fmul_rn(o_[e], last.inverse[e / 2 % 2]);
    if (p_.out.type == rows::Type::f32)
      store_rows<float2>(last.place);
    else
      store_rows<std::uint32_t>(last.place);
  }
  __device__ __forceinline__ void join_last(const Last& last) {
    const auto& [sees, a, b, whole] = last.split;
    const float4* const total = totals();
    if (last.both) {
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        const float4 x = total[e / 4 * S::kConsumers];
        o_[e] = attn128::joined(x.x, a[0], o_[e], b[0]),
        o_[e + 1] = attn128::joined(x.y, a[0], o_[e + 1], b[0]);
        o_[e + 2] = attn128::joined(x.z, a[1], o_[e + 2], b[1]);
        o_[e + 3] = attn128::joined(x.w, a[1], o_[e + 3], b[1]);
      }
    } else if (last.others) [[unlikely]] {
      const auto with = [&](int h, float sum, float& o) {
        const float both = attn128::joined(sum, a[h], o, b[h]);
        o = !begun_[h] ? o : sees[h] ? both : sum;
      };
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        const float4 x = total[e / 4 * S::kConsumers];
        with(0, x.x, o_[e]), with(0, x.y, o_[e + 1]), with(1, x.z, o_[e + 2]), with(1, x.w, o_[e + 3]);
      }
    }
  }
  // A thread's own row's m and l of the split that ends before tile `end` join those of the splits before, where it sees anything
  // of it.
  __device__ __forceinline__ Ending ending_split(int end) {
    Ending e{{true, true}, {}, {}, !rows_.partly(end - 1)};
    if (!e.whole) e.sees[0] = sees_split(0, end), e.sees[1] = sees_split(1, end);
    const float m = own(sums_.m), most = fmaxf(total_m_, m), base = fmaxf(most, -FLT_MAX),
                own_a = exp2_down(__fsub_rn(total_m_, base)), own_b = exp2_down(__fsub_rn(m, base));
    both_rows(own_a, e.a), both_rows(own_b, e.b);
    if (!own(e.sees)) return e;
    const bool joins = own(begun_);
    total_l_ = joins ? attn128::joined(total_l_, own_a, l_, own_b) : l_;
    total_m_ = joins ? most : m;
    return e;
  }

  // What the warpgroup has of the block's rows and of the values' channels.
  __device__ __forceinline__ int first_row() const { return S::kParts > 1 ? 0 : group_ * 64; }
  __device__ __forceinline__ int first_channel() const { return S::kParts > 1 ? group_ * S::kPartWidth : 0; }

  // Rows that are not there are copies of the last one.
  __device__ __forceinline__ int held(int row) const { return row < w_->count ? row : w_->count - 1; }
  __device__ __forceinline__ int query(int row) const { return (w_->first + held(row)) / p_.group; }
  __device__ __forceinline__ int head(int row) const {
    return w_->h * p_.group + (w_->first + held(row)) % p_.group;
  }

  // Their last scores are there. Every lane arrives, which has read what the item is.
  __device__ __forceinline__ void release_queries() { barrier_arrive(s_.q_empty + first_row() / 64); }

  template <int Stages>
  __device__ __forceinline__ void release(std::uint64_t* empty, Turn<Stages>& turn) {
    barrier_arrive_if(elected(), empty + turn.stage);
    turn.next();
  }

  // Where an operand starts; not known beforehand, or all steps of all operands would wait in registers.
  __device__ __forceinline__ static std::uint32_t start_of(const unsigned char* at) {
    std::uint32_t start = shared_address(at) >> 4;
    asm volatile("" : "+r"(start));
    return start;
  }

  __device__ __forceinline__ void await_keys(int tile) {
    barrier_wait(s_.k_full + k_.stage, k_.phase);
    if (tile >= by_tma_) [[unlikely]]
      fence_async_proxy();
  }
  __device__ __forceinline__ void await_values(int tile) {
    if (!S::kLatent || !job_.values_in_keys) {
      barrier_wait(s_.v_full + v_.stage, v_.phase);
      if (tile >= by_tma_) [[unlikely]]
        fence_async_proxy();
    }
  }
  // Scores: 64 rows by the keys of a tile, chains over channels.
  __device__ __forceinline__ void multiply_keys(float (&s)[64]) {
    const Descriptor q(start_of(s_.q + first_row() * 128), 1, 64, Swizzle::bytes128),
        k(start_of(s_.k + k_.stage * S::kKeyBytes), 1, 64, Swizzle::bytes128);
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < S::kChannels; d += 16)
      wgmma<T, false, false>(s, q.at(d / 64 * (S::kRows * 8) + d % 64 / 8),
                             k.at(d / 64 * (kTile * 8) + d % 64 / 8), d > 0);
    wgmma_commit();
  }
  // O goes on by chains over the tile's keys, or, of a split's first tile, starts at +0 whatever was there. To be waited for in as
  // many groups.
  template <int Groups>
  __device__ __forceinline__ void multiply_values(const std::uint32_t (&weights)[8][4], bool starts) {
    const Descriptor v(start_of(s_.v + v_.stage * S::kValueBytes + first_channel() / 64 * kTile * 128),
                       kTile * 8, 64, Swizzle::bytes128);
    wgmma_fence_operand(o_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      wgmma<T, true>(o_, weights[k], v.at(k * 128), k > 0 || !starts);
      if ((k + 1) % (8 / Groups) == 0) wgmma_commit();
    }
  }
  // A thread's sums of the splits before, four numbers at every kConsumers.
  __device__ __forceinline__ float4* totals() const {
    if constexpr (S::kTotalsApart)
      return reinterpret_cast<float4*>(job_.parts) + blockIdx.x * (S::kRows * S::kValueWidth / 4) + thread_;
    else
      return s_.total + thread_;
  }
  // O of a split that ends is joined to that of those before it. A row that sees nothing keeps its sums; one that sees its first
  // split takes the new ones as they are.
  __device__ __forceinline__ void end_split(const Ending& ending) {
    const auto& [sees, a, b, whole] = ending;
    const auto each = [&](auto sum) {
      float4* const total = totals();
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        float4& x = total[e / 4 * S::kConsumers];
        x = make_float4(sum(0, x.x, o_[e]), sum(0, x.y, o_[e + 1]), sum(1, x.z, o_[e + 2]),
                        sum(1, x.w, o_[e + 3]));
      }
    };
    const auto joined = [&](int h, float sum, float o) { return attn128::joined(sum, a[h], o, b[h]); };
    if (whole && all_begun_) return each(joined);
    if (whole && !some_begun_)
      each([](int, float, float o) { return o; });
    else
      each([&](int h, float sum, float o) { return !sees[h] ? sum : begun_[h] ? joined(h, sum, o) : o; });
#pragma unroll
    for (int h = 0; h < 2; ++h) begun_[h] = begun_[h] || sees[h];
    all_begun_ = __all_sync(~0u, begun_[0] && begun_[1]);
    some_begun_ = __any_sync(~0u, begun_[0] || begun_[1]);
  }

  // The compiler would make a loop a memset, and keep O in memory for it.
  __device__ __forceinline__ void clear() {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((o_[I] = 0), ...);
    }(std::make_integer_sequence<int, kSums>());
  }

  // A split's m, l and O in memory.
  __device__ __forceinline__ void store_part(int split) const {
    using simt::from_float;  // which leaves one NaN
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_[h] >= w_->count) continue;
      const std::int64_t token = p_.cu_q ? w_->q_begin + query(row_[h]) : w_->n * p_.queries + query(row_[h]);
      float* const to = job_.parts + ((token * p_.heads * p_.group + head(row_[h])) * job_.splits + split) *
                                         (p_.value_width + 2);
      if (thread_ % 4 == 2 * h && first_channel() == 0)
        *reinterpret_cast<float2*>(to) = make_float2(sums_.m[h], from_float<float>(l_));
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const int d = first_channel() + 8 * i + thread_ % 4 * 2;
        if (d < p_.value_width)
          *reinterpret_cast<float2*>(to + 2 + d) =
              make_float2(from_float<float>(o_[4 * i + 2 * h]), from_float<float>(o_[4 * i + 2 * h + 1]));
      }
    }
  }

  // Two channels at once, or, of 16 bits, four: two lanes of a row change places, and its four write 32 bytes side by side.
  template <class Two>
  __device__ __forceinline__ void store_rows(const long long (&at)[2]) const {
    const int lane = thread_ % 4;
    const bool odd = lane % 2 != 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      char* const to = static_cast<char*>(p_.out.data) + at[h];
      const bool there = row_[h] < w_->count;
      if constexpr (sizeof(Two) == 4) {
        const bool by_eight =
            p_.value_width == S::kPartWidth && __all_sync(~0u, reinterpret_cast<std::uintptr_t>(to) % 8 == 0);
        if (by_eight) {
          char* const own = to + (odd ? 12 : 0) + 4 * lane;
#pragma unroll
          for (int i = 0; i < kSums / 4; i += 2) {
            const std::uint32_t first = two<std::uint32_t>(i, h), second = two<std::uint32_t>(i + 1, h),
                                other = __shfl_xor_sync(~0u, odd ? first : second, 1);
            if (there)
              *reinterpret_cast<uint2*>(own + 16 * i) =
                  odd ? make_uint2(other, second) : make_uint2(first, other);
          }
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const int d = 8 * i + lane * 2;
        if (there && d < p_.value_width) *reinterpret_cast<Two*>(to + d / 2 * sizeof(Two)) = two<Two>(i, h);
      }
    }
  }
  template <class Two>
  __device__ __forceinline__ Two two(int i, int h) const {
    const float x = o_[4 * i + 2 * h], y = o_[4 * i + 2 * h + 1];
    if constexpr (sizeof(Two) == 4)
      return pack<T>(x, y);
    else
      return make_float2(simt::from_float<float>(x), simt::from_float<float>(y));
  }
  const Job& job_;
  const Problem& p_;
  const Work* w_ = nullptr;
  int begin_ = 0, end_ = 0, keys_ = 0;  // of it
  int by_tma_ = 0;                      // tiles from here on are, or may be, brought by threads
  const Shared<S>& s_;
  const int thread_, group_;
  int row_[2], tiles_of_split_;             // a power of two
  bool begun_[2], all_begun_, some_begun_;  // seen a split that has ended: a row, those of the warp
  Rows rows_;
  Sums sums_;
  bool lacking_;                 // a row of the warp has no m yet
  float l_, total_m_, total_l_;  // of its own row: of the split at hand when it ends, and of those before
  float o_[kSums];
  Turn<S::kKeyStages> k_;
  Turn<S::kValueStages> v_;
  Turn<1> items_;
  Turn<kWorks> works_;
};

}  // namespace rlk::cuda::attention
