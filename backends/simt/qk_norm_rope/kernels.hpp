// The portable GPU kernel of qk_norm_rope (arithmetic rms32/rope32): the bits of the native backend on every GPU, in one launch.
//
// A head is one row: 16 lanes have it where it is up to 128 wide, else 32. A lane has a pack of eight neighbours from the first
// read to the last write, so rms32's 1024 lanes are the packs' elements and folded as rms_norm does it; a pair's other member comes
// by a shuffle where halves are whole packs, from the same pack where pairs are adjacent, and else through shared memory. Reads that
// wait for nothing are asked for first: the head, its weights, the token's position, and by it the tables' row.
//
// A block has eight heads (or four, or with Heads = 2 twice as many) of one token, and the next block the next ones: a token of 16
// and 8 heads and 8 of values is four blocks, which run at once. Where blocks are many a team has two heads, whose reads are under
// way together, and for which it keeps the factors of the turn, or one where caches are fp8. The common case has a kernel of its
// own, in tokens.hpp.
#pragma once

#include "simt/qk_norm_rope/tokens.hpp"

namespace rlk::simt::qk_norm_rope {

using rms32_rope32::kMostDims;
using rms_norm::kWave;
using rows::Type;

inline constexpr int kThreads = 128;
static_assert(kWave * kPack == kMostDims);

// A pack as a tensor of this type holds it.
template <class T>
__device__ __forceinline__ void round(Type type, float (&v)[kPack]) {
  if constexpr (__is_same(T, rows::Whole)) {
    const rows::Bytes16 raw = rms_norm::packed(v);
    rows::unpack<bf16>(&raw, v);
  } else {
    rows::round_pack<T>(type, v);
  }
}

template <class T>
__device__ __forceinline__ void normalise(const Problem& p, const rows::Raw<T>& weights, float r,
                                          float (&v)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[k] = v[k] * r;
  if (p.early) round<T>(p.type, v);
  float w[kPack];
  rows::unpack<T>(p.weight_type, weights, w);
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[k] = v[k] * (p.offset ? 1 + w[k] : w[k]);
  round<T>(p.type, v);
}

// What the elements of a pack turn by: y = fma(own, c, other * m).
struct Turn {
  float c[kPack], m[kPack];
};

// Count entries of a table's row from `first` on.
template <int Count>
__device__ __forceinline__ void entries(Type type, const void* row, int first, float (&out)[Count]) {
  if (Count == kPack || type != Type::f32) {
    if constexpr (Count == kPack) return rows::get_pack<rows::Any>(type, row, first, kPack, out);
  } else if (const auto* at = static_cast<const float*>(row) + first;
             reinterpret_cast<std::uintptr_t>(at) % sizeof(rows::Bytes16) == 0) {
    const auto four = *reinterpret_cast<const rows::Bytes16*>(at);
#pragma unroll
    for (int k = 0; k < Count; ++k) out[k] = bits_float(four.word[k]);
    return;
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) out[k] = rows::load(type, row, first + k);
}

// Of the pack at `i`. A position that the tables do not have, which a GPU cannot refuse, makes NaN.
__device__ __forceinline__ Turn turn_of(const Problem& p, std::int64_t position, int i) {
  Turn t{};
  const int half = p.turned / 2;
  if (position < 0 || position >= p.rows) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) t.c[k] = bits_float(0x7fffffffu), t.m[k] = 0;
    return t;
  }
  const auto row = [&](const void* table, std::int64_t step) {
    return static_cast<const char*>(table) + position * step * rows::size_of(p.table_type);
  };
  const void *cos = row(p.cos, p.cos_row), *sin = row(p.sin, p.sin_row);
  if (!p.adjacent && half % kPack == 0) {
    if (i >= p.turned) return t;
    const int first = i < half ? i : i - half;
    entries(p.table_type, cos, first, t.c);
    entries(p.table_type, sin, first, t.m);
#pragma unroll
    for (int k = 0; k < kPack; ++k) t.m[k] = i < half ? -t.m[k] : t.m[k];
  } else if (p.adjacent && i + kPack <= p.turned) {
    float c[kPack / 2], s[kPack / 2];
    entries(p.table_type, cos, i / 2, c);
    entries(p.table_type, sin, i / 2, s);
#pragma unroll
    for (int k = 0; k < kPack; ++k) t.c[k] = c[k / 2], t.m[k] = k % 2 == 0 ? -s[k / 2] : s[k / 2];
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const int e = i + k;
      if (e >= p.turned) continue;
      const bool first = p.adjacent ? k % 2 == 0 : e < half;
      const int pair = p.adjacent ? e / 2 : first ? e : e - half;
      const float s = rows::load(p.table_type, sin, pair);
      t.c[k] = rows::load(p.table_type, cos, pair), t.m[k] = first ? -s : s;
    }
  }
  return t;
}

// Whether the members of a pair lie in packs that are no whole number of packs apart.
RLK_HD bool exchanges(const Problem& p) { return !p.adjacent && p.turned / 2 % kPack != 0; }

template <int Lanes>
__device__ __forceinline__ void turn(const Problem& p, const Turn& t, int lane, float (&v)[kPack]) {
  const int half = p.turned / 2, i = lane * kPack;
  float other[kPack];
  if (p.adjacent) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) other[k] = v[k ^ 1];
  } else if (half % kPack == 0) {
    const int by = half / kPack, partner = lane < by ? lane + by : lane < 2 * by ? lane - by : lane;
#pragma unroll
    for (int k = 0; k < kPack; ++k) other[k] = __shfl(v[k], partner, Lanes);
  } else {
    float* row = dynamic_shared<float>() + static_cast<int>(threadIdx.x) / Lanes * Lanes * kPack;
    wave_sync();  // what lay there was read
#pragma unroll
    for (int k = 0; k < kPack; ++k) row[i + k] = v[k];
    wave_sync();
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const int e = i + k;
      other[k] = e < p.turned ? row[e < half ? e + half : e - half] : 0;
    }
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (i + k < p.turned) v[k] = rotary::fma_of_product(v[k], t.c[k], other[k], t.m[k]);
}

// Elements of a pack from `from` on that neither turn nor are normalised: bit for bit.
RLK_DEVICE_CALL void copy_rest(Type type, const void* x, void* y, int from, int last) {
  for (int e = from; e < last; ++e)
    if (type == Type::f32)
      static_cast<std::uint32_t*>(y)[e] = static_cast<const std::uint32_t*>(x)[e];
    else
      static_cast<std::uint16_t*>(y)[e] = static_cast<const std::uint16_t*>(x)[e];
}

template <class T>
__device__ __forceinline__ void put(const Problem& p, const void* x, void* y, int i, int n,
                                    const rows::Raw<T>& raw, const float (&v)[kPack]) {
  if (n == 0) return;
  if (!p.normed() && i >= p.turned) return rows::put_raw_pack<T>(p.type, y, i, n, raw);
  rows::put_pack<T>(p.type, y, i, n, v);
  if (!p.normed() && i + n > p.turned) copy_rest(p.type, x, y, p.turned, i + n);
}

// The end of a row, and rows that start anywhere: out of line, since it is rare.
RLK_DEVICE_CALL void put_bytes(std::uint8_t* to, int n, Bytes8 bytes) {
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < n) to[k] = static_cast<std::uint8_t>(bytes.word[k / 4] >> 8 * (k % 4));
}

// A pack into a row of an fp8 cache.
template <class T>
__device__ __forceinline__ void keep(void* row, int i, int n, const Bytes8& bytes) {
  if (n == 0) return;
  auto* to = static_cast<std::uint8_t*>(row) + i;
  if (__is_same(T, rows::Whole) || (n == kPack && reinterpret_cast<std::uintptr_t>(to) % sizeof(Bytes8) == 0))
    *reinterpret_cast<Bytes8*>(to) = bytes;
  else
    put_bytes(to, n, bytes);
}

// Heads are numbered through q, k and v.
__device__ __forceinline__ bool is_query(const Problem& p, std::int64_t head) { return head < p.q.heads; }
__device__ __forceinline__ bool turns(const Problem& p, std::int64_t head) {
  return head < p.q.heads + p.k.heads;
}
__device__ __forceinline__ void* row_of(const Problem& p, const Place& q, const Place& k, std::int64_t token,
                                        std::int64_t head) {
  return is_query(p, head) ? q.row(p.type, token, head) : k.row(p.type, token, head - p.q.heads);
}

// A head of v, to its place. F8: the cache may be fp8.
template <class T, int Lanes, bool F8>
__device__ __forceinline__ void keep_value(const Problem& p, std::int64_t token, std::int64_t slot,
                                           std::int64_t head, int lane) {
  if (slot < 0 || head >= p.v.heads) return;
  const void* x = p.v.x.row(p.type, token, head);
  const auto each = [&](auto put) {
    for (int i = lane * kPack; i < p.v_dims; i += Lanes * kPack) {
      const int n = rows::pack_at(i, p.v_dims);
      put(i, n, rows::fetch_pack<T>(p.type, x, i, n));
    }
  };
  if (!F8 || !p.f8) {
    void* y = p.v.cache.row(p.type, slot, head);
    each([&](int i, int n, const rows::Raw<T>& raw) { rows::put_raw_pack<T>(p.type, y, i, n, raw); });
  } else {
    void* y = p.v.cache.row(1, slot, head);
    const float r = 1 / p.v.factors.of(head);
    each([&](int i, int n, const rows::Raw<T>& raw) {
      float v[kPack];
      rows::unpack<T>(p.type, raw, v);
      keep<T>(y, i, n, Bytes8::of(v, r));
    });
  }
}

template <class T, int Lanes, int Heads>
__global__ void __launch_bounds__(kThreads) heads(Problem p, unsigned groups) {
  constexpr int kTeams = kThreads / Lanes;
  constexpr bool kF8 = Heads == 1;  // with two its registers would leave room for fewer blocks
  const unsigned token = blockIdx.x / groups, group = blockIdx.x - token * groups;
  const int lane = static_cast<int>(threadIdx.x) % Lanes, i = lane * kPack, n = rows::pack_at(i, p.dims);
  const std::int64_t first = std::int64_t{group} * (Heads * kTeams) + threadIdx.x / Lanes;
  const std::int64_t position = p.position(token), slot = p.slot(token);
  rows::Raw<T> raw[Heads]{}, weights[Heads]{};
#pragma unroll
  for (int j = 0; j < Heads; ++j) {
    const std::int64_t head = first + j * kTeams;
    if (!turns(p, head)) continue;
    raw[j] = rows::fetch_pack<T>(p.type, row_of(p, p.q.x, p.k.x, token, head), i, n);
    if (p.normed())
      weights[j] = rows::fetch_pack<T>(p.weight_type, is_query(p, head) ? p.q.weight : p.k.weight, i, n);
  }
  const Turn t = turn_of(p, position, i);
#pragma unroll
  for (int j = 0; j < Heads; ++j) {  // every lane reaches the shuffles
    const std::int64_t head = first + j * kTeams;
    float v[kPack];
    rows::unpack<T>(p.type, raw[j], v);
    if (p.normed()) {
      float squares[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k) squares[k] = fused(v[k], v[k], 0.0f);
      const float sum = add_rn(rms_norm::fold<Lanes>(squares, lane), 0.0f);
      normalise<T>(p, weights[j], rms32::reciprocal(sum, p.dims, p.eps), v);
    }
    turn<Lanes>(p, t, lane, v);
    if (!turns(p, head)) {
      keep_value<T, Lanes, kF8>(p, token, slot, head - p.q.heads - p.k.heads, lane);
      continue;
    }
    const void* x = row_of(p, p.q.x, p.k.x, token, head);
    if (is_query(p, head) || p.k.y) put<T>(p, x, row_of(p, p.q.y, p.k.y, token, head), i, n, raw[j], v);
    if (is_query(p, head) || !p.k.cache || slot < 0) continue;
    const std::int64_t own = head - p.q.heads;
    if (!kF8 || !p.f8) {
      put<T>(p, x, p.k.cache.row(p.type, slot, own), i, n, raw[j], v);
    } else {
      round<T>(p.type, v);
      keep<T>(p.k.cache.row(1, slot, own), i, n, Bytes8::of(v, 1 / p.k.factors.of(own)));
    }
  }
}

// Whether all lies in whole packs of bf16, on 16 bytes; of an fp8 cache, on eight.
inline bool lies_whole(const Problem& p) {
  const auto on = [](std::size_t bytes, const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
  };
  const auto whole = [&](const Place& at, std::size_t bytes) {
    return on(bytes, at.data) && at.token % kPack == 0 && at.head % kPack == 0;
  };
  bool all = p.type == Type::bf16 && p.dims % kPack == 0 && p.v_dims % kPack == 0;
  for (const Part* part : {&p.q, &p.k, &p.v})
    all = all && whole(part->x, 16) && whole(part->y, 16) && whole(part->cache, p.f8 ? 8 : 16) &&
          on(16, part->weight);
  return all && (!p.normed() || p.weight_type == Type::bf16);
}

// Blocks that fill a GPU, from which on they are many.
inline constexpr std::int64_t kManyBlocks = 4096;

template <class T, int Lanes, int Heads>
void launch_heads(const Problem& p, hipStream_t stream) {
  constexpr std::int64_t kOfBlock = kThreads / Lanes * Heads;
  const std::int64_t groups = (p.heads() + kOfBlock - 1) / kOfBlock;
  const std::size_t shared = exchanges(p) ? kThreads * kPack * sizeof(float) : 0;
  hipLaunchKernelGGL((heads<T, Lanes, Heads>), dim3(static_cast<unsigned>(p.tokens * groups)), dim3(kThreads),
                     shared, stream, p, static_cast<unsigned>(groups));
}

template <int Lanes>
void launch_lanes(const Problem& p, hipStream_t stream, std::int64_t many) {
  if (!lies_whole(p)) return launch_heads<rows::Any, Lanes, 1>(p, stream);
  if (turns_whole(p) && launch_tokens<Lanes / 2>(p, stream)) return;
  if (p.f8 || p.tokens * p.heads() < many * (kThreads / Lanes))
    return launch_heads<rows::Whole, Lanes, 1>(p, stream);
  launch_heads<rows::Whole, Lanes, 2>(p, stream);
}

inline void launch_forward(const Problem& p, hipStream_t stream, std::int64_t many = kManyBlocks) {
  if (p.tokens == 0 || p.heads() == 0) return;
  if (p.dims <= 16 * kPack)
    launch_lanes<16>(p, stream, many);
  else
    launch_lanes<32>(p, stream, many);
}

}  // namespace rlk::simt::qk_norm_rope
