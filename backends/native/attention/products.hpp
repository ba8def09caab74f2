// C += A B by one ascending fma chain per element: what scores and weighted values both are.
#pragma once

#include "native/rows.hpp"

namespace rlk::native::attn {

template <class L, int W>
class Products {
  using Row = native::Row<L, W>;
  // Vectors of C across and rows of C down that stay in registers, beside a row of B.
  static constexpr int kAcross = W == 16 ? 4 : 2, kDown = 6;

  template <int R, int V>
  static void tile(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                   std::int64_t ldc, std::int64_t depth) {
    L sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = Row::load(c + r * ldc + v * W);
    for (std::int64_t k = 0; k < depth; ++k) {
      L across[V];
      for (int v = 0; v < V; ++v) across[v] = Row::load(b + k * ldb + v * W);
      for (int r = 0; r < R; ++r) {
        const L left = L{} + a[r * lda + k];
        for (int v = 0; v < V; ++v) sum[r][v] = simt::fused(left, across[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) Row::store(c + r * ldc + v * W, sum[r][v]);
  }

  template <int R>
  static void rows(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                   std::int64_t ldc, std::int64_t depth, std::int64_t columns) {
    std::int64_t j = 0;
    for (; j + kAcross * W <= columns; j += kAcross * W)
      tile<R, kAcross>(a, lda, b + j, ldb, c + j, ldc, depth);
    for (; j < columns; j += W) tile<R, 1>(a, lda, b + j, ldb, c + j, ldc, depth);
  }

 public:
  // A [count, depth], B [depth, columns], C [count, columns]; columns a multiple of 16.
  static void add(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                  std::int64_t ldc, std::int64_t count, std::int64_t depth, std::int64_t columns) {
    std::int64_t r = 0;
    for (; r + kDown <= count; r += kDown)
      rows<kDown>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, columns);
    for (; r + 2 <= count; r += 2) rows<2>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, columns);
    for (; r < count; ++r) rows<1>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, columns);
  }
};

}  // namespace rlk::native::attn
