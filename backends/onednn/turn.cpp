#include "onednn/turn.hpp"

#include <algorithm>

#include "onednn/rules.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace rlk::onednn {

#if defined(__x86_64__)
namespace {

// Eight steps of eight rows: out[k] has step k of all rows.
[[gnu::target("avx2"), gnu::always_inline]] inline void turn_8x8(const float* from, std::int64_t stride,
                                                                 __m256 (&out)[8]) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}

// kLanes columns, whose numbers of one step are `pitch` from those of the next.
template <int kLanes>
[[gnu::target("avx2,fma"), gnu::always_inline]] inline void row_times_columns(
    const float* row, const float* columns, std::int64_t depth, std::int64_t pitch, float* sums) {
  __m256 sum[kLanes / 8] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    const __m256 x = _mm256_broadcast_ss(row + k);
    for (int i = 0; i < kLanes / 8; ++i)
      sum[i] = _mm256_fmadd_ps(x, _mm256_loadu_ps(columns + k * pitch + 8 * i), sum[i]);
  }
  for (int i = 0; i < kLanes / 8; ++i) _mm256_storeu_ps(sums + 8 * i, sum[i]);
}

}  // namespace

bool can_turn() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

[[gnu::target("avx2")]] void turn(const float* rows, std::int64_t stride, std::int64_t depth,
                                  std::int64_t width, float* to) {
  const std::int64_t whole = depth / 8 * 8;
  for (std::int64_t j = 0; j < kPanel; j += 8) {
    const float* from = rows + j * stride;
    float* block = to + j / width * depth * width + j % width;
    // What comes next, the next eight rows or these steps' successors, is asked for now: a row gives one short run.
    const float* next = j + 8 < kPanel ? from + 8 * stride : rows + depth;
    for (std::int64_t k = 0; k < whole; k += 8) {
      __m256 steps[8];
      for (int i = k / 8 % 2 * 4, last = i + 4; i < last; ++i)
        __builtin_prefetch(next + i * stride + k / 16 * 16);
      turn_8x8(from + k, stride, steps);
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(block + (k + i) * width, steps[i]);
    }
    for (std::int64_t k = whole; k < depth; ++k)
      for (std::int64_t i = 0; i < 8; ++i) block[k * width + i] = from[i * stride + k];
  }
}

[[gnu::target("avx2,fma")]] void row_times_panel(const float* row, const float* panel, std::int64_t depth,
                                                 std::int64_t width, float* sums) {
  constexpr int kLanes = 64;  // eight chains hide the latency of each
  for (std::int64_t j = 0; j < kPanel; j += std::min<std::int64_t>(width, kLanes)) {
    const float* columns = panel + j / width * depth * width + j % width;
    if (width < kLanes)
      row_times_columns<kLanes / 2>(row, columns, depth, width, sums + j);
    else
      row_times_columns<kLanes>(row, columns, depth, width, sums + j);
  }
}

[[gnu::target("avx2,fma")]] void row_times_rows(const float* row, const float* rows, std::int64_t stride,
                                                std::int64_t depth, float* sums) {
  constexpr int kGroups = kRowColumns / 8;
  const std::int64_t whole = depth / 8 * 8;
  __m256 sum[kGroups] = {}, steps[8];
  for (std::int64_t k = 0; k < whole; k += 8)
    for (int g = 0; g < kGroups; ++g) {
      turn_8x8(rows + 8 * g * stride + k, stride, steps);
      for (int i = 0; i < 8; ++i)
        sum[g] = _mm256_fmadd_ps(_mm256_broadcast_ss(row + k + i), steps[i], sum[g]);
    }
  for (int g = 0; g < kGroups; ++g) _mm256_storeu_ps(sums + 8 * g, sum[g]);
  for (std::int64_t i = 0; i < kRowColumns; ++i)
    for (std::int64_t k = whole; k < depth; ++k)
      sums[i] = __builtin_fmaf(row[k], rows[i * stride + k], sums[i]);
}
#else
bool can_turn() { return false; }
void turn(const float*, std::int64_t, std::int64_t, std::int64_t, float*) {}
void row_times_panel(const float*, const float*, std::int64_t, std::int64_t, float*) {}
void row_times_rows(const float*, const float*, std::int64_t, std::int64_t, float*) {}
#endif

}  // namespace rlk::onednn
