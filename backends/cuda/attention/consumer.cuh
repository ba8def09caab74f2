// The consumers of the attention kernel: warpgroups of 64 rows. While a warpgroup computes the weights of a
// tile, the tensor cores add the values of the tile before and take the other warpgroup's products.
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
  // No product is waited for while another could run: of a tile's scores and the values of the tile before,
  // the scores come first. The first half of a tile's weights is computed while the latter run, which keep 32
  // registers for so long.
  __device__ __forceinline__ void side_by_side() {
    float s[64], before[2], sums[2][4], sum[2];
    Bases bases;
    std::uint32_t weights[8][4];
    wgmma_fence_operand(o_);
    multiply_keys(s, w_.begin);
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    for (int tile = w_.begin; tile < w_.end; ++tile) {
      release(s_.k_empty, k_);
      const bool first = tile == w_.begin;
      const bool next =
          !S::kSpread && !first && (tile & (tiles_of_split_ - 1)) == 0;  // the first tile of another split
      Rows ended;
      if constexpr (!S::kSpread) {
        ended = rows_;
        if (next) rows_.restart();
      }
      const bool changed = look<S::kCapped, S::kUnit>(p_, s, rows_, tile * kTile, before, bases);
      if constexpr (!S::kUnit) weigh<false, 0, 1>(p_.c, s, bases, sums);
      wgmma_fence_operand(s);
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      wgmma_fence_operand(s);
      if (!first) release(s_.v_empty, v_);
      if constexpr (S::kUnit)
        weigh<true, 0, 1, 2, 3>(p_.c, s, bases, sums);
      else
        weigh<false, 2, 3>(p_.c, s, bases, sums);
      pack<T>(s, weights);
      tree(sums, sum);
      if (next) {
        end_split(ended, tile);
        rows_.l[0] = sum[0], rows_.l[1] = sum[1];
      } else {
        go_on(changed, before, bases, sum);
      }
      // Behind the last tile scores of whatever lies there: a second copy of the loop's body, which is not in
      // the instruction cache, costs a block far more.
      multiply_keys(s, tile + 1, tile + 1 < w_.end);
      multiply_values(weights, tile);
      wgmma_wait<1>();
      wgmma_fence_operand(s);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(o_);
    end();
  }
  // Where registers do not hold the scores of a tile beside the weights of another.
  __device__ __forceinline__ void one_by_one() {
    float s[64], before[2], sums[2][4], sum[2];
    Bases bases;
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
      const bool changed = look<S::kCapped, S::kUnit>(p_, s, rows_, tile * kTile, before, bases);
      weigh<S::kUnit, 0, 1, 2, 3>(p_.c, s, bases, sums);
      tree(sums, sum);
      go_on(changed, before, bases, sum);
      pack<T>(s, weights);
      multiply_values(weights, tile);
      wgmma_wait<0>();
      wgmma_fence_operand(o_);
      if constexpr (!S::kLatent)
        release(s_.v_empty, v_);
      else
        v_.next(), release(s_.k_empty, k_);
    }
    end();
  }
  // A tile's weights are there: l takes in their sum, and O what it is multiplied by. Where no maximum of the
  // warp moved, that is 1, which leaves O and l as they are.
  __device__ __forceinline__ void go_on(bool changed, const float (&before)[2], const Bases& bases,
                                        const float (&sum)[2]) {
    if (changed) {
      float a[2];
      factors(before, bases, a);
#pragma unroll
      for (int e = 0; e < kSums; ++e) o_[e] = __fmul_rn(o_[e], a[e / 2 % 2]);
#pragma unroll
      for (int h = 0; h < 2; ++h) rows_.l[h] = __fmaf_rn(rows_.l[h], a[h], sum[h]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) rows_.l[h] = __fadd_rn(rows_.l[h], sum[h]);
    }
  }
  __device__ __forceinline__ void end() {
    if constexpr (S::kSpread) {
      store_part();
    } else {
      end_last();
      store();
    }
  }
  // Of a row what it is joined by to the splits before; whether it sees anything of the split that ends before `end`.
  __device__ __forceinline__ bool join_row(int h, const Rows& rows, int end, float& a, float& b) {
    const int begin = ((end - 1) & -tiles_of_split_) * kTile;
    const bool sees = rows.first[h] < rows.last[h] && rows.first[h] < end * kTile && rows.last[h] > begin;
    if (sees) {
      const attn128::Join j = attn128::join(total_m_[h], rows.m[h]);
      a = j.a, b = j.b;
      total_l_[h] = begun_[h] ? attn128::joined(total_l_[h], j.a, rows.l[h], j.b) : rows.l[h];
      total_m_[h] = begun_[h] ? j.m : rows.m[h];
    }
    return sees;
  }
  // The last split's sums are joined to the others' in registers.
  __device__ __forceinline__ void end_last() {
    float a[2] = {}, b[2] = {};
    bool sees[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) sees[h] = join_row(h, rows_, w_.end, a[h], b[h]);
    if (__any_sync(~0u, begun_[0] || begun_[1])) {
      const float4* const total = s_.total + thread_;
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
#pragma unroll
    for (int h = 0; h < 2; ++h) begun_[h] = begun_[h] || sees[h];
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

  __device__ __forceinline__ void load_queries() {
    constexpr int kPieces = S::kWidth / 8, kLoaders = 128 * S::kParts;  // those who use them
    // Copies do not wait for one another, and a loop is less code to bring than its eight turns.
#pragma unroll 1
    for (int at = thread_ % kLoaders; at < 64 * kPieces; at += kLoaders) {
      const int row = first_row() + at / kPieces, piece = at % kPieces;
      const auto* q = static_cast<const uint4*>(p_.q.at(w_.n, w_.q_begin + query(row), head(row)));
      const bool there = piece * 8 < p_.width;
      copy16(s_.q + swizzled(S::kRows, row, piece), there ? q + piece : q, there ? 16 : 0);
    }
    copy_commit();
    copy_wait<0>();
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
  __device__ __forceinline__ void multiply_keys(float (&s)[64], int tile, bool there = true) {
    if (there) {
      barrier_wait(s_.k_full + k_.stage, k_.phase);
      if (by_threads(w_, job_.maps.box, tile)) fence_async_proxy();
    }
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
    float a[2] = {}, b[2] = {};
    bool sees[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) sees[h] = join_row(h, rows, end, a[h], b[h]);
    float4* const total = s_.total + thread_;
    if (__all_sync(~0u, sees[0] && sees[1] && begun_[0] && begun_[1])) {
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        float4& x = total[e / 4 * S::kConsumers];
        x = make_float4(attn128::joined(x.x, a[0], o_[e], b[0]), attn128::joined(x.y, a[0], o_[e + 1], b[0]),
                        attn128::joined(x.z, a[1], o_[e + 2], b[1]),
                        attn128::joined(x.w, a[1], o_[e + 3], b[1]));
      }
    } else {
      // A row that sees nothing keeps its sums; one that sees its first split takes the new ones as they are.
      const auto with = [&](int h, float sum, float o) {
        const float both = attn128::joined(sum, a[h], o, b[h]);
        return !sees[h] ? sum : begun_[h] ? both : o;
      };
#pragma unroll
      for (int e = 0; e < kSums; e += 4) {
        float4& x = total[e / 4 * S::kConsumers];
        x = make_float4(with(0, x.x, o_[e]), with(0, x.y, o_[e + 1]), with(1, x.z, o_[e + 2]),
                        with(1, x.w, o_[e + 3]));
      }
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

  // O as it is written: rows that see no key are zeros.
  __device__ __forceinline__ void store() {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) inverse[h] = end_row(h);
#pragma unroll
    for (int e = 0; e < kSums; ++e) o_[e] = none_[e / 2 % 2] ? 0.0f : __fmul_rn(o_[e], inverse[e / 2 % 2]);
    if (p_.out.type == rows::Type::f32)
      store_rows<float2>();
    else
      store_rows<std::uint32_t>();
  }
  // O has a row's sums; a sink is the last one to be joined. What they are to be multiplied by.
  __device__ __forceinline__ float end_row(int h) {
    float lse = p_.sinks != nullptr ? p_.sinks[head(row_[h])] : -__builtin_inff();
    none_[h] = !begun_[h] || total_l_[h] == 0;
    if (p_.sinks != nullptr) {
      const attn128::Join j = attn128::join(total_m_[h], __fmul_rn(lse, attn128::kLog2e));
      if (!none_[h]) total_l_[h] = attn128::joined(total_l_[h], j.a, 1.0f, j.b), total_m_[h] = j.m;
#pragma unroll
      for (int e = 0; e < kSums; ++e)
        if (e / 2 % 2 == h) o_[e] = attn128::joined(o_[e], j.a, 0.0f, j.b);
    }
    if (!none_[h]) lse = attn128::lse_of(total_m_[h], total_l_[h]);
    if (p_.lse && thread_ % 4 == 0 && row_[h] < w_.count)
      rows::store(rows::Type::f32, p_.lse.at(w_.n, w_.q_begin + query(row_[h]), head(row_[h])), 0, lse);
    return none_[h] ? 0 : __fdiv_rn(1.0f, total_l_[h]);
  }
  // Two channels at once, or, of 16 bits, eight: the four lanes of a row change places.
  template <class Two>
  __device__ __forceinline__ void store_rows() const {
    const int lane = thread_ % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      char* const to = static_cast<char*>(p_.out.at(w_.n, w_.q_begin + query(row_[h]), head(row_[h])));
      const bool there = row_[h] < w_.count;
      if constexpr (sizeof(Two) == 4) {
        const bool by_sixteen = p_.value_width == S::kPartWidth && S::kPartWidth % 32 == 0 &&
                                __all_sync(~0u, reinterpret_cast<std::uintptr_t>(to) % 16 == 0);
        if (by_sixteen) {
#pragma unroll
          for (int g = 0; g < kSums / 16; ++g) {
            std::uint32_t w[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) w[k] = two<std::uint32_t>(4 * g + k, h);
            turn(w);
            if (there)
              *reinterpret_cast<uint4*>(to + 64 * g + 16 * lane) = make_uint4(w[0], w[1], w[2], w[3]);
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
  // Of four lanes' words the k-th of lane t becomes the t-th of lane k.
  static __device__ __forceinline__ void turn(std::uint32_t (&w)[4]) {
    const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k & step) continue;
        const bool odd = lane & step;
        const std::uint32_t got = __shfl_xor_sync(~0u, odd ? w[k] : w[k + step], step);
        w[k] = odd ? got : w[k], w[k + step] = odd ? w[k + step] : got;
      }
  }

  const Job& job_;
  const Problem& p_;
  const Work& w_;
  const Shared<S>& s_;
  const int thread_, group_;
  int row_[2], tiles_of_split_;  // a power of two
  bool begun_[2], none_[2];
  Rows rows_;
  float total_m_[2], total_l_[2];
  float o_[kSums];
  Turn<S::kKeyStages> k_;
  Turn<S::kValueStages> v_;
};

}  // namespace rlk::cuda::attention
