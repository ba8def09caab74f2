// A = (I + M)^-1 of a chunk, in shared memory: 16 x 16 blocks by substitution in fp32, the rest by products
// on the FP64 tensor cores.
#pragma once

#include "cuda/kda/prepare/block.cuh"

namespace rlk::cuda::kda::prepare {

// The left operand of a product on the FP64 tensor cores: 16 x 16 of an fp32 matrix in memory. The unit's
// step `i` of lane `t` stands for the sum's index order(i, t), so that a result can be the next product's
// operand.
struct Wide {
  double x[8];

  __device__ static int order(int i, int t) { return 8 * (i / 2) + 2 * t + i % 2; }
  __device__ explicit Wide(const float* from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 y =
            *reinterpret_cast<const float2*>(from + (lane / 4 + 8 * r) * kPitch + 8 * m + 2 * (lane % 4));
        x[4 * m + r] = y.x, x[4 * m + 2 + r] = y.y;
      }
    }
  }
  // The results of two products, 8 columns each.
  __device__ Wide(const double (&left)[4], const double (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i / 2 + 2 * (i % 2)] = left[i];
      x[4 + i / 2 + 2 * (i % 2)] = right[i];
    }
  }
  // acc += this * from[16 x 8]
  template <class T>
  __device__ void times(double (&acc)[4], const T* from, int pitch) const {
    const int lane = threadIdx.x % 32;
    double b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = from[order(i, lane % 4) * pitch + lane / 4];
    mma_f64(acc, x, b);
  }
};

// A = (I + M)^-1 for unit lower triangular I + M: 16 x 16 blocks by substitution in fp32, then what is below
// them as A_21 = -A_22 M_21 A_11 for halves of 32 and of 64, on the FP64 tensor cores. M must be finite:
// there are products with the zeros above the diagonal.
//
// The two diagonal blocks of 32, by two warps.
__device__ inline void invert_halves(const float* m, float* a) {
  const int tid = threadIdx.x, lane = tid % 32, half = tid / 32;
  {
    const int block = tid / 16, column = tid % 16;
    const float* mb = m + 16 * block * (kPitch + 1);
    float* ab = a + 16 * block * (kPitch + 1) + column;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int l = 0; l < 16; l += 4) {
      float4 y[16];
#pragma unroll
      for (int i = l + 1; i < 16; ++i) y[i] = *reinterpret_cast<const float4*>(mb + i * kPitch + l);
#pragma unroll
      for (int i = l + 1; i < 16; ++i) x[i] = fmaf(-y[i].x, x[l], x[i]);
#pragma unroll
      for (int i = l + 2; i < 16; ++i) x[i] = fmaf(-y[i].y, x[l + 1], x[i]);
#pragma unroll
      for (int i = l + 3; i < 16; ++i) x[i] = fmaf(-y[i].z, x[l + 2], x[i]);
#pragma unroll
      for (int i = l + 4; i < 16; ++i) x[i] = fmaf(-y[i].w, x[l + 3], x[i]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) ab[i * kPitch] = x[i];
  }
  __syncwarp();
  const int corner = 32 * half * (kPitch + 1), below = corner + 16 * kPitch;
  const Wide inverse(a + below + 16);
  double c[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) inverse.times(c[n], m + below + 8 * n, kPitch);
  const Wide product(c[0], c[1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    double x[4] = {};
    product.times(x, a + corner + 8 * n, kPitch);
    float* to = a + below + lane / 4 * kPitch + 8 * n + 2 * (lane % 4);
    *reinterpret_cast<float2*>(to) = make_float2(static_cast<float>(-x[0]), static_cast<float>(-x[1]));
    *reinterpret_cast<float2*>(to + 8 * kPitch) =
        make_float2(static_cast<float>(-x[2]), static_cast<float>(-x[3]));
  }
}

// The block of 32 below them, by eight warps, 16 x 8 each: first t = M_21 A_11.
__device__ inline void multiply_below(const float* m, const float* a, double* t) {
  const int lane = threadIdx.x % 32, block = threadIdx.x / 128, n = threadIdx.x / 32 % 4;
  const float* from = m + (32 + 16 * block) * kPitch;
  double x[4] = {};
  if (n < 2) Wide(from).times(x, a + 8 * n, kPitch);
  Wide(from + 16).times(x, a + 16 * kPitch + 8 * n, kPitch);
  double* to = t + (16 * block + lane / 4) * kWidePitch + 8 * n + 2 * (lane % 4);
  *reinterpret_cast<double2*>(to) = make_double2(x[0], x[1]);
  *reinterpret_cast<double2*>(to + 8 * kWidePitch) = make_double2(x[2], x[3]);
}
// Then A_21 = -A_22 t: rows lane / 4 and that + 8, columns 2 (lane % 4) and its neighbour.
__device__ inline void finish_below(const float* a, const double* t, double (&x)[4]) {
  const int block = threadIdx.x / 128, n = threadIdx.x / 32 % 4;
  const float* from = a + (32 + 16 * block) * kPitch + 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = 0;
  Wide(from).times(x, t + 8 * n, kWidePitch);
  if (block == 1) Wide(from + 16).times(x, t + 16 * kWidePitch + 8 * n, kWidePitch);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = -x[i];
}

}  // namespace rlk::cuda::kda::prepare
