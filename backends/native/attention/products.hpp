// C += A B by one ascending fma chain per element: what scores and weighted values both are.
#pragma once

#include <bit>
#include <utility>

#include "native/rows.hpp"

namespace rlk::native::attention {

// W rows of W floats become columns: neighbouring blocks of 1, 2, 4 and so on change places.
template <class L, int W>
void turn_block(const float* from, std::int64_t step, float* to, std::int64_t to_step) {
  L x[W];
  for (int i = 0; i < W; ++i) x[i] = native::Row<L, W>::load(from + i * step);
  if constexpr (W > 1) {
    const auto swap = [&x]<int Block, int... Lane>(std::integer_sequence<int, Lane...>) {
      for (int i = 0; i < W; ++i) {
        if (i & Block) continue;
        const L a = x[i], b = x[i + Block];
        x[i] = __builtin_shufflevector(a, b, (Lane & Block ? W + Lane - Block : Lane)...);
        x[i + Block] = __builtin_shufflevector(a, b, (Lane & Block ? W + Lane : Lane + Block)...);
      }
    };
    [&]<int... Log>(std::integer_sequence<int, Log...>) {
      (swap.template operator()<1 << Log>(std::make_integer_sequence<int, W>()), ...);
    }(std::make_integer_sequence<int, std::bit_width(unsigned{W}) - 1>());
  }
  for (int i = 0; i < W; ++i) native::Row<L, W>::store(to + i * to_step, x[i]);
}
// `rows` rows of `width` floats likewise, both multiples of W.
template <class L, int W>
void turn(const float* from, std::int64_t rows, std::int64_t width, float* to, std::int64_t to_step) {
  for (std::int64_t d = 0; d < width; d += W)
    for (std::int64_t i = 0; i < rows; i += W)
      turn_block<L, W>(from + i * width + d, width, to + d * to_step + i, to_step);
}

template <class L, int W>
class Products {
  using Row = native::Row<L, W>;
  // Vectors of C across and rows of C down that stay in registers, beside a row of B.
  static constexpr int kAcross = W == 16 ? 4 : 2, kDown = 6;

  // Element (r, k) of A; of a turned one that lies as [depth, count].
  template <bool Turned>
  static float element(const float* a, std::int64_t lda, std::int64_t r, std::int64_t k) {
    return Turned ? a[k * lda + r] : a[r * lda + k];
  }

  template <bool Turned, int R, int V>
  static void tile(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                   std::int64_t ldc, std::int64_t depth) {
    L sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = Row::load(c + r * ldc + v * W);
    for (std::int64_t k = 0; k < depth; ++k) {
      L across[V];
      for (int v = 0; v < V; ++v) across[v] = Row::load(b + k * ldb + v * W);
      for (int r = 0; r < R; ++r) {
        const L left = L{} + element<Turned>(a, lda, r, k);
        for (int v = 0; v < V; ++v) sum[r][v] = simt::fused(left, across[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) Row::store(c + r * ldc + v * W, sum[r][v]);
  }

  template <bool Turned, int R>
  static void rows(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                   std::int64_t ldc, std::int64_t depth, std::int64_t columns) {
    std::int64_t j = 0;
    for (; j + kAcross * W <= columns; j += kAcross * W)
      tile<Turned, R, kAcross>(a, lda, b + j, ldb, c + j, ldc, depth);
    for (; j + 2 * W <= columns; j += 2 * W) tile<Turned, R, 2>(a, lda, b + j, ldb, c + j, ldc, depth);
    for (; j < columns; j += W) tile<Turned, R, 1>(a, lda, b + j, ldb, c + j, ldc, depth);
  }

 public:
  // A [count, depth], B [depth, columns], C [count, columns]; columns a multiple of 16.
  template <bool Turned = false>
  static void add(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                  std::int64_t ldc, std::int64_t count, std::int64_t depth, std::int64_t columns) {
    const auto from = [=](std::int64_t r) { return a + (Turned ? r : r * lda); };
    std::int64_t r = 0;
    for (; r + kDown <= count; r += kDown)
      rows<Turned, kDown>(from(r), lda, b, ldb, c + r * ldc, ldc, depth, columns);
    for (; r + 2 <= count; r += 2) rows<Turned, 2>(from(r), lda, b, ldb, c + r * ldc, ldc, depth, columns);
    for (; r < count; ++r) rows<Turned, 1>(from(r), lda, b, ldb, c + r * ldc, ldc, depth, columns);
  }
};

}  // namespace rlk::native::attention
