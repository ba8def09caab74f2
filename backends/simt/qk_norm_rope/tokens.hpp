// qk_norm_rope for heads of 128 or 256 dims that turn whole, by halves, in whole packs of bf16 on 16 bytes, by tables
// of fp32 on 16 bytes.
//
// As many blocks as a GPU has at a time: each has up to 32 heads, one a team, of a range of tokens, and takes four tokens at a time.
// Their packs and the tables' rows, which the teams share, lie in shared memory, and the next four tokens' are on their way while
// these are computed; their positions and slots are read once more ahead. So reads are always under way, and what belongs to
// a head, its places and its weight, is found once.
//
// A lane has the packs l and l + Lanes: they are half a head apart, as the members of a pair are, and as rms32 adds them first. So
// a head turns without a shuffle and is folded as half a head is. With eight lanes a head of 128 a wave has four heads, and
// a lane's square root serves sixteen elements.
#pragma once

#include "arithmetic/qk_norm_rope/problem.hpp"
#include "simt/async.hpp"
#include "simt/rms_norm/team.hpp"

namespace rlk::simt::qk_norm_rope {

using rms32_rope32::Part;
using rms32_rope32::Place;
using rms32_rope32::Problem;
using rows::Bytes16;
using rows::kPack;

// Of a block: tokens at a time, and threads that fetch what a token has. Of a multiprocessor: threads at a time.
inline constexpr int kTokens = 4, kFetching = 128, kOfProcessor = 768;
inline constexpr unsigned kWidestWave = 64;

// A pack of an fp8 cache: numbers of the data's dtype times r, a head's 1 / factor.
struct alignas(8) Bytes8 {
  std::uint32_t word[2];

  __device__ __forceinline__ static Bytes8 of(const float (&v)[kPack], float r) {
    Bytes8 bytes{};
#pragma unroll
    for (int k = 0; k < kPack; k += 2) bytes.word[k / 4] |= fp8_pair(v[k] * r, v[k + 1] * r) << 8 * (k % 4);
    return bytes;
  }
  __device__ __forceinline__ static Bytes8 of(const Bytes16& pack, float r) {
    float v[kPack];
    rows::unpack<bf16>(&pack, v);
    return of(v, r);
  }
};

// A lane's part of a head.
struct Halves {
  float a[kPack], b[kPack];

  __device__ __forceinline__ void widen(const Bytes16& x, const Bytes16& y) {
    rows::unpack<bf16>(&x, a);
    rows::unpack<bf16>(&y, b);
  }
  // As a tensor of bf16 holds them.
  __device__ __forceinline__ void round() { widen(rms_norm::packed(a), rms_norm::packed(b)); }
  template <int Lanes>
  __device__ __forceinline__ float squares(int lane) const {
    float v[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = add_rn(fused(a[k], a[k], 0.0f), fused(b[k], b[k], 0.0f));
    return rms_norm::fold<Lanes>(v, lane);
  }
  __device__ __forceinline__ void multiply(float r) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) a[k] = a[k] * r, b[k] = b[k] * r;
  }
  __device__ __forceinline__ void multiply(const Halves& w) {
    rms_norm::multiply(a, w.a);
    rms_norm::multiply(b, w.b);
  }
  // Four pairs, from `First` on.
  template <int First>
  __device__ __forceinline__ void turn(const Bytes16& cos, const Bytes16& sin) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float c = bits_float(cos.word[k]), s = bits_float(sin.word[k]), own = a[First + k];
      a[First + k] = rotary::fma_of_product(own, c, b[First + k], -s);
      b[First + k] = rotary::fma_of_product(b[First + k], c, own, s);
    }
  }
};

// Heads are numbered through q, k and v.
__device__ __forceinline__ int queries(const Problem& p) { return static_cast<int>(p.q.heads); }
__device__ __forceinline__ int turning(const Problem& p) { return static_cast<int>(p.q.heads + p.k.heads); }

// A head of every token, from a lane's first pack on.
template <int Lanes>
struct Head {
  bool query, turns;
  int packs = 0;
  const char* x = nullptr;
  char *y = nullptr, *cache = nullptr;
  int x_step, y_step, cache_step;  // in bytes
  float reciprocal = 1;            // of its factor in an fp8 cache

  __device__ __forceinline__ Head(const Problem& p, int number, int lane)
      : query(number < queries(p)), turns(number < turning(p)) {
    const int head = number - (query ? 0 : turns ? queries(p) : turning(p));
    const auto at = [&](const Place& q, const Place& k, const Place& v, int size, int& step) {
      auto* data = static_cast<char*>(query ? q.data : turns ? k.data : v.data);
      const std::int64_t first = head * (query ? q.head : turns ? k.head : v.head) + lane * kPack;
      step = static_cast<int>(query ? q.token : turns ? k.token : v.token) * size;
      return data ? data + first * size : nullptr;
    };
    x = at(p.q.x, p.k.x, p.v.x, 2, x_step);
    y = at(p.q.y, p.k.y, p.v.y, 2, y_step);
    cache = at(p.q.cache, p.k.cache, p.v.cache, p.f8 ? 1 : 2, cache_step);
    if (turns || head < p.v.heads) packs = (turns ? p.dims : p.v_dims) / kPack - lane;
    if (p.f8 && packs > 0 && !query) reciprocal = 1 / (turns ? p.k.factors.of(head) : p.v.factors.of(head));
  }
  __device__ __forceinline__ void put(char* row, const Bytes16& a, const Bytes16& b) const {
    auto* to = reinterpret_cast<Bytes16*>(row);
    if (packs > 0) to[0] = a;
    if (packs > Lanes) to[Lanes] = b;
  }
  // To an fp8 cache.
  __device__ __forceinline__ void keep(char* row, const Bytes16& a, const Bytes16& b) const {
    auto* to = reinterpret_cast<Bytes8*>(row);
    if (packs > 0) to[0] = Bytes8::of(a, reciprocal);
    if (packs > Lanes) to[Lanes] = Bytes8::of(b, reciprocal);
  }
};

// What a thread reads ahead of a token's rows; a position below 0: none that the tables have, which a GPU cannot refuse.
struct Token {
  int position = -1, slot = -1;

  __device__ __forceinline__ static Token of(const Problem& p, int token, int last) {
    if (static_cast<int>(threadIdx.x) >= kFetching || token >= last) return {};
    const std::int64_t position = p.position(token), slot = p.slot(token);
    return {static_cast<int>(position >= 0 && position < p.rows ? position : -1),
            static_cast<int>(slot >= 0 ? slot : -1)};
  }
};

// Tokens in shared memory.
template <int Lanes, int Threads>
struct Rows {
  static constexpr unsigned kFours = 2 * Lanes, kThreadsOf = kFetching / kTokens;

  Bytes16 packs[kTokens][2][Threads];    // each written and read by one thread
  Bytes16 tables[kTokens][2][2][Lanes];  // cos and sin; of eight neighbours the first four, and the others
  alignas(16) int slots[kTokens];

  // A token without a position becomes NaN.
  __device__ __forceinline__ void ask(const Problem& p, const Head<Lanes>& head, const Token& token,
                                      int first, int count) {
    const char* x = head.x + std::int64_t{first} * head.x_step;
#pragma unroll
    for (int t = 0; t < kTokens; ++t, x += head.x_step) {
      if (t >= count) break;
      const auto* from = reinterpret_cast<const Bytes16*>(x);
      if (head.packs > 0) send(&packs[t][0][threadIdx.x], from);
      if (head.packs > Lanes) send(&packs[t][1][threadIdx.x], from + Lanes);
    }
    const int mine = static_cast<int>(threadIdx.x / kThreadsOf);
    const unsigned thread = threadIdx.x % kThreadsOf;
    if (mine >= count) return;
    if (thread == 0) slots[mine] = token.slot;
#pragma unroll
    for (unsigned c = 0; c < 2 * kFours / kThreadsOf; ++c) {
      const unsigned i = thread + c * kThreadsOf, four = i % kFours;
      const bool sines = i >= kFours;
      const auto* row = static_cast<const float*>(sines ? p.sin : p.cos);
      Bytes16& to = tables[mine][sines][four % 2][four / 2];
      if (token.position >= 0) {
        row += std::int64_t{token.position} * static_cast<int>(sines ? p.sin_row : p.cos_row);
        send(&to, reinterpret_cast<const Bytes16*>(row) + four);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) to.word[k] = sines ? 0 : 0x7fffffffu;
      }
    }
  }
};

// What a head's packs are multiplied by.
template <int Lanes>
__device__ __forceinline__ Halves factors(const Problem& p, bool query, int lane) {
  Halves w{};
  if (!p.normed()) return w;
  const auto* from = static_cast<const Bytes16*>(query ? p.q.weight : p.k.weight) + lane;
  w.widen(from[0], from[Lanes]);
  if (!p.offset) return w;
#pragma unroll
  for (int k = 0; k < kPack; ++k) w.a[k] = 1 + w.a[k], w.b[k] = 1 + w.b[k];
  return w;
}

// What a wave does with its heads, of which some may be values: decided outside the loop over tokens.
enum class Work { copies, turns, norms, norms_early };

// A thread's part of so many tokens' heads, of which `first` is the first.
template <Work kWork, int Lanes, int Threads>
__device__ __forceinline__ void compute(const Problem& p, const Rows<Lanes, Threads>& rows,
                                        const Head<Lanes>& head, const Halves& w, int first, int count) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % Lanes;
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    Bytes16 a = rows.packs[t][0][thread], b = rows.packs[t][1][thread];
    if constexpr (kWork != Work::copies) {
      Halves v;
      v.widen(a, b);
      if constexpr (kWork != Work::turns) {
        v.multiply(rms32::reciprocal(v.template squares<Lanes>(lane), 2 * Lanes * kPack, p.eps));
        if constexpr (kWork == Work::norms_early) v.round();
        v.multiply(w);
        v.round();
      }
      v.template turn<0>(rows.tables[t][0][0][lane], rows.tables[t][1][0][lane]);
      v.template turn<4>(rows.tables[t][0][1][lane], rows.tables[t][1][1][lane]);
      if (head.turns) a = rms_norm::packed(v.a), b = rms_norm::packed(v.b);
    }
    if (head.y) head.put(head.y + std::int64_t{first + t} * head.y_step, a, b);
    if (const int slot = rows.slots[t]; head.cache && slot >= 0) {
      char* to = head.cache + std::int64_t{slot} * head.cache_step;
      if (p.f8)
        head.keep(to, a, b);
      else
        head.put(to, a, b);
    }
  }
}

// A block has `range` tokens.
template <int Lanes, int Threads>
__global__ void __launch_bounds__(Threads, kOfProcessor / Threads)
    tokens(Problem p, unsigned groups, int range) {
  const unsigned block = blockIdx.x / groups, group = blockIdx.x - block * groups;
  const unsigned thread = threadIdx.x;
  const int lane = static_cast<int>(thread % Lanes), start = static_cast<int>(group * (Threads / Lanes));
  int first = static_cast<int>(block) * range;
  const int all = static_cast<int>(p.tokens), last = all - first < range ? all : first + range;
  const auto left = [&](int from) { return last - from < kTokens ? last - from : kTokens; };
  auto* halves = dynamic_shared<Rows<Lanes, Threads>>();
  const int mine = static_cast<int>(thread / halves->kThreadsOf);
  Token token = Token::of(p, first + mine, last);
  const Head<Lanes> head(p, start + static_cast<int>(thread / Lanes), lane);
  halves[0].ask(p, head, token, first, left(first));
  token = Token::of(p, first + kTokens + mine, last);
  const Halves w = factors<Lanes>(p, head.query, lane);
  // Whether the widest wave has a head that turns: all its lanes reach the shuffles, or none.
  const bool computes = start + static_cast<int>(thread / kWidestWave * (kWidestWave / Lanes)) < turning(p);
  for (int half = 0; first < last; first += kTokens, half = 1 - half) {
    arrived();
    __syncthreads();  // and the other half was read
    if (const int next = first + kTokens; next < last) {
      halves[1 - half].ask(p, head, token, next, left(next));
      token = Token::of(p, next + kTokens + mine, last);
    }
    const auto& rows = halves[half];
    const int count = left(first);
    if (!computes)
      compute<Work::copies>(p, rows, head, w, first, count);
    else if (!p.normed())
      compute<Work::turns>(p, rows, head, w, first, count);
    else if (p.early)
      compute<Work::norms_early>(p, rows, head, w, first, count);
    else
      compute<Work::norms>(p, rows, head, w, first, count);
  }
}

// Whether the kernel above has this; `p` lies in whole packs.
inline bool turns_whole(const Problem& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // of what it counts in 32 bits
  const auto small = [](std::int64_t n) { return -kMost < n && n < kMost; };
  const auto on_16 = [&](const void* table, std::int64_t step) {
    return reinterpret_cast<std::uintptr_t>(table) % 16 == 0 && step % 4 == 0 && small(step);
  };
  bool all = !p.adjacent && p.turned == p.dims && (p.dims == 128 || p.dims == 256) && p.v_dims <= p.dims;
  all = all && p.table_type == rows::Type::f32 && on_16(p.cos, p.cos_row) && on_16(p.sin, p.sin_row);
  for (const Part* part : {&p.q, &p.k, &p.v})
    all = all && small(part->x.token) && small(part->y.token) && small(part->cache.token);
  return all && small(p.heads()) && small(p.tokens) && small(p.rows) && small(p.places);
}

// With so many blocks for each group of heads; 0: as many as the GPU has at a time. Whether they are under way: not where shared
// memory is small.
template <int Lanes, int Threads>
bool launch_tokens(const Problem& p, hipStream_t stream, std::int64_t blocks) {
  constexpr std::size_t kBytes = 2 * sizeof(Rows<Lanes, Threads>);
  constexpr int kHeads = Threads / Lanes;
  const std::int64_t groups = (p.heads() + kHeads - 1) / kHeads;
  int device = 0, processors = 0, shared = 0;
  if (hipGetDevice(&device) != hipSuccess ||
      hipDeviceGetAttribute(&processors, hipDeviceAttributeMultiprocessorCount, device) != hipSuccess ||
      hipDeviceGetAttribute(&shared, hipDeviceAttributeSharedMemPerBlockOptin, device) != hipSuccess)
    return false;
  constexpr std::int64_t kKept = 1024;  // of each block's shared memory
  const std::int64_t fit = (shared + kKept) / (std::int64_t{kBytes} + kKept), most = kOfProcessor / Threads;
  if (2 * fit < most || !rms_norm::allow_shared(tokens<Lanes, Threads>, kBytes)) return false;
  if (blocks == 0) blocks = (processors * (fit < most ? fit : most) + groups - 1) / groups;
  const std::int64_t range = (p.tokens + blocks - 1) / blocks;
  blocks = (p.tokens + range - 1) / range;
  hipLaunchKernelGGL((tokens<Lanes, Threads>), dim3(static_cast<unsigned>(blocks * groups)), dim3(Threads),
                     kBytes, stream, p, static_cast<unsigned>(groups), static_cast<int>(range));
  return true;
}
// By blocks of the size that leaves the fewest teams without a head.
template <int Lanes>
bool launch_tokens(const Problem& p, hipStream_t stream, std::int64_t blocks = 0) {
  const auto teams = [&](int threads) {
    const std::int64_t of = threads / Lanes;
    return (p.heads() + of - 1) / of * of;
  };
  if (teams(256) <= teams(192) && teams(256) <= teams(128))
    return launch_tokens<Lanes, 256>(p, stream, blocks);
  if (teams(192) <= teams(128)) return launch_tokens<Lanes, 192>(p, stream, blocks);
  return launch_tokens<Lanes, 128>(p, stream, blocks);
}

}  // namespace rlk::simt::qk_norm_rope
