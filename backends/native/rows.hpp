// Rows in fp32, several floats at once: L is float or a GCC vector of W floats. Included by the one file per instruction
// set that is compiled with its flags; the width changes no bit.
#pragma once

#include <cstring>

#include "arithmetic/math.hpp"
#include "arithmetic/rows.hpp"

#if !defined(__clang__)
#  pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_*
#  pragma GCC diagnostic ignored \
      "-Waggressive-loop-optimizations"  // tails of constant lengths that have none
#endif

namespace rlk::native {

// W integers of 16 and of 32 bits.
template <int W>
struct Integers {
  using Halves = std::uint16_t;
  using Words = std::uint32_t;
};
template <>
struct Integers<8> {
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  typedef std::uint32_t Words __attribute__((vector_size(32)));
};
template <>
struct Integers<16> {
  typedef std::uint16_t Halves __attribute__((vector_size(32)));
  typedef std::uint32_t Words __attribute__((vector_size(64)));
};

// Whether results of these rows are more than the caches hold.
inline bool streams(const rows::Axes& axes, std::int64_t width, rows::Type type) {
  return axes.rows * width * rows::size_of(type) >= std::int64_t{16} << 20;
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
  // Rounded once to nearest even; a NaN becomes the canonical one. Streamed results go around the caches, where `to` is
  // aligned; fence() before another thread may read them.
  static void narrow(Type type, const float* from, void* to, std::int64_t n, bool stream = false) {
    const std::int64_t bytes = W * rows::size_of(type);
    if (W > 1 && stream && reinterpret_cast<std::uintptr_t>(to) % static_cast<std::uintptr_t>(bytes) == 0)
      narrow_to<true>(type, from, to, n);
    else
      narrow_to<false>(type, from, to, n);
  }
  static void fence([[maybe_unused]] bool stream) {
#if defined(__AVX2__)
    if (stream) _mm_sfence();
#endif
  }

 private:
  template <bool Stream>
  static void narrow_to(Type type, const float* from, void* to, std::int64_t n) {
    if (type == Type::f32) {
      narrow<Stream>(from, static_cast<float*>(to), n);
    } else if (type == Type::bf16) {
      narrow<Stream>(from, static_cast<simt::bf16*>(to), n);
    } else {
      narrow<Stream>(from, static_cast<simt::fp16*>(to), n);
    }
  }
  template <bool Stream, class V>
  static void put(void* p, const V& v) {
#if defined(__AVX512F__)
    if constexpr (Stream && sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
#if defined(__AVX2__)
    if constexpr (Stream && sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
    if constexpr (Stream && sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
#endif
    std::memcpy(p, &v, sizeof v);
  }
  using Halves = typename Integers<W>::Halves;
  using Words = typename Integers<W>::Words;

  static void widen(const simt::bf16* from, float* to, std::int64_t n) {
    std::int64_t i = 0;
    if constexpr (W > 1) {
      for (; i + W <= n; i += W) {
        Halves h;
        std::memcpy(&h, from + i, sizeof h);
        const Words bits = __builtin_convertvector(h, Words) << 16;
        std::memcpy(to + i, &bits, sizeof bits);
      }
    }
    for (; i < n; ++i) to[i] = simt::to_float(from[i]);
  }
  static void widen(const simt::fp16* from, float* to, std::int64_t n) {
    std::int64_t i = 0;
#if defined(__AVX512F__)
    if constexpr (W == 16)
      for (; i + W <= n; i += W)
        store(to + i, (L)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#endif
#if defined(__F16C__)
    if constexpr (W == 8)
      for (; i + W <= n; i += W)
        store(to + i, (L)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; ++i) to[i] = simt::to_float(from[i]);
  }

  template <bool Stream>
  static void narrow(const float* from, float* to, std::int64_t n) {
    std::int64_t i = 0;
    if constexpr (W > 1)
      for (; i + W <= n; i += W) {
        const L x = load(from + i);
        put<Stream>(to + i, x == x ? (Words)x : Words{} + 0x7fffffffu);
      }
    for (; i < n; ++i) to[i] = simt::from_float<float>(from[i]);
  }
  template <bool Stream>
  static void narrow(const float* from, simt::bf16* to, std::int64_t n) {
    std::int64_t i = 0;
    if constexpr (W > 1) {
      for (; i + W <= n; i += W) {
        const L x = load(from + i);
        const Words u = x == x ? (Words)x : Words{} + 0x7fff0000u;
        const Halves h = __builtin_convertvector((u + 0x7fffu + (u >> 16 & 1u)) >> 16, Halves);
        put<Stream>(to + i, h);
      }
    }
    for (; i < n; ++i) to[i] = simt::from_float<simt::bf16>(from[i]);
  }
  template <bool Stream>
  static void narrow(const float* from, simt::fp16* to, std::int64_t n) {
    std::int64_t i = 0;
#if defined(__F16C__)
    if constexpr (W > 1) {
      for (; i + W <= n; i += W) {
        const L x = load(from + i);
        const Halves number = __builtin_convertvector((Words)(x == x), Halves), h = halves(x);
        const Halves out = (h & number) | (~number & 0x7fff);
        put<Stream>(to + i, out);
      }
    }
#endif
    for (; i < n; ++i) to[i] = simt::from_float<simt::fp16>(from[i]);
  }
#if defined(__F16C__)
  static auto halves(L x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#  if defined(__AVX512F__)
    if constexpr (W == 16) return (Halves)_mm512_cvtps_ph((__m512)x, kMode);
#  endif
    if constexpr (W == 8) return (Halves)_mm256_cvtps_ph((__m256)x, kMode);
  }
#endif
};

}  // namespace rlk::native
