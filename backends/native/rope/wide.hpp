// The vector instructions that tile.inl works with: W floats at once, W = 8 (AVX2 with FMA and F16C) or
// 16 (AVX-512 F, BW, VL, DQ). Only what the compiler's own vector types cannot say is told apart by width.
//
// A vector of 2W bf16 elements is read as its even and its odd elements: that takes a shift and a mask
// instead of a shuffle, and the way back a shift and a merge. The processor's own bf16 conversion is not
// used: it flushes subnormals.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "arithmetic/rope/math.hpp"

#if !defined(__clang__)
#  pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_*
#endif

namespace rlk::native::rope {
namespace {

template <int W>
struct Lanes;

#if defined(__AVX512F__)
template <>
struct Lanes<16> {
  using V = __m512;
  using Words = __m512i;
  using HalfWords = __m256i;
  typedef std::uint32_t Bits __attribute__((vector_size(64)));
  typedef std::uint16_t Halves __attribute__((vector_size(32)));
  static __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 from_half(__m256i v) { return _mm512_cvtph_ps(v); }
  static __m256i to_half(__m512 v) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static void stream(void* p, __m512i v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
  static void stream(void* p, __m256i v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
};
#endif
template <>
struct Lanes<8> {
  using V = __m256;
  using Words = __m256i;
  using HalfWords = __m128i;
  typedef std::uint32_t Bits __attribute__((vector_size(32)));
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  static __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 from_half(__m128i v) { return _mm256_cvtph_ps(v); }
  static __m128i to_half(__m256 v) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static void stream(void* p, __m256i v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }
  static void stream(void* p, __m128i v) { _mm_stream_si128(static_cast<__m128i*>(p), v); }
};

template <int W>
struct Wide {
  using V = typename Lanes<W>::V;
  using Bits = typename Lanes<W>::Bits;            // of the floats
  using Halves = typename Lanes<W>::Halves;        // as many 16-bit elements
  using Words = typename Lanes<W>::Words;          // what instructions call the former
  using HalfWords = typename Lanes<W>::HalfWords;  // and the latter
  static constexpr int kWidth = W;

  static V load(const float* p) { return take<V>(p); }
  static V load(const simt::bf16* p) { return (V)(__builtin_convertvector(take<Halves>(p), Bits) << 16); }
  static V load(const simt::fp16* p) { return Lanes<W>::from_half(take<HalfWords>(p)); }

  template <bool Stream>
  static void store(float* p, V v) {
    put<Stream>(p, (Words)select_number(v, 0x7fffffffu));
  }
  template <bool Stream>
  static void store(simt::bf16* p, V v) {
    put<Stream>(p, (HalfWords) __builtin_convertvector(round_bf16(v) >> 16, Halves));
  }
  template <bool Stream>
  static void store(simt::fp16* p, V v) {
    const Halves numbers = __builtin_convertvector((Bits)(v == v), Halves);  // all ones, or zero for a NaN
    const Halves h = (Halves)Lanes<W>::to_half(v);
    put<Stream>(p, (HalfWords)((h & numbers) | (~numbers & 0x7fff)));
  }

  // The even and the odd ones of 2W elements.
  template <class T>
  static void load_pairs(const T* p, V& even, V& odd) {
    deinterleave(load(p), load(p + W), even, odd);
  }
  static void load_pairs(const simt::bf16* p, V& even, V& odd) {
    const auto both = take<Bits>(p);
    even = (V)(both << 16), odd = (V)(both & 0xffff0000u);
  }
  template <bool Stream, class T>
  static void store_pairs(T* p, V even, V odd) {
    constexpr auto low = [](int i) { return i / 2 + i % 2 * W; };
    const auto [v0, v1] = [&]<int... I>(std::integer_sequence<int, I...>) {
      return std::pair{__builtin_shufflevector(even, odd, low(I)...),
                       __builtin_shufflevector(even, odd, low(I + W)...)};
    }(std::make_integer_sequence<int, W>());
    store<Stream>(p, v0);
    store<Stream>(p + W, v1);
  }
  template <bool Stream>
  static void store_pairs(simt::bf16* p, V even, V odd) {
    put<Stream>(p, (Words)(round_bf16(even) >> 16 | (round_bf16(odd) & 0xffff0000u)));
  }
  static void deinterleave(V v0, V v1, V& even, V& odd) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      even = __builtin_shufflevector(v0, v1, (2 * I)...);
      odd = __builtin_shufflevector(v0, v1, (2 * I + 1)...);
    }(std::make_integer_sequence<int, W>());
  }

  static V add(V a, V b) { return a + b; }
  static V mul(V a, V b) { return a * b; }
  static V fma(V a, V b, V c) { return Lanes<W>::fma(a, b, c); }

  template <bool Stream>
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;  // then `from` may be null
    if (!Stream || (reinterpret_cast<std::uintptr_t>(to) | bytes) % sizeof(Words) != 0) {
      std::memcpy(to, from, bytes);
      return;
    }
    for (std::size_t i = 0; i < bytes; i += sizeof(Words))
      put<true>(static_cast<char*>(to) + i, take<Words>(static_cast<const char*>(from) + i));
  }
  static void fence() { _mm_sfence(); }

 private:
  template <class Vector>
  static Vector take(const void* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  template <bool Stream, class Vector>
  static void put(void* p, Vector v) {
    if constexpr (Stream) {
      Lanes<W>::stream(p, v);
    } else {
      std::memcpy(p, &v, sizeof v);
    }
  }
  static Bits select_number(V v, std::uint32_t nan) { return v == v ? (Bits)v : Bits{} + nan; }
  // Rounded to nearest even at bit 16, which is where bf16 ends; the bits below are left over.
  static Bits round_bf16(V v) {
    const Bits u = select_number(v, 0x7fff0000u);
    return u + 0x7fffu + (u >> 16 & 1u);
  }
};

}  // namespace
}  // namespace rlk::native::rope
