// Rows in fp32, several floats at once: L is float or a GCC vector of W floats. Included by the one file per instruction
// set that is compiled with its flags; the width changes no bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "arithmetic/fp8.hpp"
#include "arithmetic/math.hpp"
#include "arithmetic/rows.hpp"

#if !defined(__clang__)
#  pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_*
#  pragma GCC diagnostic ignored \
      "-Waggressive-loop-optimizations"  // tails of constant lengths that have none
#endif

namespace rlk::native {

// W integers of 8, 16 and 32 bits.
template <int W>
struct Integers {
  using Bytes = std::uint8_t;
  using Halves = std::uint16_t;
  using Words = std::uint32_t;
};
template <>
struct Integers<8> {
  typedef std::uint8_t Bytes __attribute__((vector_size(8)));
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  typedef std::uint32_t Words __attribute__((vector_size(32)));
};
template <>
struct Integers<16> {
  typedef std::uint8_t Bytes __attribute__((vector_size(16)));
  typedef std::uint16_t Halves __attribute__((vector_size(32)));
  typedef std::uint32_t Words __attribute__((vector_size(64)));
};

// Whether results of so many bytes, or of these rows, are more than the caches hold.
inline bool streams(std::int64_t bytes) { return bytes >= std::int64_t{16} << 20; }
inline bool streams(const rows::Axes& axes, std::int64_t width, rows::Type type) {
  return streams(axes.rows * width * rows::size_of(type));
}

template <class L, int W>
struct Row {
  using Type = rows::Type;

  static L load(const float* p) {
    L x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, L x) { std::memcpy(p, &x, sizeof x); }

  // out[i] = f(in[i]...), a vector of them at a time; f takes vectors and single floats.
  template <class F, class... In>
  static void map(std::int64_t n, F f, float* out, const In*... in) {
    std::int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, f(load(in + i)...));
    for (; i < n; ++i) out[i] = f(in[i]...);
  }

  // The sum of n floats, a power of two, by halving: x[i] + x[i + n / 2] for every i of the first half, and so on. x is overwritten.
  static float halve(float* x, std::int64_t n) {
    std::int64_t h = n / 2;
    for (; h >= W; h /= 2)
      for (std::int64_t i = 0; i < h; i += W) store(x + i, load(x + i) + load(x + i + h));
    if constexpr (W > 1)
      if (n >= W) return halve<W / 2>(load(x));
    for (; h > 0; h /= 2)
      for (std::int64_t i = 0; i < h; ++i) x[i] = x[i] + x[i + h];
    return x[0];
  }

  // Lane i is lane i + H of x, and so on around the end.
  template <int H>
  static L moved_down(L x) {
    return moved_down<H>(x, std::make_integer_sequence<int, W>{});
  }

  // W elements, widened; or rounded once to nearest even, a NaN as the canonical one. Streamed results go around the caches
  // (`to` is aligned to a vector of them); fence() before another thread may read them.
  static L get(const float* p) { return load(p); }
  static L get(const simt::bf16* p) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (L)_mm512_slli_epi32(_mm512_cvtepu16_epi32(loadu_256(p)), 16);
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return (L)_mm256_slli_epi32(_mm256_cvtepu16_epi32(loadu_128(p)), 16);
#endif
    if constexpr (W == 1) return simt::to_float(*p);
  }
  static L get(const simt::fp16* p) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return (L)_mm512_cvtph_ps(loadu_256(p));
#endif
#if defined(__F16C__)
    if constexpr (W == 8) return (L)_mm256_cvtph_ps(loadu_128(p));
#endif
    if constexpr (W == 1) return simt::to_float(*p);
  }
  template <class S>
  static void set(S* p, L x, [[maybe_unused]] bool stream = false) {
    if constexpr (W == 1)
      *p = simt::from_float<S>(x);
    else
      put(p, rounded(x, S{}), stream);
  }
  // What set() leaves, widened again.
  template <class S>
  static L through(L x) {
    S cells[W];
    set(cells, x);
    return get(cells);
  }
  // Whether results there may be streamed, where that is asked for.
  template <class S>
  static bool aligned(const S* p, bool stream) {
    return W > 1 && stream && reinterpret_cast<std::uintptr_t>(p) % (W * sizeof(S)) == 0;
  }

  static void widen(Type type, const void* from, float* to, std::int64_t n) {
    if (type == Type::f32) {
      if (n == 0) return;  // from null, perhaps
      std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
    } else if (type == Type::bf16) {
      widen(static_cast<const simt::bf16*>(from), to, n);
    } else {
      widen(static_cast<const simt::fp16*>(from), to, n);
    }
  }
  static void narrow(Type type, const float* from, void* to, std::int64_t n, bool stream = false) {
    if (type == Type::f32) {
      narrow(from, static_cast<float*>(to), n, stream);
    } else if (type == Type::bf16) {
      narrow(from, static_cast<simt::bf16*>(to), n, stream);
    } else {
      narrow(from, static_cast<simt::fp16*>(to), n, stream);
    }
  }
  template <class S>
  static void narrow(const float* from, S* to, std::int64_t n, bool stream = false) {
    stream = aligned(to, stream);
    std::int64_t i = 0;
    for (; i + W <= n; i += W) set(to + i, load(from + i), stream);
    for (; i < n; ++i) to[i] = simt::from_float<S>(from[i]);
  }
  // Bytes as they lie. Of `next`, if it is not null, the same lines are asked for meanwhile.
  static void copy(const char* from, char* to, std::int64_t bytes, bool stream, const char* next) {
    stream = aligned(reinterpret_cast<const float*>(to), stream);
    std::int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
      if (next) __builtin_prefetch(next + at);
      if constexpr (W == 1) {
        std::memcpy(to + at, from + at, kLine);
      } else {
        for (std::int64_t i = at; i < at + kLine; i += static_cast<std::int64_t>(sizeof(L))) {
          L part;
          std::memcpy(&part, from + i, sizeof part);
          put(to + i, part, stream);
        }
      }
    }
    if (at < bytes) std::memcpy(to + at, from + at, static_cast<std::size_t>(bytes - at));
  }
  // Zeros; around the caches only whole lines.
  static void clear(char* to, std::int64_t bytes, bool stream) {
    char* const end = to + bytes;
    if (W > 1 && stream) {
      char* const line = to + std::min(bytes, -reinterpret_cast<std::intptr_t>(to) & (kLine - 1));
      std::memset(to, 0, static_cast<std::size_t>(line - to));
      for (to = line; end - to >= kLine; to += kLine)
        for (std::int64_t i = 0; i < kLine; i += static_cast<std::int64_t>(sizeof(L)))
          put(to + i, L{}, stream);
    }
    std::memset(to, 0, static_cast<std::size_t>(end - to));
  }
  static void fence([[maybe_unused]] bool stream) {
#if defined(__AVX2__)
    if (stream) _mm_sfence();
#endif
  }

 private:
  template <int H>
  static float halve(L x) {
    const L sums = x + moved_down<H>(x);
    if constexpr (H == 1)
      return sums[0];
    else
      return halve<H / 2>(sums);
  }
  template <int H, int... I>
  static L moved_down(L x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, ((I + H) % W)...);
  }

  template <class S>
  static void widen(const S* from, float* to, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, get(from + i));
    for (; i < n; ++i) to[i] = simt::to_float(from[i]);
  }

  static constexpr std::int64_t kLine = 64;  // bytes

  using Bytes = typename Integers<W>::Bytes;
  using Halves = typename Integers<W>::Halves;
  using Words = typename Integers<W>::Words;
#if defined(__AVX2__)
  static __m256i loadu_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i loadu_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
#endif

  template <class V>
  static void put(void* p, const V& v, [[maybe_unused]] bool stream) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64)
      if (stream) return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32)
      if (stream) return _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
    if constexpr (sizeof(V) == 16)
      if (stream) return _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
#endif
    std::memcpy(p, &v, sizeof v);
  }
  static Words rounded(L x, float) { return x == x ? (Words)x : Words{} + 0x7fffffffu; }
  static Halves rounded(L x, simt::bf16) {
    const Words u = x == x ? (Words)x : Words{} + 0x7fff0000u;
    const Words high = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
#if defined(__AVX512F__)
    if constexpr (W == 16) return (Halves)_mm512_cvtepi32_epi16((__m512i)high);
#endif
    return __builtin_convertvector(high, Halves);
  }
  static Bytes rounded(L x, simt::fp8) {
    const Words u = (Words)x, magnitude = u & 0x7fffffffu;
    const Words normal = (magnitude + ((7u - 127u) << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20,
                subnormal = (Words)((L)magnitude + 0x1p14f) - 0x46800000u;
    Words e = magnitude < 0x3c800000u ? subnormal : normal;
    e = (e < 0x7eu ? e : Words{} + 0x7eu) | (u >> 24 & 0x80u);
    e = magnitude > 0x7f800000u ? Words{} + 0x7fu : e;
#if defined(__AVX512F__)
    if constexpr (W == 16) return (Bytes)_mm512_cvtepi32_epi8((__m512i)e);
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) {
      const __m128i halves =
          _mm_packus_epi32(_mm256_castsi256_si128((__m256i)e), _mm256_extracti128_si256((__m256i)e, 1));
      return (Bytes)_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
    }
#endif
    return __builtin_convertvector(e, Bytes);
  }
#if defined(__F16C__)
  static Halves rounded(L x, simt::fp16) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Halves number = __builtin_convertvector((Words)(x == x), Halves);
    Halves h{};
#  if defined(__AVX512F__)
    if constexpr (W == 16) h = (Halves)_mm512_cvtps_ph((__m512)x, kMode);
#  endif
    if constexpr (W == 8) h = (Halves)_mm256_cvtps_ph((__m256)x, kMode);
    return (h & number) | (~number & 0x7fff);
  }
#endif
};

}  // namespace rlk::native
