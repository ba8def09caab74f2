// One CPU thread as a team for arithmetic/kda/chunk.hpp: packs of 16, 8 or 4 floats. The width changes no
// bit. Included by the one file per instruction set that is compiled with its flags.
#pragma once

#include "arithmetic/kda/chunk.hpp"

namespace rlk::native::kda {

using rlk::kda::chunked::Gemm;
using rlk::kda::chunked::Init;
using rlk::kda::chunked::kBlock;
using rlk::kda::chunked::kRows;
using rlk::kda::chunked::Span;

template <class L, int Width>
struct CpuTeam {
  using Lane = L;
  static constexpr int kWidth = Width;
  static constexpr int kTileRows = Width == 16 ? 6 : 4, kTilePacks = Width == 16 ? 4 : 2;

  // Scratch is aligned, a caller's state and cache need not be; no vector instruction asks for it.
  static L load(const float* p) {
    L x;
    __builtin_memcpy(&x, p, sizeof(L));
    return x;
  }
  static void store(float* p, L x) { __builtin_memcpy(p, &x, sizeof(L)); }

  static L unit(int lane) {
    alignas(sizeof(L)) float x[Width];
    for (int l = 0; l < Width; ++l) x[l] = l == lane ? 1.0f : 0.0f;
    return load(x);
  }

  void sync() {}

  template <class F>
  void lanes(int n, F f) {
    for (int d = 0; d < n; d += Width) f(d);
  }
  template <class F>
  void packs(int n, F f) {
    constexpr int kMost = 4;  // the accumulators of two sums each fit the registers of AVX2
    int d = 0;
    for (; d + kMost * Width <= n; d += kMost * Width) f.template operator()<kMost>(d);
    for (; d + 2 * Width <= n; d += 2 * Width) f.template operator()<2>(d);
    for (; d < n; d += Width) f.template operator()<1>(d);
  }
  template <class F>
  void grid(int rows, int n, F f) {
    for (int i = 0; i < rows; ++i) {
      for (int d = 0; d < n; d += Width) f(i, d);
    }
  }
  template <class F>
  void items(int n, F f) {
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void cells(int rows, int n, F f) {
    for (int i = 0; i < rows; ++i) {
      for (int d = 0; d < n; ++d) f(i, d);
    }
  }

  void transpose(int rows, int cols, const float* from, int ld_from, float* to, int ld_to) {
    for (int r = 0; r < rows; r += 8) {
      for (int c = 0; c < cols; c += 8) turn8(from + r * ld_from + c, ld_from, to + c * ld_to + r, ld_to);
    }
  }

  void pairs(int blocks, int width, const float* q, const float* k, const float* decay, const float* k_turned,
             float* M, float* P) {
    for (int block = 0; block < blocks; ++block) {
      const int first = block * kBlock, row = first * width, corner = first * kRows + first;
      for (int j = 0; j < kBlock; j += Width) {
        for (int half = j / 8 * 8; half < kBlock; half += 8) {
          const float* turned = k_turned + first + j;
          if (q) {
            pairs_part<true>(width, j, half, q + row, k + row, decay + row, turned, M + corner + j,
                             P + corner + j);
          } else {
            pairs_part<false>(width, j, half, q, k + row, decay + row, turned, M + corner + j,
                              P + corner + j);
          }
        }
      }
    }
  }

  template <Init init, Span span>
  void gemm(const Gemm& g) {
    int j = 0;
    // One row alone has too few sums in a tile to fill the time of an addition.
    if (Width == 16 && g.m == 1)
      for (; j + 8 * Width <= g.n; j += 8 * Width) tile<init, span, 1, 8>(g, 0, j);
    for (; j + kTilePacks * Width <= g.n; j += kTilePacks * Width) panel<init, span, kTilePacks>(g, j);
    for (; j < g.n; j += Width) panel<init, span, 1>(g, j);
  }

 private:
  static void turn8(const float* from, int ld_from, float* to, int ld_to) {
    if constexpr (Width < 8) {
      for (int c = 0; c < 8; ++c)
        for (int r = 0; r < 8; ++r) to[c * ld_to + r] = from[r * ld_from + c];
    } else {
      typedef float Eight __attribute__((vector_size(32)));
      Eight x[8], pairs[8], fours[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) __builtin_memcpy(&x[r], from + r * ld_from, sizeof(Eight));
#pragma GCC unroll 4
      for (int r = 0; r < 8; r += 2) {
        pairs[r] = __builtin_shufflevector(x[r], x[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[r + 1] = __builtin_shufflevector(x[r], x[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
#pragma GCC unroll 2
      for (int r = 0; r < 8; r += 4) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const Eight low = pairs[r + h], high = pairs[r + 2 + h];
          fours[r + 2 * h] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
          fours[r + 2 * h + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const Eight low = __builtin_shufflevector(fours[c], fours[c + 4], 0, 1, 2, 3, 8, 9, 10, 11),
                    high = __builtin_shufflevector(fours[c], fours[c + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        __builtin_memcpy(to + c * ld_to, &low, sizeof(Eight));
        __builtin_memcpy(to + (c + 4) * ld_to, &high, sizeof(Eight));
      }
    }
  }

  // Rows `half` .. `half` + 7 of columns j .. j + Width - 1 of a diagonal block.
  template <bool kWithQ>
  static void pairs_part(int width, int j, int half, const float* q, const float* k, const float* decay,
                         const float* k_turned, float* M, float* P) {
    L m[8], p[8];
    for (int i = 0; i < 8; ++i) m[i] = p[i] = L{};
    for (int d = 0; d < width; ++d) {
      const L fresh = load(k_turned + d * kRows);
      L decayed = L{};
      for (int i = j; i < half; ++i) {
        decayed *= decay[i * width + d];
        decayed = pick(i - j, fresh, decayed);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const int row = half + i;
        decayed *= decay[row * width + d];
        decayed = pick(row - j, fresh, decayed);
        m[i] = simt::fused(L{} + k[row * width + d], decayed, m[i]);
        if constexpr (kWithQ) p[i] = simt::fused(L{} + q[row * width + d], decayed, p[i]);
      }
    }
    for (int i = 0; i < 8; ++i) {
      store(M + (half + i) * kRows, m[i]);
      if constexpr (kWithQ) store(P + (half + i) * kRows, p[i]);
    }
  }

  // `fresh` in lane `lane`, `old` elsewhere.
  static L pick(int lane, L fresh, L old) {
    if constexpr (Width == 1) {
      return lane == 0 ? fresh : old;
    } else {
      typename simt::Bits<L>::type index{};
      for (int l = 0; l < Width; ++l) index[l] = l;
      return index == lane ? fresh : old;
    }
  }

  template <Init init, Span span, int kPacks>
  static void panel(const Gemm& g, int j) {
    int i = 0;
    for (; i + kTileRows <= g.m; i += kTileRows) tile<init, span, kTileRows, kPacks>(g, i, j);
    for (; i + 2 <= g.m; i += 2) tile<init, span, 2, kPacks>(g, i, j);
    for (; i < g.m; ++i) tile<init, span, 1, kPacks>(g, i, j);
  }

  template <Init init, Span span, int kTall, int kPacks>
  static void tile(const Gemm& g, int i, int j) {
    L sum[kTall][kPacks];
#pragma GCC unroll 8
    for (int r = 0; r < kTall; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kPacks; ++c) {
        if constexpr (init == Init::zero) {
          sum[r][c] = L{};
        } else {
          sum[r][c] = load(g.c0 + (i + r) * g.ldc + j + c * Width);
          if constexpr (init == Init::scale) sum[r][c] *= g.row_scale[i + r];
        }
      }
    }
    const float* a = g.a + i * g.am;
    const float* b = g.b + j;
    int from = 0, to = g.k;
    if constexpr (span == Span::upper) {
#pragma GCC unroll 8
      for (int t = 0; t < kTall - 1; ++t) step<0, kTall, kPacks>(g, a, b, i + t, sum, 0, t + 1);
      from = i + kTall - 1;
    }
    if constexpr (span == Span::lower) to = i + 1;
    for (int k = from; k < to; ++k) step<0, kTall, kPacks>(g, a, b, k, sum, 0, kTall);
    if constexpr (span == Span::lower) {
#pragma GCC unroll 8
      for (int t = 1; t < kTall; ++t) step<0, kTall, kPacks>(g, a, b, i + t, sum, t, kTall);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kTall; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kPacks; ++c) store(g.c + (i + r) * g.ldc + j + c * Width, sum[r][c]);
    }
  }

  // One k of rows first .. last - 1 of a tile.
  template <int, int kTall, int kPacks>
  static inline __attribute__((always_inline)) void step(const Gemm& g, const float* a, const float* b, int k,
                                                         L (&sum)[kTall][kPacks], int first, int last) {
    L row[kPacks];
#pragma GCC unroll 8
    for (int c = 0; c < kPacks; ++c) row[c] = load(b + k * g.ldb + c * Width);
#pragma GCC unroll 8
    for (int r = 0; r < kTall; ++r) {
      if (r < first || r >= last) continue;
      const L left = L{} + a[r * g.am + k * g.ak];
#pragma GCC unroll 8
      for (int c = 0; c < kPacks; ++c) sum[r][c] = simt::fused(left, row[c], sum[r][c]);
    }
  }
};

}  // namespace rlk::native::kda
