// The gradient of embedding from sorted tokens: every element of d_weight is written once, by one kernel of three parts.
//
// Blocks for long runs of one row's tokens come first: a chain of additions a column is slow alone, so few columns a block, whose
// 256 threads bring the packs of 256 tokens to shared memory while 32 of them add those before. Then blocks for all other runs: a
// thread has two packs of a row and reads four tokens ahead. Then blocks that fill the rows without tokens at the speed of
// memory: [V, H] is mostly that, and the other two hide behind it.
#pragma once

#include "simt/embedding/order.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::embedding {

using rows::kPack;

inline constexpr int kMostFilled = 512, kFilledPacks = 4096;  // rows of a block that fills, and their packs
inline constexpr int kSide = 2, kAhead = 4;                   // packs of a thread, tokens that it reads ahead
inline constexpr int kWindow = 32;                            // places in the order
inline constexpr int kColumns = 32, kLong = 256;              // columns and tokens in shared memory

// How the kernel's blocks are cut. A run is long where it has two neighbouring multiples of kWindow.
struct Cut {
  std::int64_t packs;  // of a row
  int lanes_log;       // threads that walk a row side by side, as a power of two
  int shares;          // of the windows; each has a block for a tile of columns
  int tiles, rounds;   // tiles of a row, and rounds of a block of short runs
  int filled;          // rows of a block that fills
  unsigned long_blocks, short_blocks, fill_blocks;

  __device__ __forceinline__ int lanes() const { return 1 << lanes_log; }
  __device__ __forceinline__ int beside() const { return kBlock >> lanes_log; }  // rows of a block at once
};

inline Cut cut_of(const Problem& p, std::uint32_t tokens) {
  const auto least = [](std::int64_t a, std::int64_t b) { return a < b ? a : b; };
  Cut cut{};
  cut.packs = over(p.width, kPack);
  while (cut.lanes_log < 8 && std::int64_t{kSide} << cut.lanes_log < cut.packs) ++cut.lanes_log;
  const std::int64_t tiles = over(cut.packs, kSide << cut.lanes_log), columns = over(p.width, kColumns);
  const std::int64_t windows = tokens < 8 * kWindow ? 0 : (tokens - 1) / kWindow;
  cut.shares = static_cast<int>(least(windows, over(1024, columns)));
  cut.tiles = static_cast<int>(tiles), cut.rounds = tokens < kFew ? 1 : 4;
  const std::int64_t filled = least(kFilledPacks / least(cut.packs, kFilledPacks), p.vocab / 1024 + 1);
  cut.filled = static_cast<int>(least(filled, kMostFilled));
  cut.long_blocks = static_cast<unsigned>(cut.shares * columns);
  cut.short_blocks = static_cast<unsigned>(over(tokens, (kBlock >> cut.lanes_log) * cut.rounds) * tiles);
  const bool in_place = p.before.data == p.weight.data;  // other rows stay
  cut.fill_blocks = in_place ? 0 : static_cast<unsigned>(over(p.vocab, cut.filled));
  return cut;
}

// Kernels of any type alone know what d_weight is added to.
__device__ __forceinline__ rows::Raw<rows::Any> before_of(const Problem& p, std::int64_t row, std::int64_t i,
                                                          int n) {
  return rows::fetch_pack<rows::Any>(p.before.type, p.before.row(row), i, n);
}

// A token's row of d_out. Tokens that lie whole have one stride.
template <class T>
__device__ __forceinline__ const void* row_of(const Problem& p, std::int32_t token) {
  if constexpr (__is_same(T, rows::Any))
    return p.tokens.row(p.axes, token);
  else
    return static_cast<const std::uint16_t*>(p.tokens.data) + token * p.tokens.stride[0];
}

// A pack of a row from the sum over its tokens.
template <class T>
__device__ __forceinline__ void finish(const Problem& p, std::int64_t row, std::int64_t i,
                                       float (&sum)[kPack]) {
  const int n = rows::pack_at(i, p.width);
  if (n == 0) return;
#pragma unroll
  for (int k = 0; k < kPack; ++k) sum[k] = sum[k] * p.scale;
  if constexpr (__is_same(T, rows::Any))
    if (p.before.data) {
      float v[kPack];
      rows::unpack<T>(p.before.type, before_of(p, row, i, n), v);
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[k] = sum[k] + v[k];
    }
  rows::put_pack<T>(p.weight.type, p.weight.row(row), i, n, sum);
}

// ---- rows without tokens

// Their packs: +0, or as they lie in what d_weight is added to.
template <class T>
__device__ __forceinline__ void put_empty(const Problem& p, std::int64_t row, std::int64_t i) {
  const int n = rows::pack_at(i, p.width);
  if constexpr (__is_same(T, rows::Any)) {
    const auto raw = p.before.data ? before_of(p, row, i, n) : rows::Raw<T>{};
    rows::put_raw_pack<T>(p.weight.type, p.weight.row(row), i, n, raw);
  } else {
    const float zeros[kPack] = {};
    rows::put_pack<T>(p.weight.type, p.weight.row(row), i, n, zeros);
  }
}

// The first place whose key is not below `key`, for all threads of a block.
__device__ __forceinline__ std::uint32_t lower_bound(const Sorted& s, std::uint32_t key) {
  __shared__ unsigned found;
  const unsigned thread = threadIdx.x;
  std::uint32_t first = 0, step = 0;
  for (std::uint32_t span = s.count; span > 0; span = step - 1) {
    step = (span + kBlock - 1) / kBlock;
    // The last place of each thread's part. One thread is the first whose last key is not below.
    const std::uint32_t last = first + thread * step + step - 1;
    const bool below = last < s.count && s.keys[last] < key;
    const bool all_before = thread == 0 || (last - step < s.count && s.keys[last - step] < key);
    __syncthreads();
    if (all_before && !below) found = thread;
    if (below && thread == kBlock - 1) found = kBlock;
    __syncthreads();
    first += found * step;
  }
  return first < s.count ? first : s.count;
}

template <class T>
__device__ __forceinline__ void fill(const Problem& p, const Sorted& s, const Cut& cut, unsigned block) {
  __shared__ bool has_tokens[kMostFilled];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t first = std::int64_t{block} * cut.filled, left = p.vocab - first;
  const int count = left < cut.filled ? static_cast<int>(left) : cut.filled;
  for (int r = thread; r < count; r += kBlock) has_tokens[r] = false;
  const std::uint32_t begin = lower_bound(s, static_cast<std::uint32_t>(first));
  __syncthreads();
  for (std::uint32_t at = begin + threadIdx.x; at < s.count && s.keys[at] < first + count; at += kBlock)
    has_tokens[s.keys[at] - first] = true;
  __syncthreads();
  for (int r = thread >> cut.lanes_log; r < count; r += cut.beside()) {
    if (has_tokens[r]) continue;
#pragma unroll 4
    for (std::int64_t c = thread & (cut.lanes() - 1); c < cut.packs; c += cut.lanes())
      put_empty<T>(p, first + r, c * kPack);
  }
}

// ---- short runs

// Whether the run of this key has the window that begins at or behind `at`, one of its places.
__device__ __forceinline__ bool is_long(const Sorted& s, const Cut& cut, std::uint32_t at,
                                        std::uint32_t key) {
  return cut.shares > 0 && s.has((at + 2 * kWindow - 1) / kWindow * kWindow, key);
}

// The row of the run that begins at a place, two packs of it.
template <class T>
__device__ __forceinline__ void add_short(const Problem& p, const Sorted& s, std::uint32_t at,
                                          std::uint32_t key, std::int64_t i, std::int64_t apart) {
  float sums[kSide][kPack] = {};
  const int n[kSide] = {rows::pack_at(i, p.width), rows::pack_at(i + apart, p.width)};
  for (bool more = true; more; at += kAhead) {
    std::uint32_t keys[kAhead];
    std::int32_t tokens[kAhead];
#pragma unroll
    for (std::uint32_t a = 0; a < kAhead; ++a) {
      const bool inside = at + a < s.count;
      keys[a] = inside ? s.keys[at + a] : ~key, tokens[a] = inside ? s.tokens[at + a] : 0;
    }
    rows::Raw<T> packs[kAhead][kSide];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int k = 0; k < kSide; ++k)
        packs[a][k] = rows::fetch_pack<T>(p.tokens.type, row_of<T>(p, tokens[a]), i + k * apart,
                                          keys[a] == key ? n[k] : 0);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (keys[a] != key) break;
#pragma unroll
      for (int k = 0; k < kSide; ++k) {
        float v[kPack];
        rows::unpack<T>(p.tokens.type, packs[a][k], v);
#pragma unroll
        for (int e = 0; e < kPack; ++e) sums[k][e] = sums[k][e] + v[e];
      }
    }
    more = keys[kAhead - 1] == key;
  }
#pragma unroll
  for (int k = 0; k < kSide; ++k) finish<T>(p, key, i + k * apart, sums[k]);
}

template <class T>
__device__ __forceinline__ void add_short_runs(const Problem& p, const Sorted& s, const Cut& cut,
                                               unsigned block) {
  const unsigned tiles = static_cast<unsigned>(cut.tiles), lanes = 1u << cut.lanes_log,
                 beside = kBlock >> cut.lanes_log;
  const std::int64_t pack = std::int64_t{block % tiles} * (kSide * lanes) + threadIdx.x % lanes;
  std::uint32_t at = block / tiles * (beside * cut.rounds) + (threadIdx.x >> cut.lanes_log);
  for (int round = 0; round < cut.rounds && at < s.count; ++round, at += beside) {
    const std::uint32_t key = s.keys[at];
    if (key == p.vocab || (at > 0 && s.keys[at - 1] == key) || is_long(s, cut, at, key)) continue;
    add_short<T>(p, s, at, key, pack * kPack, std::int64_t{lanes} * kPack);
  }
}

// ---- long runs

// A tile of columns of the run that has this place, for all threads of a block.
template <class T>
__device__ __forceinline__ void add_long(const Problem& p, const Sorted& s, std::uint32_t place,
                                         std::int64_t column) {
  constexpr int kWide = kColumns / kPack, kRows = kBlock / kWide, kEach = kLong / kRows;
  __shared__ __attribute__((aligned(16))) float values[kLong][kColumns];
  __shared__ std::uint32_t begin;
  const int thread = static_cast<int>(threadIdx.x), line = thread / kWide, part = thread % kWide * kPack;
  const std::uint32_t key = s.keys[place];
  const std::uint32_t before = place - threadIdx.x;
  if (thread < kWindow && s.has(before, key) && !s.has(before - 1, key)) begin = before;
  __syncthreads();
  const int n = rows::pack_at(column + part, p.width);
  rows::Raw<T> packs[kEach];
  std::int32_t tokens[kEach];
  const auto look = [&](std::uint32_t at) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const std::uint32_t mine = at + e * kRows + line;
      tokens[e] = s.has(mine, key) ? s.tokens[mine] : -1;
    }
  };
  // Behind the run +0, which changes no sum: one that begins with +0 is never -0.
  const auto fetch = [&] {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      packs[e] = rows::Raw<T>{};
      if (tokens[e] >= 0)
        packs[e] = rows::fetch_pack<T>(p.tokens.type, row_of<T>(p, tokens[e]), column + part, n);
    }
  };
  float sum = 0;
  std::uint32_t at = begin;
  look(at);
  fetch();
  look(at + kLong);
  for (bool more = true; more; at += kLong) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      float v[kPack];
      rows::unpack<T>(p.tokens.type, packs[e], v);
#pragma unroll
      for (int k = 0; k < kPack; ++k) values[e * kRows + line][part + k] = v[k];
    }
    __syncthreads();
    more = s.has(at + kLong, key);
    fetch();
    look(at + 2 * kLong);
    if (thread < kColumns) {
#pragma unroll 32
      for (int t = 0; t < kLong; ++t) sum = sum + values[t][thread];
    }
    __syncthreads();
  }
  if (thread < kColumns) values[0][thread] = sum;
  __syncthreads();
  if (thread < kWide) {
    float v[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = values[0][part + k];
    finish<T>(p, key, column + part, v);
  }
  __syncthreads();
}

// The runs whose first window is of this block's share, for its tile of columns.
template <class T>
__device__ __forceinline__ void add_long_runs(const Problem& p, const Sorted& s, const Cut& cut,
                                              unsigned block) {
  __shared__ std::uint32_t places[kBlock];
  __shared__ int listed;
  const unsigned shares = static_cast<unsigned>(cut.shares), step = shares * kWindow;
  for (std::int64_t from = std::int64_t{block % shares} * kWindow; from < s.count;
       from += std::int64_t{step} * kBlock) {
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    const std::int64_t at = from + std::int64_t{step} * threadIdx.x;
    if (at < s.count) {
      const std::uint32_t place = static_cast<std::uint32_t>(at), key = s.keys[place];
      if (key != p.vocab && !s.has(place - kWindow, key) && is_long(s, cut, place, key))
        places[atomicAdd(&listed, 1)] = place;
    }
    __syncthreads();
    const int count = listed;
    for (int i = 0; i < count; ++i) add_long<T>(p, s, places[i], std::int64_t{block / shares} * kColumns);
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock, __is_same(T, rows::Any) ? 1 : 4)
    write(Problem p, Sorted s, Cut cut) {
  unsigned block = blockIdx.x;
  if (block < cut.long_blocks) return add_long_runs<T>(p, s, cut, block);
  block -= cut.long_blocks;
  if (block < cut.short_blocks) return add_short_runs<T>(p, s, cut, block);
  fill<T>(p, s, cut, block - cut.short_blocks);
}

inline bool lies_whole(const Problem& p) {
  const embed32::Matrix& m = p.weight;
  const bool rows_lie_whole = m.type == rows::Type::bf16 && m.stride % kPack == 0 &&
                              reinterpret_cast<std::uintptr_t>(m.data) % sizeof(rows::Bytes16) == 0;
  return rows_lie_whole && p.width % kPack == 0 && p.axes.count <= 1 && rows::lies_whole(p.axes, p.tokens);
}

inline std::int64_t backward_bytes(std::int64_t tokens, std::int64_t vocab) {
  return (Order(tokens, vocab).bytes() + 7) / 8 * 8;
}
// `few`: up to how many tokens are compared with each other.
inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream, std::uint32_t few = kFew) {
  if (p.vocab * p.width == 0) return;
  const Order order = Order(p.axes.rows, p.vocab).in(workspace);
  const Sorted sorted = launch_sort(p, order, few, stream);
  const Cut cut = cut_of(p, sorted.count);
  const unsigned blocks = cut.long_blocks + cut.short_blocks + cut.fill_blocks;
  if (blocks == 0) return;
  const auto launch = [&]<class T>(T) {
    hipLaunchKernelGGL((write<T>), dim3(blocks), dim3(kBlock), 0, stream, p, sorted, cut);
  };
  lies_whole(p) ? launch(rows::Whole{}) : launch(rows::Any{});
}

}  // namespace rlk::simt::embedding
