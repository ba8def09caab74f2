// Intel's matrix unit itself: its instructions, and the vector code that brings operands to it.
#pragma once

#include "native/lm_head/unit.hpp"

#if defined(__x86_64__) && defined(__linux__)
#  define RLK_HAS_AMX 1

#  include "native/lm_head/avx512.hpp"

#  define RLK_AMX \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

namespace rlk::native {
namespace {

// A worker's tiles: eight full ones. (Static: the compiler sees no read of the configuration.)
struct alignas(64) Configuration {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
RLK_AMX inline void configure() {
  static const Configuration full;
  asm volatile("" ::"r"(&full) : "memory");
  _tile_loadconfig(&full);
}
RLK_AMX inline void release() { _tile_release(); }
struct Tiles {
  const DefaultFloatMode floats;
  Tiles() { configure(); }
  ~Tiles() { release(); }
};

// The compiler does not know that tile loads read memory.
RLK_INLINE void operands_written() { asm volatile("" ::: "memory"); }

// sums[32][32], rows `pitch` floats apart, of 32 rows and two groups of 16 columns; from +0, or added to what
// is there.
RLK_AMX inline void multiply(const First& first, const std::byte* second, std::int64_t group_bytes,
                             std::int64_t steps, float* sums, std::int64_t pitch, bool more = false) {
  const std::int64_t bytes = 4 * pitch;
  float* below = sums + kSide * pitch;
  operands_written();
  if (more) {
    _tile_loadd(0, sums, bytes);
    _tile_loadd(1, sums + kSide, bytes);
    _tile_loadd(2, below, bytes);
    _tile_loadd(3, below + kSide, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const std::byte* beside = second + group_bytes;
  for (std::int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, first.top + first.step * s, first.stride);
    _tile_loadd(5, second + kTile * s, 64);
    _tile_loadd(6, beside + kTile * s, 64);
    _tile_loadd(7, first.below + first.step * s, first.stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(2, 7, 5);
    _tile_dpbf16ps(3, 7, 6);
  }
  if (first.tail) {
    _tile_loadd(4, first.tail, 64);
    _tile_loadd(5, second + kTile * steps, 64);
    _tile_loadd(6, beside + kTile * steps, 64);
    _tile_loadd(7, first.tail + kTile, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(2, 7, 5);
    _tile_dpbf16ps(3, 7, 6);
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kSide, bytes);
  _tile_stored(2, below, bytes);
  _tile_stored(3, below + kSide, bytes);
}

// One tile as 32-bit pairs of steps, zeros where nothing is: `rows` rows of `steps` contiguous steps ...
RLK_INLINE void load_rows(__m512 (&tile)[kSide], const std::uint16_t* from, std::int64_t stride,
                          std::int64_t rows, std::int64_t steps) {
  const __mmask32 mask = steps < kStep ? (1u << steps) - 1 : 0xffffffffu;
  for (std::int64_t i = 0; i < kSide; ++i)
    tile[i] = _mm512_castsi512_ps(i < rows ? _mm512_maskz_loadu_epi16(mask, from + i * stride)
                                           : _mm512_setzero_si512());
}
// ... or `steps` lines of `columns` contiguous columns.
RLK_INLINE void load_lines(__m512 (&tile)[kSide], const std::uint16_t* from, std::int64_t stride,
                           std::int64_t steps, std::int64_t columns) {
  const __mmask16 mask = columns > 0 ? first_lanes(columns) : __mmask16{0};
  const auto line = [&](std::int64_t s) RLK_ISA {
    return _mm512_cvtepu16_epi32(
        _mm256_maskz_loadu_epi16(s < steps ? mask : __mmask16{0}, from + (s < steps ? s * stride : 0)));
  };
  for (std::int64_t i = 0; i < kSide; ++i)
    tile[i] = _mm512_castsi512_ps(_mm512_or_si512(line(2 * i), _mm512_slli_epi32(line(2 * i + 1), 16)));
}
RLK_INLINE void store_tile(const __m512 (&tile)[kSide], std::byte* to) {
  for (std::int64_t i = 0; i < kSide; ++i) _mm512_storeu_ps(to + 64 * i, tile[i]);
}

}  // namespace
}  // namespace rlk::native

#endif
