// Few rows: the consumers, four warps. Scores and sums lie turned, [keys or channels][rows], so that the tensor core's 16
// rows are keys or channels, of which there are enough, and its eight columns are rows. A warp has the scores of keys 16 w to
// 16 w + 15 and those 64 further on, so that of a class' sum two folds are a thread's, one is a shuffle's and two are those of
// four warps; and it has a quarter of the values' channels.
//
// An fp8 cache: a lane has four channels of a key side by side, and of values two channels of two keys; queries and results lie by
// that, as the 16 products of a step may be in any order.
//
// m is held, so that mostly no row's moves: a vote of the block's threads says so, and maxima are not looked for.
#pragma once

#include "cuda/attention/few_rows_block.cuh"
#include "cuda/attention/fp8.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/hopper/mma.cuh"

namespace rlk::cuda::attention {

template <class S>
class FewConsumer {
  using T = typename S::Element;
  static constexpr int kEights = S::kEights, kRows = S::kRows, kSteps = S::kWidth / 16;
  static constexpr int kChannels = S::kWidth / S::kWarps, kSixteens = kChannels / 16;  // of values, a warp

 public:
  __device__ __forceinline__ FewConsumer(const Job& job, const Work& w, const FewShared<S>& s,
                                         Turn<S::kStages>& turn)
      : job_(job),
        p_(job.p),
        w_(w),
        s_(s),
        turn_(turn),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    tiles_of_split_ = p_.split == 0 ? 1 << 30 : static_cast<int>(p_.split) / kTile;
    load_queries();
    if constexpr (S::kF8) k_scale_ = p_.k_scale.of(w.h), v_scale_ = p_.v_scale.of(w.h);
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const attn128::Visible seen = p_.visible(w.offset + query(row(n, i)), w.keys);
        first_[n][i] = static_cast<int>(seen.first), last_[n][i] = static_cast<int>(seen.last);
        total_m_[n][i] = -__builtin_inff(), total_l_[n][i] = 0, begun_[n][i] = false;
        parts_[n][i] = job_.parts != nullptr && row(n, i) < w.count ? parts_of(row(n, i)) : nullptr;
      }
#pragma unroll
    for (int c = 0; c < kSixteens; ++c)
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) total_[c][n][e] = 0;
    restart();
  }

  __device__ __forceinline__ void run() {
    for (int tile = w_.begin; tile < w_.end; ++tile) {
      if (tile != w_.begin && (tile & (tiles_of_split_ - 1)) == 0) end_split(tile), restart();
      float s[2][kEights][4];
      multiply_keys(s);
      weigh(s, tile * kTile);
      multiply_values(tile);
    }
    if (w_.begin < w_.end) end_split(w_.end);
    if (job_.parts == nullptr) store();
  }

 private:
  // Rows of the results that a thread holds.
  __device__ __forceinline__ int row(int n, int i) const { return 8 * n + lane_ % 4 * 2 + i; }
  // Rows that are not there are copies of the last one.
  __device__ __forceinline__ int held(int row) const { return row < w_.count ? row : w_.count - 1; }
  __device__ __forceinline__ int query(int row) const { return (w_.first + held(row)) / p_.group; }
  __device__ __forceinline__ int head(int row) const {
    return w_.h * p_.group + (w_.first + held(row)) % p_.group;
  }

  __device__ __forceinline__ float* parts_of(int r) const {
    const std::int64_t token = p_.cu_q ? w_.q_begin + query(r) : w_.n * p_.queries + query(r);
    return job_.parts + (token * p_.heads * p_.group + head(r)) * job_.splits * (p_.value_width + 2);
  }

  __device__ __forceinline__ void restart() {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) m_[n][i] = -__builtin_inff();
      l_[n] = 0;
#pragma unroll
      for (int c = 0; c < kSixteens; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[c][n][e] = 0;
    }
  }

  // Operand B: eight rows by 16 channels, of which a lane has those that it has of keys.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int r = 8 * n + lane_ / 4;
      const auto* q = static_cast<const std::uint16_t*>(p_.q.at(w_.n, w_.q_begin + query(r), head(r)));
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          q_[k][n][i] =
              k * 16 < p_.width ? *reinterpret_cast<const std::uint32_t*>(q + k * 16 + query_channel(i)) : 0;
    }
  }

  __device__ __forceinline__ int query_channel(int i) const {
    return S::kF8 ? lane_ % 4 * 4 + i * 2 : i * 8 + lane_ % 4 * 2;
  }

  __device__ __forceinline__ static void multiply(float (&c)[4], const std::uint32_t (&a)[4],
                                                  std::uint32_t b0, std::uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
      mma_f16(c, a, b0, b1);
    else
      mma_bf16(c, a, b0, b1);
  }

  __device__ __forceinline__ const unsigned char* wait_tile() const {
    barrier_wait(s_.full + turn_.stage, turn_.phase);
    return s_.tiles + turn_.stage * S::kStageBytes;
  }
  __device__ __forceinline__ void release_tile() {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(s_.empty + turn_.stage);
    turn_.next();
  }

  // Scores: 16 keys and those 64 further on by the rows, chains over channels.
  __device__ __forceinline__ void multiply_keys(float (&s)[2][kEights][4]) {
    const unsigned char* const keys = wait_tile();
    const int line = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[half][n][e] = 0;
    if constexpr (S::kF8) {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          std::uint32_t x[4];
          ldmatrix(x, keys + S::place(line + 64 * half, k + lane_ / 16));
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            std::uint32_t a[4];
            widen_four<T>(x[2 * step], k_scale_, a[0], a[2]);
            widen_four<T>(x[2 * step + 1], k_scale_, a[1], a[3]);
#pragma unroll
            for (int n = 0; n < kEights; ++n) multiply(s[half][n], a, q_[k + step][n][0], q_[k + step][n][1]);
          }
        }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          std::uint32_t a[4];
          ldmatrix(a, keys + S::place(line + 64 * half, 2 * k + lane_ / 16));
#pragma unroll
          for (int n = 0; n < kEights; ++n) multiply(s[half][n], a, q_[k][n][0], q_[k][n][1]);
        }
    }
    release_tile();
  }

  // Scores become weights in shared memory; m, l and what O goes on from are the tile's.
  __device__ __forceinline__ void weigh(float (&s)[2][kEights][4], int at) {
    const int key = warp_ * 16 + lane_ / 4;
    if (p_.cap != 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[half][n][e] = attn128::capped(p_, s[half][n][e]);
    }
    float top[kEights][2];
    bool above = false;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[half][n][e];
          const int j = at + key + 64 * half + e / 2 * 8;
          if (j < first_[n][e % 2] || j >= last_[n][e % 2]) x = -__builtin_inff();
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[n][i] = fmaxf(fmaxf(s[0][n][i], s[0][n][i + 2]), fmaxf(s[1][n][i], s[1][n][i + 2]));
        above = above || is_above(top[n][i], p_.c, m_[n][i]);
      }
    }
    if (role_any(1, S::kConsumers, above)) move(top);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float half[2][2];  // [bit 6 of the key][row]
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float minus_base = -attn128::base_of(m_[n][i]);
        float p[4];  // bit 3 of the key, then bit 6
        auto* const line = reinterpret_cast<T*>(s_.weights + row(n, i) * S::kLine) + key;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[e] = unit_exp2(__fmaf_rn(s[e / 2][n][e % 2 * 2 + i], p_.c, minus_base));
          const auto rounded = static_cast<std::uint16_t>(pack<T>(p[e], 0.0f));
          *reinterpret_cast<std::uint16_t*>(line + e / 2 * 64 + e % 2 * 8) = rounded;
        }
        half[0][i] = __fadd_rn(p[0], p[1]), half[1][i] = __fadd_rn(p[2], p[3]);
      }
#pragma unroll
      for (float(&x)[2] : half) {
        const float sent = own_row(lane_) == 0 ? x[1] : x[0];
        x[0] = __fadd_rn(own_row(lane_) == 0 ? x[0] : x[1], __shfl_xor_sync(~0u, sent, 4));
      }
      s_.sums[(warp_ * kEights + n) * 32 + lane_] = __fadd_rn(half[0][0], half[1][0]);
    }
    role_sync(1, S::kConsumers);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      constexpr int kWarp = kEights * 32;
      const float* const sums = s_.sums + n * 32 + lane_;
      l_[n] = __fadd_rn(
          l_[n], __fadd_rn(__fadd_rn(sums[0], sums[kWarp]), __fadd_rn(sums[2 * kWarp], sums[3 * kWarp])));
    }
  }
  // m moves, of some of the block's rows: those sums go on from less.
  __device__ __forceinline__ void move(float (&top)[kEights][2]) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], step));
        if (lane_ < 4) s_.tops[warp_ * kRows + row(n, i)] = top[n][i];
      }
    role_sync(1, S::kConsumers);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const tops = s_.tops + row(n, i);
        const float most = fmaxf(fmaxf(tops[0], tops[kRows]), fmaxf(tops[2 * kRows], tops[3 * kRows]));
        const float m = after_tile(m_[n][i], most, p_.c);
        a[i] = shrink(m_[n][i], m), m_[n][i] = m;
      }
      l_[n] = __fmul_rn(l_[n], own_row(lane_) == 0 ? a[0] : a[1]);
#pragma unroll
      for (int c = 0; c < kSixteens; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[c][n][e] = __fmul_rn(o_[c][n][e], a[e % 2]);
    }
  }

  // Rows of values from `count` on are zeros: a weight of 0 would not hide a NaN.
  __device__ __forceinline__ void clear_behind(unsigned char* values, int count) const {
    constexpr int kPieces = S::kWidth * S::kSize / 16;
    for (int at = static_cast<int>(threadIdx.x); at < (kTile - count) * kPieces; at += S::kConsumers)
      *reinterpret_cast<uint4*>(values + S::place(count + at / kPieces, at % kPieces)) =
          make_uint4(0, 0, 0, 0);
    fence_async_proxy();  // the next tile there comes by TMA
    role_sync(1, S::kConsumers);
  }

  // O goes on by chains over the tile's keys.
  __device__ __forceinline__ void multiply_values(int tile) {
    const unsigned char* const values = wait_tile();
    if ((tile + 1) * kTile > w_.keys)
      clear_behind(s_.tiles + turn_.stage * S::kStageBytes, w_.keys - tile * kTile);
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      std::uint32_t b[kEights][4];
#pragma unroll
      for (int n = 0; n < kEights; ++n)
        ldmatrix(b[n], s_.weights + (8 * n + lane_ % 8) * S::kLine + k * 32 + lane_ / 8 * 16);
      if constexpr (S::kF8)
        multiply_f8(values, k, b);
      else
        multiply_two(values, k, b);
    }
    release_tile();
  }
  // Two steps of 16 keys.
  using Weights = std::uint32_t[kEights][4];
  __device__ __forceinline__ void multiply_two(const unsigned char* values, int k, const Weights& b) {
    const int line = lane_ % 8 + lane_ / 16 * 8, piece = warp_ * (kChannels / 8) + lane_ / 8 % 2;
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int c = 0; c < kSixteens; ++c) {
        std::uint32_t v[4];
        ldmatrix_transposed(v, values + S::place((k + step) * 16 + line, piece + 2 * c));
#pragma unroll
        for (int n = 0; n < kEights; ++n) multiply(o_[c][n], v, b[n][2 * step], b[n][2 * step + 1]);
      }
  }
  __device__ __forceinline__ void multiply_f8(const unsigned char* values, int k, const Weights& b) {
#pragma unroll
    for (int c = 0; c < kSixteens; ++c) {
      std::uint32_t x[4];
      ldmatrix_transposed(x, values + S::place(k * 16 + lane_, warp_ * kSixteens + c));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        std::uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 2; ++i)  // both keys' first channels, then their second
          widen_four<T>(__byte_perm(x[2 * step + i], 0, 0x3120), v_scale_, v[2 * i], v[2 * i + 1]);
#pragma unroll
        for (int n = 0; n < kEights; ++n) multiply(o_[c][n], v, b[n][2 * step], b[n][2 * step + 1]);
      }
    }
  }

  // Channel of o_[c][..][e].
  __device__ __forceinline__ int channel(int c, int e) const {
    return warp_ * kChannels + 16 * c + (S::kF8 ? lane_ / 4 * 2 + e / 2 : e / 2 * 8 + lane_ / 4);
  }

  // The split that ends before tile `end`: its sums go to memory, or are joined to those before it.
  __device__ __forceinline__ void end_split(int end) {
    const int begin = ((end - 1) & -tiles_of_split_) * kTile;
    float l[kEights][2];
    join_classes(lane_, l_, l);
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (job_.parts != nullptr)
          store_part(n, i, l[n][i], (end - 1) / tiles_of_split_);
        else if (first_[n][i] < last_[n][i] && first_[n][i] < end * kTile && last_[n][i] > begin)
          join(n, i, l[n][i]);
      }
  }
  __device__ __forceinline__ void join(int n, int i, float l) {
    const attn128::Join j = attn128::join(total_m_[n][i], m_[n][i]);
    const bool begun = begun_[n][i];
    total_l_[n][i] = begun ? attn128::joined(total_l_[n][i], j.a, l, j.b) : l;
    total_m_[n][i] = begun ? j.m : m_[n][i];
#pragma unroll
    for (int c = 0; c < kSixteens; ++c)
#pragma unroll
      for (int e = i; e < 4; e += 2)
        total_[c][n][e] = begun ? attn128::joined(total_[c][n][e], j.a, o_[c][n][e], j.b) : o_[c][n][e];
    begun_[n][i] = true;
  }
  // m, l and O.
  __device__ __forceinline__ void store_part(int n, int i, float l, int split) const {
    if (parts_[n][i] == nullptr) return;
    float* const to = parts_[n][i] + split * (p_.value_width + 2);
    if (warp_ == 0 && lane_ < 4) *reinterpret_cast<float2*>(to) = make_float2(m_[n][i], l);
#pragma unroll
    for (int c = 0; c < kSixteens; ++c)
#pragma unroll
      for (int e = i; e < 4; e += 2)
        if (channel(c, e) < p_.value_width) to[2 + channel(c, e)] = o_[c][n][e];
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) store_row(n, i);
  }
  __device__ __forceinline__ void store_row(int n, int i) {
    const int r = row(n, i);
    if (r >= w_.count) return;
    const std::int64_t token = w_.q_begin + query(r);
    float a = 1, b = 0, lse = p_.sinks != nullptr ? p_.sinks[head(r)] : -__builtin_inff();
    float m = total_m_[n][i], l = total_l_[n][i];
    const bool none = !begun_[n][i] || l == 0, sink = !none && p_.sinks != nullptr;
    if (sink) {
      const attn128::Join j = attn128::join(m, __fmul_rn(lse, attn128::kLog2e));
      a = j.a, b = j.b, l = attn128::joined(l, a, 1.0f, b), m = j.m;
    }
    if (!none) lse = attn128::lse_of(m, l);
    const float inverse = none ? 0 : __fdiv_rn(1.0f, l);
    void* const out = p_.out.at(w_.n, token, head(r));
#pragma unroll
    for (int c = 0; c < kSixteens; ++c)
#pragma unroll
      for (int e = i; e < 4; e += 2) {
        if (channel(c, e) >= p_.value_width) continue;
        const float x = sink ? attn128::joined(total_[c][n][e], a, 0.0f, b) : total_[c][n][e];
        rows::store(p_.out.type, out, channel(c, e), none ? 0.0f : __fmul_rn(x, inverse));
      }
    if (p_.lse && warp_ == 0 && lane_ < 4)
      rows::store(rows::Type::f32, p_.lse.at(w_.n, token, head(r)), 0, lse);
  }

  const Job& job_;
  const Problem& p_;
  const Work& w_;
  const FewShared<S>& s_;
  Turn<S::kStages>& turn_;
  const int warp_, lane_;
  int tiles_of_split_;               // a power of two
  float k_scale_ = 1, v_scale_ = 1;  // of fp8
  std::uint32_t q_[kSteps][kEights][2];
  int first_[kEights][2], last_[kEights][2];
  float* parts_[kEights][2];  // sums of a row's first split; null: there is no such row
  bool begun_[kEights][2];
  float m_[kEights][2], o_[kSixteens][kEights][4];
  float l_[kEights];  // of own_row and own_class
  float total_m_[kEights][2], total_l_[kEights][2], total_[kSixteens][kEights][4];
};

}  // namespace rlk::cuda::attention
