// Intel's matrix unit (AMX) for lm_head: tiles of 16 x 16 fp32 sums from bf16 operands, arithmetic amx/k32.
//
// A tile product takes 16 rows of a *first* operand, 32 steps of depth each, where they lie at any stride,
// and a *second* operand as 16 pairs of steps, 16 columns each, the two steps of a pair beside each other. As
// 32-bit words one is the transpose of the other, so whatever is summed over can be brought into either: from
// rows (depth is contiguous) or from lines (columns are).
#pragma once

namespace rlk::native {
inline constexpr const char* kNoAmx = "this build lacks AMX with bf16";
}

#if defined(__x86_64__) && defined(__linux__)
#  define RLK_HAS_AMX 1

#  include <algorithm>
#  include <cstring>

#  include "native/lm_head/avx512.hpp"

#  define RLK_AMX \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

namespace rlk::native {
namespace {

constexpr std::int64_t kSide = 16;                // rows of a tile
constexpr std::int64_t kStep = 32;                // depth of a tile
constexpr std::int64_t kTile = kSide * 64;        // bytes of one
constexpr std::int64_t kDepthBlock = 4096;        // summed apart
constexpr std::int64_t kWidth = 2 * kSide;        // two tiles by two are multiplied at a time
constexpr std::int64_t kBlock = kWidth * kWidth;  // sums made at a time

inline std::int64_t up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// A worker's tiles: eight full ones. (Static: the compiler sees no read of the configuration.)
struct Tiles {
  struct alignas(64) Configuration {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  const DefaultFloatMode floats;
  RLK_AMX Tiles() {
    static const Configuration full;
    asm volatile("" ::"r"(&full) : "memory");
    _tile_loadconfig(&full);
  }
  RLK_AMX ~Tiles() { _tile_release(); }
};

// The compiler does not know that tile loads read memory.
RLK_INLINE void operands_written() { asm volatile("" ::: "memory"); }

// Two tiles of a first operand: rows `stride` bytes apart, the next step `step` bytes on. One more step may follow, of which a
// copy is held for the zeros in it, rows of 64 bytes.
struct First {
  const std::byte *top, *below;
  std::int64_t stride, step;
  const std::byte* tail = nullptr;
};
inline First rows_as_they_lie(const std::byte* rows, std::int64_t stride) {
  return {rows, rows + kSide * stride, stride, 64, nullptr};
}
inline First packed_rows(const std::byte* tiles, std::int64_t group_bytes) {
  return {tiles, tiles + group_bytes, 64, kTile, nullptr};
}

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

// The sums that a block ends with: its chain, and the levels that it meets, from the lowest up.
RLK_ISA inline void join(float* levels, const float* chain, int meets, int to) {
  for (std::int64_t i = 0; i < kBlock; i += 16) {
    __m512 sum = _mm512_loadu_ps(chain + i);
    for (int level = 0; level < meets; ++level)
      sum = _mm512_add_ps(_mm512_loadu_ps(levels + level * kBlock + i), sum);
    _mm512_storeu_ps(levels + to * kBlock + i, sum);
  }
}

inline std::int64_t steps_of(const Piece& piece) { return up(piece.depth, kStep) / kStep; }
inline bool has_tail(const Piece& piece) { return piece.depth % kStep != 0; }

// A piece's last step, of `count` rows `stride` bytes apart, zeros beside and below: `rows` rows of 64 bytes.
inline void copy_tail(const std::byte* from, std::int64_t stride, const Piece& piece, std::int64_t count,
                      std::int64_t rows, std::byte* to) {
  const std::int64_t bytes = 2 * (piece.depth % kStep);
  from += 2 * (piece.first + piece.depth) - bytes;
  std::memset(to, 0, static_cast<std::size_t>(64 * rows));
  for (std::int64_t i = 0; i < std::min(rows, count); ++i)
    std::memcpy(to + 64 * i, from + i * stride, static_cast<std::size_t>(bytes));
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
