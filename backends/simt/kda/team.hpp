// A GPU block as a team for arithmetic/kda/chunk.hpp. Scratch is global memory, which the caches keep close; every step
// is a loop over elements that the block's threads share out, so the order inside an element is the order of
// chunk.hpp.
#pragma once

#include "arithmetic/kda/chunk.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::kda {

using rlk::kda::chunked::Gemm;
using rlk::kda::chunked::Init;
using rlk::kda::chunked::kBlock;
using rlk::kda::chunked::kRows;
using rlk::kda::chunked::Span;

struct BlockTeam {
  using Lane = float;
  static constexpr int kWidth = 1;
  static constexpr int kTall = 4, kWide = 4;  // results per thread of a product

  int thread = int(threadIdx.x), threads = int(blockDim.x);

  static __device__ __forceinline__ float load(const float* p) { return *p; }
  static __device__ __forceinline__ void store(float* p, float x) { *p = x; }
  static __device__ __forceinline__ float unit(int lane) { return lane == 0 ? 1.0f : 0.0f; }

  __device__ void sync() { __syncthreads(); }

  template <class F>
  __device__ void items(int n, F f) {
    for (int i = thread; i < n; i += threads) f(i);
  }
  template <class F>
  __device__ void lanes(int n, F f) {
    items(n, f);
  }
  template <class F>
  __device__ void packs(int n, F f) {
    items(n, [=](int d) { f.template operator()<1>(d); });
  }
  template <class F>
  __device__ void cells(int rows, int n, F f) {
    const int all = rows * n;
    for (int i = thread; i < all; i += threads) f(i / n, i % n);
  }
  template <class F>
  __device__ void grid(int rows, int n, F f) {
    cells(rows, n, f);
  }

  __device__ void transpose(int rows, int cols, const float* from, int ld_from, float* to, int ld_to) {
    cells(rows, cols, [=](int r, int c) { to[c * ld_to + r] = from[r * ld_from + c]; });
  }

  __device__ __attribute__((noinline)) void pairs(int blocks, int width, const float* q, const float* k,
                                                  const float* decay, const float* /*k_turned*/, float* M,
                                                  float* P) {
    cells(blocks * kBlock, kBlock, [=](int i, int column) {
      const int j = i / kBlock * kBlock + column;
      if (j > i) return;
      float m = 0, p = 0;
      for (int d = 0; d < width; d += 4) {
        float4 f = four(k + j * width + d);
        for (int t = j + 1; t <= i; ++t) {
          const float4 e = four(decay + t * width + d);
          f = make_float4(f.x * e.x, f.y * e.y, f.z * e.z, f.w * e.w);
        }
        m = dot(four(k + i * width + d), f, m);
        if (q) p = dot(four(q + i * width + d), f, p);
      }
      M[i * kRows + j] = m;
      if (q) P[i * kRows + j] = p;
    });
  }

  template <Init init, Span span>
  __device__ __attribute__((noinline)) void gemm(const Gemm g) {
    const int across = g.n / kWide, down = (g.m + kTall - 1) / kTall;
    if (2 * across * down <= threads) return thin<init, span>(g);
    for (int t = thread; t < across * down; t += threads)
      tile<init, span>(g, t / across * kTall, t % across * kWide);
  }

 private:
  static __device__ __forceinline__ float4 four(const float* p) {
    return *reinterpret_cast<const float4*>(p);
  }
  static __device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    sum = simt::fused(a.x, b.x, sum);
    sum = simt::fused(a.y, b.y, sum);
    sum = simt::fused(a.z, b.z, sum);
    return simt::fused(a.w, b.w, sum);
  }

  // Few results: one for a thread.
  template <Init init, Span span>
  __device__ void thin(const Gemm& g) {
    for (int t = thread; t < g.m * g.n; t += threads) {
      const int i = t / g.n, j = t % g.n;
      float sum = init == Init::zero ? 0.0f : g.c0[i * g.ldc + j];
      if (init == Init::scale) sum *= g.row_scale[i];
      const int from = span == Span::upper ? i : 0, to = span == Span::lower ? i + 1 : g.k;
#pragma unroll 8
      for (int k = from; k < to; ++k) sum = simt::fused(g.a[i * g.am + k * g.ak], g.b[k * g.ldb + j], sum);
      g.c[i * g.ldc + j] = sum;
    }
  }

  // One k of a tile, for rows first .. last - 1.
  static __device__ __forceinline__ void step(const Gemm& g, const float* a, const float* b, int k, int first,
                                              int last, float (&sum)[kTall][kWide]) {
    const float4 right = four(b + k * g.ldb);
#pragma unroll
    for (int r = 0; r < kTall; ++r) {
      if (r < first || r >= last) continue;
      const float left = a[r * g.am + k * g.ak];
      sum[r][0] = simt::fused(left, right.x, sum[r][0]);
      sum[r][1] = simt::fused(left, right.y, sum[r][1]);
      sum[r][2] = simt::fused(left, right.z, sum[r][2]);
      sum[r][3] = simt::fused(left, right.w, sum[r][3]);
    }
  }

  // k from `from` to `to` for all rows of a full tile: no conditions, so that loads run ahead.
  static __device__ __forceinline__ void steps(const Gemm& g, const float* a, const float* b, int from,
                                               int to, int rows, float (&sum)[kTall][kWide]) {
    if (rows == kTall) {
#pragma unroll 4
      for (int k = from; k < to; ++k) step(g, a, b, k, 0, kTall, sum);
    } else {
      for (int k = from; k < to; ++k) step(g, a, b, k, 0, rows, sum);
    }
  }

  template <Init init, Span span>
  static __device__ void tile(const Gemm& g, int i, int j) {
    float sum[kTall][kWide];
#pragma unroll
    for (int r = 0; r < kTall; ++r) {
#pragma unroll
      for (int c = 0; c < kWide; ++c) {
        sum[r][c] = 0;
        if (init == Init::zero || i + r >= g.m) continue;
        sum[r][c] = g.c0[(i + r) * g.ldc + j + c];
        if (init == Init::scale) sum[r][c] *= g.row_scale[i + r];
      }
    }
    const int rows = g.m - i < kTall ? g.m - i : kTall;
    const float *a = g.a + i * g.am, *b = g.b + j;
    if (span == Span::full) {
      steps(g, a, b, 0, g.k, rows, sum);
    } else if (span == Span::lower) {
      steps(g, a, b, 0, i + 1, rows, sum);
      for (int t = 1; t < rows; ++t) step(g, a, b, i + t, t, rows, sum);
    } else {
      for (int t = 0; t < rows - 1; ++t) step(g, a, b, i + t, 0, t + 1, sum);
      steps(g, a, b, i + rows - 1, g.k, rows, sum);
    }
#pragma unroll
    for (int r = 0; r < kTall; ++r) {
      if (r >= rows) continue;
      *reinterpret_cast<float4*>(g.c + (i + r) * g.ldc + j) =
          make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    }
  }
};

}  // namespace rlk::simt::kda
