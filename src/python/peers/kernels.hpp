// The kernels of a sum over ranks (see sum.hpp).
#pragma once

#include "simt/rows.hpp"
#include "src/python/peers/sum.hpp"
#include "src/python/peers/system.hpp"

namespace rlk::peers {

using rows::kPack;

// A rank's memory as the kernels walk it.
struct Memory {
  Layout layout;
  __device__ explicit Memory(const Sum& s) : layout{s.room, s.ranks} {}
  __device__ __forceinline__ static char* at(const Sum& s, int rank, std::int64_t byte) {
    return static_cast<char*>(s.memory[rank]) + byte;
  }
  __device__ __forceinline__ std::uint32_t* counter(const Sum& s, int which) const {
    return reinterpret_cast<std::uint32_t*>(at(s, s.rank, layout.counter(which, blockIdx.x)));
  }
  __device__ __forceinline__ std::uint32_t* flag(const Sum& s, int rank, int which, int from) const {
    return reinterpret_cast<std::uint32_t*>(at(s, rank, layout.flag(which, blockIdx.x, from)));
  }
  __device__ __forceinline__ float* part(const Sum& s, int rank, std::uint32_t chunk, int from) const {
    return reinterpret_cast<float*>(at(s, rank, layout.parts(layout.slot(kRing, blockIdx.x, chunk, from))));
  }
  __device__ __forceinline__ void* result(const Sum& s, int rank, std::uint32_t chunk, int from) const {
    return at(s, rank, layout.results(layout.slot(kRing, blockIdx.x, chunk, from)));
  }
  __device__ __forceinline__ const float* landed(const Sum& s, int from) const {
    return reinterpret_cast<const float*>(at(s, s.rank, s.landing)) + from * s.each;
  }
  __device__ __forceinline__ char* words(const Sum& s, int rank, std::uint32_t chunk, int from) const {
    return at(s, rank, layout.words(layout.slot(kWordRing, blockIdx.x, chunk, from)));
  }
};

// The n-th of the other ranks. Blocks and ranks begin at different ones, so that no rank is written to by all at once.
template <int T>
__device__ __forceinline__ int other(const Sum& s, int n) {
  return (s.rank + 1 + (n + static_cast<int>(blockIdx.x)) % (T - 1)) % T;
}

// How many chunks of so many elements this block has.
__device__ __forceinline__ std::uint32_t chunks_of(std::int64_t count, std::int64_t chunk) {
  const std::int64_t all = (count + chunk - 1) / chunk;
  return static_cast<std::uint32_t>(blockIdx.x < all ? (all - blockIdx.x - 1) / gridDim.x + 1 : 0);
}

template <int T>
__device__ __forceinline__ float top(const float (&x)[T]) {
  if constexpr (T == 2)
    return simt::add_rn(x[0], x[1]);
  else if constexpr (T == 4)
    return tree8::four(x[0], x[1], x[2], x[3]);
  else
    return tree8::eight(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
}

// What is added to a whole sum of element i on, and the roundings on the way.
template <class Y, int N>
__device__ __forceinline__ void finish(const Sum& s, std::int64_t i, std::int64_t in_y, float (&v)[N]) {
  const auto type = static_cast<rows::Type>(s.type);
  const auto add = [&](const void* from, std::int64_t at) {
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = rows::round_to(type, v[k]) + rows::load(type, from, at + k);
  };
  if (s.bias != nullptr) add(s.bias, i % s.width);
  if (s.residual != nullptr) add(s.residual, in_y);
}

// ---- words: two elements of each thread at a time

template <int T, class Y>
__device__ __forceinline__ void add_words(const Sum& s, const Memory& m, std::uint32_t chunk,
                                          std::int64_t i) {
  const bool some = i < s.count;
  float x[2][T], own[2] = {some ? s.part[i] : 0.0f, some ? s.part[i + 1] : 0.0f};
#pragma unroll
  for (int p = 0; p < T; ++p) {
    x[0][p] = own[0], x[1][p] = own[1];
    if (p == s.rank) continue;
    const char* from = m.words(s, s.rank, chunk, p) + 16 * threadIdx.x;
    Word4 w = get_words(from);
    for (Patience patience(s.nanoseconds, s.late, p); w.word[1] != chunk || w.word[3] != chunk;
         w = get_words(from))
      patience.pass();
    x[0][p] = simt::bits_float(w.word[0]), x[1][p] = simt::bits_float(w.word[2]);
  }
  if (!some) return;
  float v[2] = {top<T>(x[0]), top<T>(x[1])};
  finish<Y>(s, i, i, v);
  if constexpr (sizeof(Y) == 4)
    reinterpret_cast<float2*>(s.y)[i / 2] =
        make_float2(simt::from_float<float>(v[0]), simt::from_float<float>(v[1]));
  else
    static_cast<std::uint32_t*>(s.y)[i / 2] = rows::pair_of<Y>(v[0], v[1]);
}

template <int T, class Y>
__global__ void __launch_bounds__(kThreads) words(Sum s) {
  const Memory m(s);
  // Numbers begin with 1, which no fresh memory has; what is zero for a while after 2^32 chunks was read long before.
  const std::uint32_t base = *m.counter(s, 0) + 1;
  const std::uint32_t n = chunks_of(s.count, kWordChunk);
  __syncthreads();  // before the counter changes
  for (std::uint32_t step = 0; step <= n; ++step) {
    const std::int64_t i = (blockIdx.x + std::int64_t{step} * gridDim.x) * kWordChunk + 2 * threadIdx.x;
    if (step < n) {  // also of threads behind the last element, whose rings must not fall behind
      const bool some = i < s.count;
      const std::uint32_t chunk = base + step, a = some ? simt::float_bits(s.part[i]) : 0,
                          b = some ? simt::float_bits(s.part[i + 1]) : 0;
#pragma unroll
      for (int p = 0; p < T; ++p)
        if (p != s.rank) put_words(m.words(s, p, chunk, s.rank) + 16 * threadIdx.x, {a, chunk, b, chunk});
    }
    if (step > 0) add_words<T, Y>(s, m, base + step - 1, i - std::int64_t{gridDim.x} * kWordChunk);
  }
  if (threadIdx.x == 0) *m.counter(s, 0) = base - 1 + n;
}

// ---- with flags

// Threads 0 to T - 1 wait, each for a rank; all go on when all came.
template <int T>
__device__ __forceinline__ void await(const Sum& s, const Memory& m, int which, std::uint32_t value) {
  if (threadIdx.x < T && static_cast<int>(threadIdx.x) != s.rank) {
    const int from = static_cast<int>(threadIdx.x);
    const std::uint32_t* flag = m.flag(s, s.rank, which, from);
    Patience patience(s.nanoseconds, s.late, from);
    while (static_cast<std::int32_t>(seen(flag) - value) < 0) patience.pass();
  }
  __syncthreads();
}

// What a block sent before is there when the others see this.
template <int T>
__device__ __forceinline__ void tell(const Sum& s, const Memory& m, int which, std::uint32_t value) {
  if (threadIdx.x < T && static_cast<int>(threadIdx.x) != s.rank)
    raise(m.flag(s, static_cast<int>(threadIdx.x), which, s.rank), value);
}

__device__ __forceinline__ void floats_of(const Word4& a, const Word4& b, float (&v)[kPack]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) v[e] = simt::bits_float(a.word[e]), v[4 + e] = simt::bits_float(b.word[e]);
}
// A pack as it is stored.
template <class Y>
struct Rounded {
  Word4 part[sizeof(Y) / 2];
  __device__ __forceinline__ explicit Rounded(const float (&v)[kPack]) {
#pragma unroll
    for (int e = 0; e < kPack; e += 2) {
      if constexpr (sizeof(Y) == 4) {
        part[e / 4].word[e % 4] = simt::float_bits(simt::from_float<float>(v[e]));
        part[e / 4].word[e % 4 + 1] = simt::float_bits(simt::from_float<float>(v[e + 1]));
      } else {
        part[0].word[e / 2] = rows::pair_of<Y>(v[e], v[e + 1]);
      }
    }
  }
  __device__ __forceinline__ void put(void* y, std::int64_t i) const {
    auto* to = reinterpret_cast<Word4*>(static_cast<Y*>(y) + i);
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(Y) / 2); ++k) to[k] = part[k];
  }
};

// Elements of `rank`'s share that its chunk c has.
__device__ __forceinline__ std::int64_t share(const Sum& s, int rank, std::int64_t c) {
  const std::int64_t first = rank * s.each + c * s.chunk, end = (rank + 1) * s.each;
  const std::int64_t left = (end < s.count ? end : s.count) - first;
  return left < 0 ? 0 : left < s.chunk ? left : s.chunk;
}

// Adds the share's chunk c, gives what it is to the others unless each keeps its own. Parts and results have numbers.
template <int T, class Y, bool Landed>
__device__ __forceinline__ void add_chunk(const Sum& s, const Memory& m, std::uint32_t part,
                                          std::uint32_t result, std::int64_t c) {
  const std::int64_t own = c * s.chunk, i = s.rank * s.each + own, in_y = s.spread != 0 ? own : i;
  const std::int64_t count = share(s, s.rank, c);
  for (std::int64_t k = kPack * threadIdx.x; k < count; k += kPack * kThreads) {
    float x[T][kPack], v[kPack];
#pragma unroll
    for (int p = 0; p < T; ++p) {
      const float* from = Landed        ? m.landed(s, p) + own + k
                          : p == s.rank ? s.part + i + k
                                        : m.part(s, s.rank, part, p) + k;
      floats_of(fresh(from), fresh(from + 4), x[p]);
    }
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      float column[T];
#pragma unroll
      for (int p = 0; p < T; ++p) column[p] = x[p][e];
      v[e] = top<T>(column);
    }
    finish<Y>(s, i + k, in_y + k, v);
    const Rounded<Y> rounded(v);
    rounded.put(s.y, in_y + k);
    if (s.spread != 0) continue;
#pragma unroll
    for (int n = 0; n < T - 1; ++n) rounded.put(m.result(s, other<T>(s, n), result, s.rank), k);
  }
}

template <int T>
__device__ __forceinline__ void send_chunk(const Sum& s, const Memory& m, std::uint32_t chunk,
                                           std::int64_t c) {
#pragma unroll
  for (int n = 0; n < T - 1; ++n) {
    const int p = other<T>(s, n);
    const float* from = s.part + p * s.each + c * s.chunk;
    float* to = m.part(s, p, chunk, s.rank);
    const std::int64_t count = share(s, p, c);
    // A warp's stores lie beside each other.
#pragma unroll 4
    for (std::int64_t k = 4 * threadIdx.x; k < count; k += 4 * kThreads)
      *reinterpret_cast<Word4*>(to + k) = *reinterpret_cast<const Word4*>(from + k);
  }
}

template <int T, class Y>
__device__ __forceinline__ void collect(const Sum& s, const Memory& m, std::uint32_t chunk, std::int64_t c) {
#pragma unroll
  for (int p = 0; p < T; ++p) {
    if (p == s.rank) continue;
    const auto* from = static_cast<const Y*>(m.result(s, s.rank, chunk, p));
    auto* to = static_cast<Y*>(s.y) + p * s.each + c * s.chunk;
    constexpr std::int64_t in16 = 16 / sizeof(Y);
    const std::int64_t count = share(s, p, c);
    for (std::int64_t k = in16 * threadIdx.x; k < count; k += in16 * kThreads)
      *reinterpret_cast<Word4*>(to + k) = fresh(from + k);
  }
}

template <int T, class Y, bool Landed>
__global__ void __launch_bounds__(kThreads, Landed || T < 8 ? 2 : 1) shared(Sum s) {
  const Memory m(s);
  const std::uint32_t base = *m.counter(s, 1), results = *m.flag(s, s.rank, 1, s.rank);
  const std::uint32_t n = chunks_of(s.each, s.chunk);
  const auto at = [](std::uint32_t chunk) { return blockIdx.x + std::int64_t{chunk} * gridDim.x; };
  if constexpr (Landed) {
    tell<T>(s, m, 0, base + 1);
    await<T>(s, m, 0, base + 1);
  }
  // A step sends a chunk, adds the one that was sent kLag steps before, and takes the results of kLag before that.
  constexpr std::uint32_t lag = Landed ? 0 : kLag;
  for (std::uint32_t step = 0; step < n + lag + kLag; ++step) {
    const std::uint32_t adds = step - lag, takes = adds - kLag;  // none has a number of n or more
    if (!Landed && step < n) send_chunk<T>(s, m, base + step, at(step));
    if (adds < n) {
      if constexpr (!Landed) await<T>(s, m, 0, base + adds + 1);
      add_chunk<T, Y, Landed>(s, m, base + adds, results + adds, at(adds));
    }
    __syncthreads();
    if (!Landed && step < n) tell<T>(s, m, 0, base + step + 1);
    if (adds < n) tell<T>(s, m, 1, results + adds + 1);
    if (takes < n) {
      await<T>(s, m, 1, results + takes + 1);
      if (s.spread == 0) collect<T, Y>(s, m, results + takes, at(takes));
    }
  }
  if (threadIdx.x == 0)
    *m.counter(s, 1) = base + (Landed ? 1 : n), *m.flag(s, s.rank, 1, s.rank) = results + n;
}

// ---- launch

template <int T, class Y>
void launch_way(const Sum& s, hipStream_t stream) {
  const dim3 grid(static_cast<unsigned>(s.blocks)), block(kThreads);
  if (static_cast<Way>(s.way) == Way::words)
    hipLaunchKernelGGL((words<T, Y>), grid, block, 0, stream, s);
  else if (static_cast<Way>(s.way) == Way::shared)
    hipLaunchKernelGGL((shared<T, Y, false>), grid, block, 0, stream, s);
  else
    hipLaunchKernelGGL((shared<T, Y, true>), grid, block, 0, stream, s);
}

template <class Y>
void launch_type(const Sum& s, hipStream_t stream) {
  if (s.ranks == 2)
    launch_way<2, Y>(s, stream);
  else if (s.ranks == 4)
    launch_way<4, Y>(s, stream);
  else
    launch_way<8, Y>(s, stream);
}

inline void launch(const Sum& s, hipStream_t stream) {
  if (s.count == 0) return;
  const auto type = static_cast<rows::Type>(s.type);
  if (type == rows::Type::bf16)
    launch_type<simt::bf16>(s, stream);
  else if (type == rows::Type::f16)
    launch_type<simt::fp16>(s, stream);
  else
    launch_type<float>(s, stream);
}

}  // namespace rlk::peers
