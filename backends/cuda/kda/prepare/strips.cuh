// P and M from strips of 8 tokens: inside a strip by halving, between strips with the decays to and from
// their bounds, by fp16 tensor cores.
#pragma once

#include "cuda/kda/prepare/load.cuh"

namespace rlk::cuda::kda::prepare {

__device__ inline std::uint32_t times_half(std::uint32_t x, std::uint32_t y) {
  const __half2 z = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const std::uint32_t*>(&z);
}

template <class B>
struct Strips {
  static constexpr int K = B::K, N = B::kWords, C = B::kChannels;
  const B& b;
  const Strip<K>& x;
  // Rows of this warp's tiles, to write; of any strip's, to read.
  std::uint32_t upper, lower, upper_row, lower_row;
  float poison = 0.f;  // stays zero while all of M is finite
  int row, column;     // of a product's 16 x 8, and the next column

  __device__ Strips(const B& block, const Strip<K>& strip)
      : b(block),
        x(strip),
        upper(shared_address(b.s.tiles.upper) + b.strip * 32 * K + b.half * 2048 + b.swizzled),
        lower(shared_address(b.s.tiles.lower) + b.strip * 16 * K + b.half * 1024 + b.swizzled),
        upper_row(shared_address(b.s.tiles.upper) + b.lane % 16 * 128 + ((b.lane / 16 ^ b.lane % 8) << 4)),
        lower_row(shared_address(b.s.tiles.lower) + b.lane % 8 * 128 + ((b.lane / 8 ^ b.lane % 8) << 4)),
        row(b.lane / 4),
        column(2 * (b.lane % 4)) {}

  __device__ static void put_plain(std::uint32_t tile, int at, const std::uint32_t (&y)[N]) {
    store_shared((tile ^ at % 8 << 4) + at * 128, y);
  }
  __device__ static void put(std::uint32_t tile, int at, const std::uint32_t (&y)[N],
                             const std::uint32_t (&f)[N]) {
    std::uint32_t z[N];
#pragma unroll
    for (int n = 0; n < N; ++n) z[n] = times_half(y[n], f[n]);
    put_plain(tile, at, z);
  }
  __device__ static void round(std::uint32_t (&y)[N], const float (&f)[C]) {
#pragma unroll
    for (int n = 0; n < N; ++n) y[n] = pack_half(f[2 * n], f[2 * n + 1]);
  }
  // Tokens [from, from + count) as upper ones in rows `at` (q) and `at` + `gap` (k) onwards; as lower ones.
  __device__ void put_upper(int from, int count, int at, int gap) const {
    float f[C];
#pragma unroll
    for (int j = 0; j < count; ++j) {
#pragma unroll
      for (int n = 0; n < C; ++n) f[n] = j == 0 ? x.e[from][n] : f[n] * x.e[from + j][n];
      std::uint32_t y[N];
      round(y, f);
      put(upper, at + j, x.q[from + j], y);
      put(upper, at + gap + j, x.k[from + j], y);
    }
  }
  __device__ void put_lower(int from, int count, int at) const {
    put_plain(lower, at + count - 1, x.k[from + count - 1]);
    float f[C];
#pragma unroll
    for (int j = count - 2; j >= 0; --j) {
#pragma unroll
      for (int n = 0; n < C; ++n) f[n] = j == count - 2 ? x.e[from + j + 1][n] : f[n] * x.e[from + j + 1][n];
      std::uint32_t y[N];
      round(y, f);
      put(lower, at + j, x.k[from + j], y);
    }
  }

  __device__ void load_upper(std::uint32_t (&a)[4], int s, int ks) const {
    ldmatrix(a, (upper_row + s * 32 * K ^ ks % 4 << 5) + ks / 4 * 2048);
  }
  __device__ void load_lower(std::uint32_t (&y)[4], int s, int ks) const {
    ldmatrix(y, (lower_row + s * 16 * K ^ ks % 4 << 5) + ks / 4 * 1024);
  }
  // This warp's upper rows against its lower ones.
  __device__ void multiply(float (&acc)[4]) const {
    float odd[4] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) acc[n] = 0.f;
#pragma unroll
    for (int ks = 0; ks < K / 16; ks += 2) {
      std::uint32_t a[4], y[4];
      load_lower(y, b.strip, ks);
      load_upper(a, b.strip, ks);
      mma_f16(acc, a, y[0], y[1]);
      load_upper(a, b.strip, ks + 1);
      mma_f16(odd, a, y[2], y[3]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) acc[n] += odd[n];
  }
  __device__ float2 unscale_keys(int j) const { return *reinterpret_cast<const float2*>(b.s.unscale[1] + j); }

  // Levels 4 and 2 in one tile: rows 0-3 q and 4-7 k of level 4, 8-11 and 12-15 of level 2, columns likewise.
  __device__ void four_and_two() {
    put_upper(4, 4, 0, 4);
    put_lower(0, 4, 0);
    put_upper(2, 2, 8, 4), put_upper(6, 2, 10, 4);
    put_lower(0, 2, 4), put_lower(4, 2, 6);
    __syncwarp();
    float acc[4];
    multiply(acc);
    const bool two = column >= 4;
    const float y = two ? acc[2] : acc[0], z = two ? acc[3] : acc[1];
    const int u = row % 4, l = column % 4, first = 8 * b.strip;
    if (!two || u / 2 == l / 2) {
      const int i = first + (two ? u / 2 * 4 + 2 + u % 2 : 4 + u), j = first + (two ? l / 2 * 4 : l);
      const float2 back = unscale_keys(j);
      if (row < 4) {
        const float f = b.s.unscale[0][i] * b.p.scale;
        *reinterpret_cast<std::uint32_t*>(b.p_at(i, j)) = pack(y * f * back.x, z * f * back.y);
      } else {
        const float f = b.s.unscale[1][i] * b.s.beta[i], m0 = y * f * back.x, m1 = z * f * back.y;
        *reinterpret_cast<float2*>(b.s.m + i * kPitch + j) = make_float2(m0, m1);
        poison = fmaf(m0, 0.f, poison), poison = fmaf(m1, 0.f, poison);
      }
    }
    __syncwarp();
  }

  // Level 1 and the diagonal: rows 0-3 q and 4-7 k of the odd tokens with their decay, 8-11 q of the even and
  // 12-15 of the odd ones as they are; columns 0-3 k of the even, 4-7 of the odd tokens.
  __device__ void one_and_diagonal() {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      put_upper(2 * j + 1, 1, j, 4);
      put_plain(upper, 8 + j, x.q[2 * j]), put_plain(upper, 12 + j, x.q[2 * j + 1]);
      put_plain(lower, j, x.k[2 * j]), put_plain(lower, 4 + j, x.k[2 * j + 1]);
    }
    __syncwarp();
    float acc[4];
    multiply(acc);
    const int first = 8 * b.strip;
    if (row / 2 == b.lane % 4) {  // the diagonal, columns row and row
      const int i = first + row % 4 * 2 + row / 4;
      const float f = b.s.unscale[0][i] * b.p.scale;
      *reinterpret_cast<bf16*>(b.p_at(i, i)) =
          __float2bfloat16_rn((row % 2 ? acc[3] : acc[2]) * f * b.s.unscale[1][i]);
    }
    const int u = row % 4;
    if (u / 2 == b.lane % 4) {
      const int i = first + 2 * u + 1, j = i - 1;
      const float y = (u % 2 ? acc[1] : acc[0]) * b.s.unscale[1][j];
      if (row < 4) {
        *reinterpret_cast<bf16*>(b.p_at(i, j)) = __float2bfloat16_rn(y * (b.s.unscale[0][i] * b.p.scale));
      } else {
        const float z = y * (b.s.unscale[1][i] * b.s.beta[i]);
        b.s.m[i * kPitch + j] = z;
        poison = fmaf(z, 0.f, poison);
      }
    }
    __syncwarp();
  }

  // The strip as a whole, for the others.
  __device__ void publish() const {
    put_upper(0, 8, 0, 8);
    put_lower(0, 8, 0);
  }

  // Strip `s` against the strips [from, to) before it.
  __device__ void cross(int s, int from, int to) {
    if (from >= to) return;
    std::uint32_t a[K / 16][4];
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) load_upper(a[ks], s, ks);
    const int i = 8 * s + row;
    const float of_q = b.s.unscale[0][i] * b.p.scale, of_k = b.s.unscale[1][i] * b.s.beta[i];
    for (int t = from; t < to; ++t) {
      std::uint32_t f[K / 16][2];
      if (s > t + 1) {
        const char* between = b.s.between[pair_index(s, t)][b.lane % 4];
#pragma unroll
        for (int ks = 0; ks < K / 16; ks += 2) {
          const uint4 y = *reinterpret_cast<const uint4*>(between + 8 * ks);
          f[ks][0] = y.x, f[ks][1] = y.y, f[ks + 1][0] = y.z, f[ks + 1][1] = y.w;
        }
      } else {
#pragma unroll
        for (int ks = 0; ks < K / 16; ++ks) f[ks][0] = f[ks][1] = 0x3c003c00u;
      }
      float acc[4] = {}, odd[4] = {};
#pragma unroll
      for (int ks = 0; ks < K / 16; ks += 2) {
        std::uint32_t y[4];
        load_lower(y, t, ks);
        mma_f16(acc, a[ks], times_half(y[0], f[ks][0]), times_half(y[1], f[ks][1]));
        mma_f16(odd, a[ks + 1], times_half(y[2], f[ks + 1][0]), times_half(y[3], f[ks + 1][1]));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) acc[n] += odd[n];
      const int j = 8 * t + column;
      const float2 back = unscale_keys(j);
      *reinterpret_cast<std::uint32_t*>(b.p_at(i, j)) = pack(acc[0] * of_q * back.x, acc[1] * of_q * back.y);
      const float y = acc[2] * of_k * back.x, z = acc[3] * of_k * back.y;
      *reinterpret_cast<float2*>(b.s.m + i * kPitch + j) = make_float2(y, z);
      poison = fmaf(y, 0.f, poison), poison = fmaf(z, 0.f, poison);
    }
  }
};

}  // namespace rlk::cuda::kda::prepare
