// A warp's tensor-core products (mma.sync) and what brings their fragments to and from shared memory.
// Fragments lie as the PTX manual draws them: of C, a lane holds rows lane / 4 and that + 8, columns 2 (lane
// % 4) and the next.
#pragma once

#include "cuda/hopper/shared.cuh"

namespace rlk::cuda::hopper {

// Four 8 x 8 matrices of 16 bits, a line's address from each lane.
template <class Place>
__device__ __forceinline__ void ldmatrix(std::uint32_t (&r)[4], Place from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from))
               : "memory");
}
template <class Place>
__device__ __forceinline__ void ldmatrix_transposed(std::uint32_t (&r)[4], Place from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from))
               : "memory");
}
template <class Place>
__device__ __forceinline__ void stmatrix(Place to, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(to)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
template <class Place>
__device__ __forceinline__ void stmatrix_transposed(Place to, const std::uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(to)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
// Transposes an 8 x 8 matrix of 16 bits in registers.
__device__ __forceinline__ std::uint32_t movmatrix(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// C += A[16 x 16] B[16 x 8], 16-bit operands; of tf32 A[16 x 8] B[8 x 8].
__device__ __forceinline__ void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                        std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_tf32(float* c, const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The FP64 tensor core, m16n8k16: an ascending FMA chain bit for bit.
__device__ __forceinline__ void mma_f64(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
      "{%12,%13,%14,%15}, "
      "{%0,%1,%2,%3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
        "d"(b[1]), "d"(b[2]), "d"(b[3]));
}
// Four of k, m16n8k4: the same chain.
__device__ __forceinline__ void mma_f64(double (&c)[4], double low, double high, double b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
               : "d"(low), "d"(high), "d"(b));
}

// Of four lanes' words the k-th of lane t becomes the t-th of lane k.
__device__ __forceinline__ void turn_four(std::uint32_t (&w)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & step) continue;
      const bool odd = lane & step;
      const std::uint32_t got = __shfl_xor_sync(~0u, odd ? w[k] : w[k + step], step);
      w[k] = odd ? got : w[k], w[k + step] = odd ? w[k + step] : got;
    }
}

}  // namespace rlk::cuda::hopper
