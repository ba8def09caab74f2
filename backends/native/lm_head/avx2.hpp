// AVX2 pieces that the chain products share. Included by one file per kernel; everything carries its own target attribute.
#pragma once

#include <immintrin.h>

#define RLK_ISA __attribute__((target("avx2,fma,f16c")))
#define RLK_INLINE RLK_ISA __attribute__((always_inline)) static inline

namespace rlk::native {
namespace {

// Eight sums at once in a chain product (chain_kernels.hpp).
struct Lanes8 {
  using Scalar = float;
  using Vec = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kVecs = 2;
  static constexpr int kTile = 8;
  static constexpr int kDirectRows = 0;
  static constexpr int kLaneRows = 0;

  RLK_INLINE Vec zero() { return _mm256_setzero_ps(); }
  RLK_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
  RLK_INLINE Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  RLK_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  RLK_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
};

}  // namespace
}  // namespace rlk::native
