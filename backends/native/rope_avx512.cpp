// The rope tile kernel for AVX-512 (F, BW, VL, DQ). The bf16 conversion instruction is not used: it flushes
// subnormals.
#include "rope_tile.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>

#  include <cstring>

#  include "../simt/rope_math.hpp"

// Behind every include: code of other headers must not be compiled for this processor.
#  if defined(__clang__)
#    pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))), \
                                 apply_to = function)
#  else
#    pragma GCC push_options
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_*
#    pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")
#  endif

namespace rlk::native::rope {
namespace {

struct Isa {
  using V = __m512;
  static constexpr int kWidth = 16;

  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const simt::bf16* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  static V load(const simt::fp16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  template <bool Stream>
  static void store(float* p, V v) {
    v = _mm512_mask_mov_ps(v, unordered(v), _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)));
    if constexpr (Stream) {
      _mm512_stream_ps(p, v);
    } else {
      _mm512_storeu_ps(p, v);
    }
  }
  template <bool Stream>
  static void store(simt::bf16* p, V v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    r = _mm512_mask_mov_epi32(r, unordered(v), _mm512_set1_epi32(0x7fff));
    put<Stream>(p, _mm512_cvtepi32_epi16(r));
  }
  template <bool Stream>
  static void store(simt::fp16* p, V v) {
    const __m256i r = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    put<Stream>(p, _mm256_mask_mov_epi16(r, unordered(v), _mm256_set1_epi16(0x7fff)));
  }

  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }

  static void deinterleave(V v0, V v1, V& a, V& b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    a = _mm512_permutex2var_ps(v0, even, v1);
    b = _mm512_permutex2var_ps(v0, _mm512_add_epi32(even, _mm512_set1_epi32(1)), v1);
  }
  static void interleave(V a, V b, V& v0, V& v1) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    v0 = _mm512_permutex2var_ps(a, low, b);
    v1 = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
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
  static __mmask16 unordered(V v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
  template <bool Stream, class T>
  static void put(T* p, __m256i v) {
    if constexpr (Stream) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
    }
  }
};

#  include "rope_tile.inl"

}  // namespace

void tile_avx512(const rlk::rotary::Geometry& g, const Tile& tile) { rotate_any(g, tile); }
void kv_tile_avx512(const rlk::rotary::KvGeometry& g, const Tile& tile, bool backward) {
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
void tile_avx512(const rlk::rotary::Geometry& g, const Tile& tile) { tile_scalar(g, tile); }
void kv_tile_avx512(const rlk::rotary::KvGeometry& g, const Tile& tile, bool backward) {
  kv_tile_scalar(g, tile, backward);
}
}  // namespace rlk::native::rope
#endif
