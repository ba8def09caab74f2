// What stands for Intel's matrix unit on other processors, in loops that the compiler gives the widest vectors there are. Of 32 steps
// of depth the even and the odd are a chain each, from +0; their sum is added to what is there. Every operand and every result below
// 2^-126 is a zero of its sign.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "arithmetic/fma.hpp"
#include "native/lm_head/unit.hpp"

namespace rlk::native {
namespace {

inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline std::uint32_t word_at(const std::byte* from) {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
inline float even_of(std::uint32_t pair) { return flushed(std::bit_cast<float>(pair << 16)); }
inline float odd_of(std::uint32_t pair) { return flushed(std::bit_cast<float>(pair & 0xffff0000u)); }

// One step of a tile: sums[16][16] += 16 rows of 64 bytes by a second operand.
inline void multiply_tile(const std::byte* rows, std::int64_t stride, const std::byte* second, float* sums,
                          std::int64_t pitch) {
  float even[kSide][kSide], odd[kSide][kSide];
  for (std::int64_t pair = 0; pair < kSide; ++pair)
    for (std::int64_t n = 0; n < kSide; ++n) {
      const std::uint32_t word = word_at(second + 64 * pair + 4 * n);
      even[pair][n] = even_of(word), odd[pair][n] = odd_of(word);
    }
  for (std::int64_t m = 0; m < kSide; ++m) {
    float evens[kSide] = {}, odds[kSide] = {};
    for (std::int64_t pair = 0; pair < kSide; ++pair) {
      const std::uint32_t word = word_at(rows + m * stride + 4 * pair);
      const float a = even_of(word), b = odd_of(word);
      for (std::int64_t n = 0; n < kSide; ++n) evens[n] = flushed(simt::fused(a, even[pair][n], evens[n]));
      for (std::int64_t n = 0; n < kSide; ++n) odds[n] = flushed(simt::fused(b, odd[pair][n], odds[n]));
    }
    float* to = sums + m * pitch;
    for (std::int64_t n = 0; n < kSide; ++n) to[n] = flushed(flushed(to[n]) + flushed(evens[n] + odds[n]));
  }
}

inline void multiply(const First& first, const std::byte* second, std::int64_t group_bytes,
                     std::int64_t steps, float* sums, std::int64_t pitch, bool more) {
  for (std::int64_t m = 0; m < kWidth && !more; ++m) std::fill_n(sums + m * pitch, kWidth, 0.0f);
  const auto step = [&](const std::byte* top, const std::byte* below, std::int64_t stride, std::int64_t s) {
    for (std::int64_t group = 0; group < 2; ++group) {
      const std::byte* with = second + group * group_bytes + kTile * s;
      multiply_tile(top, stride, with, sums + group * kSide, pitch);
      multiply_tile(below, stride, with, sums + kSide * pitch + group * kSide, pitch);
    }
  };
  for (std::int64_t s = 0; s < steps; ++s)
    step(first.top + first.step * s, first.below + first.step * s, first.stride, s);
  if (first.tail) step(first.tail, first.tail + kTile, 64, steps);
}

inline void multiply_alone(const First& first, const std::byte* group, std::int64_t steps, float* sums,
                           bool more) {
  if (!more) std::fill_n(sums, 4 * kSide * kSide, 0.0f);
  const auto step = [&](const std::byte* top, std::int64_t stride, std::int64_t s) {
    for (std::int64_t i = 0; i < 4; ++i)
      multiply_tile(top + i * kSide * stride, stride, group + kTile * s, sums + i * kSide * kSide, kSide);
  };
  for (std::int64_t s = 0; s < steps; ++s) step(first.top + first.step * s, first.stride, s);
  if (first.tail) step(first.tail, 64, steps);
}

// A tile of pairs, [i][j] from at(i, j), turned or not.
template <class At>
void put_pairs(std::byte* to, bool turned, At at) {
  for (std::int64_t i = 0; i < kSide; ++i)
    for (std::int64_t j = 0; j < kSide; ++j) {
      const std::uint32_t pair = at(i, j);
      std::memcpy(to + (turned ? 64 * j + 4 * i : 64 * i + 4 * j), &pair, sizeof pair);
    }
}
inline std::uint32_t pair_of(std::uint16_t even, std::uint16_t odd) {
  return std::uint32_t{odd} << 16 | even;
}

inline void pack_rows(const std::uint16_t* from, std::int64_t stride, std::int64_t rows, std::int64_t depth,
                      std::byte* to) {
  for (std::int64_t k = 0; k < depth; k += kStep, to += kTile) {
    const auto at = [&](std::int64_t row, std::int64_t step) {
      return row < rows && k + step < depth ? from[row * stride + k + step] : std::uint16_t{0};
    };
    put_pairs(to, true, [&](std::int64_t row, std::int64_t pair) {
      return pair_of(at(row, 2 * pair), at(row, 2 * pair + 1));
    });
  }
}

inline void pack_lines(const std::uint16_t* from, std::int64_t stride, std::int64_t steps,
                       std::int64_t columns, bool turned, std::byte* to, std::int64_t group_bytes) {
  for (std::int64_t s = 0; s < steps; s += kStep)
    for (std::int64_t group = 0; group < up(columns, kWidth) / kSide; ++group) {
      const auto at = [&](std::int64_t step, std::int64_t column) {
        return step < steps && column < columns ? from[step * stride + column] : std::uint16_t{0};
      };
      put_pairs(to + group * group_bytes + s / kStep * kTile, turned, [&](std::int64_t pair, std::int64_t n) {
        const std::int64_t step = s + 2 * pair, column = group * kSide + n;
        return pair_of(at(step, column), at(step + 1, column));
      });
    }
}

inline void turn(const float* from, std::int64_t stride, float* to, std::int64_t to_stride) {
  for (std::int64_t i = 0; i < kSide; ++i)
    for (std::int64_t j = 0; j < kSide; ++j) to[j * to_stride + i] = from[i * stride + j];
}
inline void join(float* const* buffers, int meets, int to) {
  for (std::int64_t i = 0; i < kBlock; ++i) {
    float sum = buffers[kChain][i];
    for (int level = 0; level < meets; ++level) sum = buffers[level][i] + sum;
    buffers[to][i] = sum;
  }
}
inline void add(const float* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += from[i];
}
inline void store_sums(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols,
                       const float* sums, const void* residual) {
  for (std::int64_t j = 0; j < cols; ++j)
    finish_element(out, p.out_type, j, sums[j], p.bias, p.bias_type, (col + j) * p.bias_stride, residual,
                   p.residual_type, j);
}

constexpr MatrixUnit kReplay{nullptr, nullptr, multiply, multiply_alone, pack_rows, pack_lines,
                             turn,    join,    add,      store_sums};

}  // namespace
}  // namespace rlk::native
