#include "onednn/turn.hpp"

#include <algorithm>

#include "onednn/rules.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace rlk::onednn {

#if defined(__x86_64__)
namespace {

[[gnu::target("avx2"), gnu::always_inline]] inline void turn_8x8(const float* from, std::int64_t stride,
                                                                 float* to, std::int64_t pitch) {
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
    _mm256_storeu_ps(to + i * pitch, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * pitch, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

}  // namespace

bool can_turn() { return __builtin_cpu_supports("avx2"); }

[[gnu::target("avx2")]] void turn(const float* rows, std::int64_t stride, std::int64_t depth,
                                  std::int64_t width, float* to) {
  const std::int64_t whole = depth / 8 * 8;
  for (std::int64_t j = 0; j < kPanel; j += 8) {
    const float* from = rows + j * stride;
    float* block = to + j / width * depth * width + j % width;
    for (std::int64_t k = 0; k < whole; k += 8) turn_8x8(from + k, stride, block + k * width, width);
    for (std::int64_t k = whole; k < depth; ++k)
      for (std::int64_t i = 0; i < 8; ++i) block[k * width + i] = from[i * stride + k];
  }
}
#else
bool can_turn() { return false; }
void turn(const float*, std::int64_t, std::int64_t, std::int64_t, float*) {}
#endif

}  // namespace rlk::onednn
