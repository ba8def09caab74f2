// Few rows of few sequences: the warps that read. Scorers have the scores of the block's tile, as FewConsumer has them; its
// maxima, weights and their sums go to all blocks of the cluster. Summers have 16 channels each of the sums of all tiles.
#pragma once

#include "cuda/attention/few_rows_cluster_block.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/hopper/copy.cuh"
#include "cuda/hopper/mma.cuh"

namespace rlk::cuda::attention {

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    mma_f16(c, a, b0, b1);
  else
    mma_bf16(c, a, b0, b1);
}

// What scorers and summers have in common: rows, and how m moves on.
template <class S>
class ClusterReader {
 protected:
  static constexpr int kEights = S::kEights, kRows = S::kRows, kBlocks = S::kBlocks, kScorers = S::kScorers;
  using PerRow = float[kEights][2];  // of the rows that a thread holds

  __device__ __forceinline__ ClusterReader(const Job& job, const Work& w, const ClusterShared<S>& s)
      : job_(job),
        p_(job.p),
        w_(w),
        s_(s),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rank_(cluster_rank()) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) m_[n][0] = m_[n][1] = -__builtin_inff();
  }

  __device__ __forceinline__ int row(int n, int i) const { return 8 * n + lane_ % 4 * 2 + i; }
  // Rows that are not there are copies of the last one.
  __device__ __forceinline__ int held(int row) const { return row < w_.count ? row : w_.count - 1; }
  __device__ __forceinline__ int query(int row) const { return (w_.first + held(row)) / p_.group; }
  __device__ __forceinline__ int head(int row) const {
    return w_.h * p_.group + (w_.first + held(row)) % p_.group;
  }
  __device__ __forceinline__ attn128::Visible seen(int row) const {
    return p_.visible(w_.offset + query(row), w_.keys);
  }

  __device__ __forceinline__ Round round_at(int base) const { return {base, min(kBlocks, w_.end - base)}; }

  // m moves on over the round's tiles, ascending, once their maxima are here; of the `at`-th, m before and after it.
  __device__ __forceinline__ void advance(const Round& r, int at, PerRow& before, PerRow& after) {
    barrier_wait_released(s_.barrier(Event::tops_full), phase_);
    const int tile = lane_ / 4 % kBlocks;
    PerRow top;
    bool above = false;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const float* const tops = s_.tops() + tile * kScorers * kRows + row(n, 0);
      float2 x[kScorers];
#pragma unroll
      for (int i = 0; i < kScorers; ++i) x[i] = *reinterpret_cast<const float2*>(tops + i * kRows);
      top[n][0] = fmaxf(fmaxf(x[0].x, x[1].x), fmaxf(x[2].x, x[3].x));
      top[n][1] = fmaxf(fmaxf(x[0].y, x[1].y), fmaxf(x[2].y, x[3].y));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        before[n][i] = after[n][i] = m_[n][i];
        above = above || is_above(top[n][i], p_.c, m_[n][i]);
      }
    }
    if (!__any_sync(~0u, above && tile < r.tiles)) return;  // as mostly, but for a split's first round
#pragma unroll
    for (int t = 0; t < kBlocks; ++t) {
      if (t >= r.tiles) continue;
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float old = m_[n][i];
          m_[n][i] = after_tile(old, of_tile(top[n][i], t), p_.c);
          if (t == at) before[n][i] = old, after[n][i] = m_[n][i];
        }
    }
  }
  // What the lanes of the round's t-th tile hold of this thread's rows.
  __device__ __forceinline__ float of_tile(float x, int t) const {
    return __shfl_sync(~0u, x, 4 * t + lane_ % 4);
  }

  // What was sent for the round is read, and the blocks are told that they may send there again. With the last round
  // this warp has taken all that comes: the cluster's barrier has one arrival for it (start_again, and before blocks leave).
  __device__ __forceinline__ void end_round(const Round& r) {
    __syncwarp();
    if (r.base + r.tiles == w_.end) {
      cluster_arrive_relaxed();
    } else {
      if (lane_ < kBlocks) barrier_arrive_at(s_.barrier(Event::taken), lane_);
      __syncwarp();
    }
    phase_ ^= 1;
  }

  const Job& job_;
  const Problem& p_;
  const Work& w_;
  const ClusterShared<S>& s_;
  const int warp_, lane_, rank_;
  int phase_ = 0;  // of all barriers; it turns with each round
  PerRow m_;
};

template <class S>
class Scorer : ClusterReader<S> {
  using Base = ClusterReader<S>;
  using Base::head, Base::kBlocks, Base::kEights, Base::kRows, Base::kScorers, Base::lane_, Base::p_,
      Base::phase_, Base::query, Base::rank_, Base::row, Base::s_, Base::w_, Base::warp_;
  using T = typename S::Element;
  using PerRow = typename Base::PerRow;
  using Scores = float[2][kEights][4];
  static constexpr int kSteps = kNarrow / 16, kAhead = 4;
  // 64 channels of the tile, whose lines lie as `swizzled` has them.
  static constexpr int kHalfBytes = kTile * 128;

 public:
  __device__ __forceinline__ Scorer(const Job& job, const Work& w, const ClusterShared<S>& s)
      : Base(job, w, s) {}

  __device__ __forceinline__ void run() {
    copy_keys(w_.begin + rank_);
    load_queries();
    for (int base = w_.begin; base < w_.end; base += kBlocks) {
      const Round r = this->round_at(base);
      const bool mine = rank_ < r.tiles;
      if (threadIdx.x == 0) barrier_expect(s_.barrier(Event::tops_full), r.tiles * kScorers * kRows * 4);
      Scores s;
      if (mine) {
        multiply_keys(s);
        mask(s, (base + rank_) * kTile);
        copy_keys(base + rank_ + kBlocks);
      }
      barrier_wait(s_.barrier(Event::taken), phase_ ^ 1);
      if (mine) send_tops(s);
      PerRow before, after;
      this->advance(r, rank_, before, after);
      if (mine) weigh(s, after);
      this->end_round(r);
    }
  }

 private:
  // This warp's keys of the tile, where there is one: two rows at a time. Those behind the sequence's end are zeros.
  __device__ __forceinline__ void copy_keys(int tile) const {
    if (tile >= w_.end) return;
    const int own = min(tile * kTile + warp_ * 16 + lane_ % 16 + lane_ / 16 * 64, w_.keys - 1),
              piece = lane_ % 16;
    const std::int64_t at = Spot(p_, w_, own).place(p_, w_, p_.k);
    const auto* const from = static_cast<const unsigned char*>(p_.k.data) + piece * 16;
    const int line = warp_ * 16 + lane_ / 16, left = w_.keys - tile * kTile - line;
    unsigned char* const to = s_.keys + piece / 8 * kHalfBytes + line * 128;
    const int column = (piece % 8 ^ lane_ / 16) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const int row = 64 * half + i;
        const std::int64_t there = __shfl_sync(~0u, at, 16 * half + i + lane_ / 16);
        if (piece * 8 < p_.width)
          copy16(to + row * 128 + (column ^ i % 8 * 16), from + there, row < left ? 16 : 0);
      }
    copy_commit();
  }

  // Operand B: eight rows by 16 channels.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int r = 8 * n + lane_ / 4;
      const auto* q = static_cast<const std::uint16_t*>(p_.q.at(w_.n, w_.q_begin + query(r), head(r)));
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          q_[k][n][i] = k * 16 < p_.width
                            ? *reinterpret_cast<const std::uint32_t*>(q + k * 16 + i * 8 + lane_ % 4 * 2)
                            : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const attn128::Visible seen = this->seen(row(n, i));
        first_[n][i] = static_cast<int>(seen.first), last_[n][i] = static_cast<int>(seen.last);
      }
    }
  }

  // Scores: keys 16 w .. 16 w + 15 and those 64 further on by the rows, chains over channels.
  __device__ __forceinline__ void multiply_keys(Scores& s) {
    const int line = warp_ * 16 + lane_ % 16, column = (line % 8 ^ lane_ / 16) * 16;
    const unsigned char* const keys = s_.keys + line * 128;
    std::uint32_t a[kAhead][2][4];
    const auto load = [&](int k) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ldmatrix(a[k % kAhead][half], keys + k / 4 * kHalfBytes + half * 64 * 128 + (column ^ k % 4 * 32));
    };
    copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[half][n][e] = 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) load(k);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k * 16 < p_.width) {  // behind it lies nothing
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int n = 0; n < kEights; ++n)
            multiply<T>(s[half][n], a[k % kAhead][half], q_[k][n][0], q_[k][n][1]);
      }
      if (k + kAhead < kSteps) load(k + kAhead);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void mask(Scores& s, int at) const {
    const int key = at + warp_ * 16 + lane_ / 4;
    if (p_.cap != 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[half][n][e] = attn128::capped(p_, s[half][n][e]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[half][n][e];
          const int j = key + 64 * half + e / 2 * 8;
          if (j < first_[n][e % 2] || j >= last_[n][e % 2]) x = -__builtin_inff();
        }
  }

  // The maxima of this warp's keys, by lanes 4 b .. 4 b + 3 to block b.
  __device__ __forceinline__ void send_tops(const Scores& s) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float top[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(fmaxf(s[0][n][i], s[0][n][i + 2]), fmaxf(s[1][n][i], s[1][n][i + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
      }
      const int block = lane_ / 4;
      if (block < kBlocks)
        store_async(
            address_at(shared_address(s_.tops() + (rank_ * kScorers + warp_) * kRows + row(n, 0)), block),
            address_at(shared_address(s_.barrier(Event::tops_full)), block), make_float2(top[0], top[1]));
    }
  }

  // Scores become weights; m is the row's after this tile.
  __device__ __forceinline__ void weigh(const Scores& s, const PerRow& m) const {
    float sums[2 * kEights];  // [row % 2][row / 8] of own_class
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float p[4][2];  // [bit 3 of the key, then bit 6]
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float minus_base = -attn128::base_of(m[n][i]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p[e][i] = unit_exp2(__fmaf_rn(s[e / 2][n][e % 2 * 2 + i], p_.c, minus_base));
      }
      std::uint32_t piece[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) piece[e] = movmatrix(pack<T>(p[e][0], p[e][1]));
      send_weights(n, piece);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[2] = {__fadd_rn(p[0][i], p[1][i]), __fadd_rn(p[2][i], p[3][i])};
#pragma unroll
        for (float& half : x) half = __fadd_rn(half, __shfl_xor_sync(~0u, half, 4));
        sums[i * kEights + n] = __fadd_rn(x[0], x[1]);
      }
    }
    send_sums(sums);
  }
  // Two lanes have the same: each sends to every other block.
  __device__ __forceinline__ void send_sums(const float (&sums)[2 * kEights]) const {
    const std::uint32_t to =
        shared_address(s_.sums() + ((rank_ * kScorers + warp_) * kClasses + own_class(lane_)) * kRows +
                       lane_ % 4 * 2 * kEights);
#pragma unroll
    for (int i = 0; i < kBlocks; i += 2) {
      const int block = (rank_ + i + own_row(lane_)) % kBlocks;
      const std::uint32_t there = address_at(to, block),
                          barrier = address_at(shared_address(s_.barrier(Event::weights_full)), block);
      if constexpr (kEights == 1)
        store_async(there, barrier, make_float2(sums[0], sums[1]));
      else
        store_async(there, barrier, sums);
    }
  }
  // A lane has eight keys of row lane / 4, as operand B of steps w and w + 4 over keys; rows that are not there stay here.
  __device__ __forceinline__ void send_weights(int n, const std::uint32_t (&piece)[4]) const {
    if (8 * n + lane_ / 4 >= w_.count) return;
    const std::uint32_t to = shared_address(s_.weights()) +
                             ((rank_ * kScorers + warp_) * kEights + n) * S::kPieceBytes + lane_ * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = (rank_ + i) % kBlocks;
      store_async(address_at(to, block), address_at(shared_address(s_.barrier(Event::weights_full)), block),
                  piece);
    }
  }

  std::uint32_t q_[kSteps][kEights][2];
  int first_[kEights][2], last_[kEights][2];
};

template <class S>
class Summer : ClusterReader<S> {
  using Base = ClusterReader<S>;
  using Base::head, Base::job_, Base::kBlocks, Base::kEights, Base::kRows, Base::kScorers, Base::lane_,
      Base::m_, Base::of_tile, Base::p_, Base::phase_, Base::query, Base::rank_, Base::row, Base::s_,
      Base::w_, Base::warp_;
  using T = typename S::Element;
  using PerRow = typename Base::PerRow;
  static constexpr int kSteps = kTile / 16;

 public:
  __device__ __forceinline__ Summer(const Job& job, const Work& w, const ClusterShared<S>& s)
      : Base(job, w, s),
        slice_(warp_ - kScorers),
        channel_((rank_ * S::kSlices + slice_) * S::kSlice),
        here_(channel_ < p_.value_width) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      l_[n] = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) o_[n][e] = 0;
    }
  }

  __device__ __forceinline__ void run() {
    for (int base = w_.begin; base < w_.end; base += kBlocks) {
      const Round r = this->round_at(base);
      if (here_) copy_values(r);
      if (slice_ == 0 && lane_ == 0)
        barrier_expect(s_.barrier(Event::weights_full),
                       r.tiles * kScorers * (w_.count * S::kPieceBytes / 8 + kRows * kClasses * 4));
      PerRow before, after, a;
      this->advance(r, lane_ / 4 % kBlocks, before, after);
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) a[n][i] = shrink(before[n][i], after[n][i]);
      copy_wait<0>();
      __syncwarp();
      barrier_wait_released(s_.barrier(Event::weights_full), phase_);
      if (here_) add_tiles(r, a);
      this->end_round(r);
    }
    PerRow l;
    join_classes(lane_, l_, l);
    if (job_.parts == nullptr)
      store(l);
    else
      store_parts(l, w_.begin / static_cast<int>(p_.split / kTile));
  }

 private:
  // This warp's channels of a round: 16 tokens at a time, of whose places a lane has looked up those of every 32nd eight.
  // Values behind the sequence's end are zeros: a weight of 0 would not hide a NaN.
  __device__ __forceinline__ void copy_values(const Round& r) const {
    constexpr int kParts = kBlocks * kTile / 8 / 32;
    Spot spots[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      spots[part] = Spot(p_, w_, min(r.base * kTile + (32 * part + lane_) * 8, (w_.keys - 1) & -8));
    std::int64_t at[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) at[part] = spots[part].place(p_, w_, p_.v);
    const int line = lane_ / 2, left = w_.keys - r.base * kTile - line;
    const auto* const from = static_cast<const unsigned char*>(p_.v.data) +
                             2 * (line % 8 * p_.v.token + channel_) + lane_ % 2 * 16;
    unsigned char* const to = s_.values(slice_) + line * S::kLineBytes + ((lane_ ^ (line / 4)) % 2) * 16;
#pragma unroll
    for (int t = 0; t < kBlocks; ++t) {
      if (t >= r.tiles) continue;
#pragma unroll
      for (int i = 8 * t; i < 8 * t + 8; ++i)
        copy16_near(to + i * 16 * S::kLineBytes,
                    from + __shfl_sync(~0u, at[i / 16], 2 * (i % 16) + lane_ / 16), i * 16 < left ? 16 : 0);
    }
    copy_commit();
  }

  // What each warp of scorers has of a tile's sums, of the lane's own class and row of every eight.
  using Sums = float[kScorers][kEights];
  __device__ __forceinline__ void load_sums(int t, Sums& x) const {
    const float* const sums = s_.sums() + (t * kScorers * kClasses + own_class(lane_)) * kRows +
                              (lane_ % 4 * 2 + own_row(lane_)) * kEights;
#pragma unroll
    for (int w = 0; w < kScorers; ++w) {
      const float* const from = sums + w * kClasses * kRows;
      if constexpr (kEights == 1) {
        x[w][0] = *from;
      } else {
        const float2 both = *reinterpret_cast<const float2*>(from);
        x[w][0] = both.x, x[w][1] = both.y;
      }
    }
  }

  // l and O go on, O by chains over the keys of one tile after another; `a` is held by the lanes of each tile. What a step has
  // used makes room for the next tile's.
  __device__ __forceinline__ void add_tiles(const Round& r, const PerRow& a) {
    const int line = lane_ % 8 + lane_ / 16 * 8, piece = (lane_ / 8 % 2) ^ (line / 4 % 2);
    const unsigned char* const values = s_.values(slice_) + line * S::kLineBytes + piece * 16;
    const unsigned char* const weights = s_.weights() + lane_ * 16;
    std::uint32_t v[kSteps][4];
    uint4 b[kScorers][kEights];
    const auto load_values = [&](int t, int k) {
      ldmatrix_transposed(v[k], values + (t * kTile + k * 16) * S::kLineBytes);
    };
    const auto load_weights = [&](int t, int k) {
#pragma unroll
      for (int n = 0; n < kEights; ++n)
        b[k][n] =
            *reinterpret_cast<const uint4*>(weights + ((t * kScorers + k) * kEights + n) * S::kPieceBytes);
    };
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_values(0, k);
#pragma unroll
    for (int k = 0; k < kScorers; ++k) load_weights(0, k);
    for (int t = 0; t < r.tiles; ++t) {
      const int next = min(t + 1, r.tiles - 1);
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float x[2] = {of_tile(a[n][0], t), of_tile(a[n][1], t)};
        l_[n] = __fmul_rn(l_[n], own_row(lane_) == 0 ? x[0] : x[1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[n][e] = __fmul_rn(o_[n][e], x[e % 2]);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
          const uint4& x = b[k % kScorers][n];
          multiply<T>(o_[n], v[k], k < kScorers ? x.x : x.z, k < kScorers ? x.y : x.w);
        }
        load_values(next, k);
        if (k >= kScorers) load_weights(next, k - kScorers);
      }
      Sums sums;
      load_sums(t, sums);
#pragma unroll
      for (int n = 0; n < kEights; ++n)
        l_[n] =
            __fadd_rn(l_[n], __fadd_rn(__fadd_rn(sums[0][n], sums[1][n]), __fadd_rn(sums[2][n], sums[3][n])));
    }
  }

  // Channel of o_[..][e].
  __device__ __forceinline__ int channel(int e) const { return channel_ + e / 2 * 8 + lane_ / 4; }
  // m and l are the same in all lanes of a row and in all blocks; one of them stores.
  __device__ __forceinline__ bool speaks() const { return channel_ == 0 && lane_ < 4; }

  // m, l and O of the split.
  __device__ __forceinline__ void store_parts(const PerRow& l, int split) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row(n, i);
        if (r >= w_.count || !here_) continue;
        const std::int64_t token = p_.cu_q ? w_.q_begin + query(r) : w_.n * p_.queries + query(r);
        float* const to = job_.parts + ((token * p_.heads * p_.group + head(r)) * job_.splits + split) *
                                           (p_.value_width + 2);
        if (speaks()) *reinterpret_cast<float2*>(to) = make_float2(m_[n][i], l[n][i]);
#pragma unroll
        for (int e = i; e < 4; e += 2) to[2 + channel(e)] = o_[n][e];
      }
  }

  __device__ __forceinline__ void store(const PerRow& l) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (here_ && row(n, i) < w_.count) store_row(n, i, l[n][i]);
  }
  __device__ __forceinline__ void store_row(int n, int i, float l) const {
    const int r = row(n, i);
    const std::int64_t token = w_.q_begin + query(r);
    const attn128::Visible seen = this->seen(r);
    float a = 1, b = 0, lse = p_.sinks != nullptr ? p_.sinks[head(r)] : -__builtin_inff();
    float m = m_[n][i];
    const bool none = seen.first >= seen.last || l == 0, sink = !none && p_.sinks != nullptr;
    if (sink) {
      const attn128::Join j = attn128::join(m, __fmul_rn(lse, attn128::kLog2e));
      a = j.a, b = j.b, l = attn128::joined(l, a, 1.0f, b), m = j.m;
    }
    if (!none) lse = attn128::lse_of(m, l);
    const float inverse = none ? 0 : __fdiv_rn(1.0f, l);
    void* const out = p_.out.at(w_.n, token, head(r));
#pragma unroll
    for (int e = i; e < 4; e += 2) {
      const float x = sink ? attn128::joined(o_[n][e], a, 0.0f, b) : o_[n][e];
      rows::store(p_.out.type, out, channel(e), none ? 0.0f : __fmul_rn(x, inverse));
    }
    if (p_.lse && speaks()) rows::store(rows::Type::f32, p_.lse.at(w_.n, token, head(r)), 0, lse);
  }

  const int slice_, channel_;
  const bool here_;  // Dv has these channels
  float o_[kEights][4];
  float l_[kEights];  // of own_row and own_class
};

}  // namespace rlk::cuda::attention
