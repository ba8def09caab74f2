// Intel's matrix unit as the products take it.
#include "native/lm_head/amx.hpp"

namespace rlk::native {

#if RLK_HAS_AMX

namespace {

// [64 rows of the weight][16 rows]: four tiles by one, for a group that has no neighbour.
RLK_AMX inline void multiply_alone(const First& first, const std::byte* group, std::int64_t steps,
                                   float* sums, bool more) {
  operands_written();
  if (more) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kSide * kSide, 64);
    _tile_loadd(2, sums + 2 * kSide * kSide, 64);
    _tile_loadd(3, sums + 3 * kSide * kSide, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const std::int64_t stride = first.stride, down = kSide * stride;
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::byte* from = first.top + first.step * s;
    _tile_loadd(4, group + kTile * s, 64);
    _tile_loadd(5, from, stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, from + down, stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, from + 2 * down, stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, from + 3 * down, stride);
    _tile_dpbf16ps(3, 5, 4);
  }
  if (first.tail) {
    _tile_loadd(4, group + kTile * steps, 64);
    _tile_loadd(5, first.tail, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, first.tail + kTile, 64);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, first.tail + 2 * kTile, 64);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, first.tail + 3 * kTile, 64);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + 2 * kSide * kSide, 64);
  _tile_stored(3, sums + 3 * kSide * kSide, 64);
}

// A tile of results turned into rows of sums.
RLK_ISA inline void turn(const float* from, std::int64_t stride, float* to, std::int64_t to_stride) {
  __m512 tile[kSide];
  for (std::int64_t i = 0; i < kSide; ++i) tile[i] = _mm512_loadu_ps(from + i * stride);
  transpose_16x16(tile);
  for (std::int64_t i = 0; i < kSide; ++i) _mm512_storeu_ps(to + i * to_stride, tile[i]);
}

RLK_ISA inline void pack_rows(const std::uint16_t* from, std::int64_t stride, std::int64_t rows,
                              std::int64_t depth, std::byte* to) {
  for (std::int64_t k = 0; k < depth; k += kStep, to += kTile) {
    __m512 tile[kSide];
    load_rows(tile, from + k, stride, rows, depth - k);
    transpose_16x16(tile);
    store_tile(tile, to);
  }
}

RLK_ISA inline void pack_lines(const std::uint16_t* from, std::int64_t stride, std::int64_t steps,
                               std::int64_t columns, bool turned, std::byte* to, std::int64_t group_bytes) {
  for (std::int64_t s = 0; s < steps; s += kStep) {
    // A line is a page of its own: ask for the next ones early.
    for (std::int64_t i = s + kStep; i < std::min(s + 2 * kStep, steps); ++i)
      for (std::int64_t j = 0; j < columns; j += 32) _mm_prefetch(from + i * stride + j, _MM_HINT_T0);
    for (std::int64_t j = 0; j < up(columns, kWidth); j += kSide) {
      __m512 tile[kSide];
      load_lines(tile, from + s * stride + (j < columns ? j : 0), stride, steps - s, columns - j);
      if (turned) transpose_16x16(tile);
      store_tile(tile, to + j / kSide * group_bytes + s / kStep * kTile);
    }
  }
}

RLK_ISA inline void add(const float* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), _mm512_loadu_ps(from + i)));
}

template <int Meets>
RLK_ISA inline void join(float* const* buffers, int to) {
  const float* chain = buffers[kChain];
  const float* levels[Meets];
  for (int level = 0; level < Meets; ++level) levels[level] = buffers[level];
  float* out = buffers[to];
  for (std::int64_t i = 0; i < kBlock; i += 16) {
    __m512 sum = _mm512_loadu_ps(chain + i);
    for (int level = 0; level < Meets; ++level) sum = _mm512_add_ps(_mm512_loadu_ps(levels[level] + i), sum);
    _mm512_storeu_ps(out + i, sum);
  }
}
RLK_ISA inline void join(float* const* buffers, int meets, int to) {
  if (meets == 1) return join<1>(buffers, to);
  if (meets == 2) return join<2>(buffers, to);
  join<3>(buffers, to);
}

constexpr MatrixUnit kUnit{configure, release, multiply, multiply_alone, pack_rows, pack_lines,
                           turn,      join,    add,      store_sums};

}  // namespace

const MatrixUnit* amx_unit() { return &kUnit; }

#else

const MatrixUnit* amx_unit() { return nullptr; }

#endif

}  // namespace rlk::native
