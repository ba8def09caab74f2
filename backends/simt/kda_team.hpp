// A GPU block as a team for kda_chunk.hpp. Scratch is global memory, which the caches keep close; every step
// is a loop over elements that the block's threads share out, so the order inside an element is the order of
// kda_chunk.hpp.
#pragma once

#include "kda_chunk.hpp"
#include "simt.hpp"

namespace rlk::kda::chunked {

struct BlockTeam {
  using Lane = float;
  static constexpr int kWidth = 1;
  static constexpr int kTall = 8, kWide = 4;  // results per thread of a product

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

  __device__ __attribute__((noinline)) void pairs(int width, const float* q, const float* k,
                                                  const float* decay, const float* /*k_turned*/, float* M,
                                                  float* P) {
    cells(kBlock, kBlock, [=](int i, int j) {
      if (j > i) return;
      float m = 0, p = 0;
      for (int d = 0; d < width; ++d) {
        float decayed = k[j * width + d];
        for (int t = j + 1; t <= i; ++t) decayed *= decay[t * width + d];
        m = simt::fused(k[i * width + d], decayed, m);
        if (q) p = simt::fused(q[i * width + d], decayed, p);
      }
      M[i * kRows + j] = m;
      if (q) P[i * kRows + j] = p;
    });
  }

  template <Init init, Span span>
  __device__ __attribute__((noinline)) void gemm(const Gemm g) {
    const int across = g.n / kWide, down = (g.m + kTall - 1) / kTall;
    for (int t = thread; t < across * down; t += threads)
      tile<init, span>(g, t / across * kTall, t % across * kWide);
  }

 private:
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
    const int from = span == Span::upper ? i : 0;
    const int to = span == Span::lower && i + kTall < g.k ? i + kTall : g.k;
    const int rows = g.m - i < kTall ? g.m - i : kTall;
    for (int k = from; k < to; ++k) {
      const float4 b = *reinterpret_cast<const float4*>(g.b + k * g.ldb + j);
      const float* a = g.a + i * g.am + k * g.ak;
#pragma unroll
      for (int r = 0; r < kTall; ++r) {
        if (r >= rows) continue;
        if (span == Span::lower && k > i + r) continue;
        if (span == Span::upper && k < i + r) continue;
        const float left = a[r * g.am];
        sum[r][0] = simt::fused(left, b.x, sum[r][0]);
        sum[r][1] = simt::fused(left, b.y, sum[r][1]);
        sum[r][2] = simt::fused(left, b.z, sum[r][2]);
        sum[r][3] = simt::fused(left, b.w, sum[r][3]);
      }
    }
#pragma unroll
    for (int r = 0; r < kTall; ++r) {
      if (r >= rows) continue;
      *reinterpret_cast<float4*>(g.c + (i + r) * g.ldc + j) =
          make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    }
  }
};

}  // namespace rlk::kda::chunked
