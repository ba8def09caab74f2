// The rope tile kernel for AVX2 with FMA and F16C.
#include "rope_tile.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>

#  include <cstring>

#  include "../simt/rope_math.hpp"

// Behind every include: code of other headers must not be compiled for this processor.
#  if defined(__clang__)
#    pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#  else
#    pragma GCC push_options
#    pragma GCC target("avx2,fma,f16c")
#  endif

namespace rlk::native::rope {
namespace {

struct Isa {
  using V = __m256;
  static constexpr int kWidth = 8;

  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load(const simt::bf16* p) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
  }
  static V load(const simt::fp16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  template <bool Stream>
  static void store(float* p, V v) {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    v = _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    if constexpr (Stream) {
      _mm256_stream_ps(p, v);
    } else {
      _mm256_storeu_ps(p, v);
    }
  }
  template <bool Stream>
  static void store(simt::bf16* p, V v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fff), unordered(v));
    put<Stream>(p, narrow(r));
  }
  template <bool Stream>
  static void store(simt::fp16* p, V v) {
    const __m128i r = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i flags = _mm256_and_si256(unordered(v), _mm256_set1_epi32(0xffff));
    put<Stream>(p, _mm_blendv_epi8(r, _mm_set1_epi16(0x7fff), narrow(flags)));
  }

  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }

  static void deinterleave(V v0, V v1, V& a, V& b) {
    a = order(_mm256_shuffle_ps(v0, v1, 0x88));
    b = order(_mm256_shuffle_ps(v0, v1, 0xdd));
  }
  static void interleave(V a, V b, V& v0, V& v1) {
    const V low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    v0 = _mm256_permute2f128_ps(low, high, 0x20);
    v1 = _mm256_permute2f128_ps(low, high, 0x31);
  }

  template <bool Stream>
  static void copy(void* to, const void* from, std::size_t bytes) {
    if constexpr (Stream) {
      if ((reinterpret_cast<std::uintptr_t>(to) | bytes) % 32 == 0) {
        for (std::size_t i = 0; i < bytes; i += 32) {
          const auto* p = reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + i);
          _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + i), _mm256_loadu_si256(p));
        }
        return;
      }
    }
    std::memcpy(to, from, bytes);
  }
  static void fence() { _mm_sfence(); }

 private:
  static __m256i unordered(V v) { return _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }
  static V order(V v) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)); }
  static __m128i narrow(__m256i v) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08));
  }
  template <bool Stream, class T>
  static void put(T* p, __m128i v) {
    if constexpr (Stream) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), v);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
    }
  }
};

#  include "rope_tile.inl"

}  // namespace

void tile_avx2(const rlk::rotary::Geometry& g, const Tile& tile) { rotate_any(g, tile); }
void kv_tile_avx2(const rlk::rotary::KvGeometry& g, const Tile& tile, bool backward) {
  split_any(g, tile, backward);
}

}  // namespace rlk::native::rope

#  if defined(__clang__)
#    pragma clang attribute pop
#  else
#    pragma GCC pop_options
#  endif
#else
namespace rlk::native::rope {
void tile_avx2(const rlk::rotary::Geometry& g, const Tile& tile) { tile_scalar(g, tile); }
void kv_tile_avx2(const rlk::rotary::KvGeometry& g, const Tile& tile, bool backward) {
  kv_tile_scalar(g, tile, backward);
}
}  // namespace rlk::native::rope
#endif
