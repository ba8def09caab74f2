// What a portable kernel includes: plain HIP plus the few things that HIP, CUDA and host fibers spell
// differently.
//
// A kernel in this folder is written once, in HIP, and run by three executors that differ only in the include
// path of <hip/hip_runtime.h>: real HIP (AMD GPUs), nvcc/ (NVIDIA GPUs), fiber/ (one fiber per GPU thread, in
// the tests). Rules:
//
//   - template on the wave size; never read warpSize on the host
//   - every thread of a block reaches every __syncthreads, every lane of a wave every shuffle
//   - parenthesise a kernel name that contains a comma:
//     hipLaunchKernelGGL((my_kernel<float, 32>), dim3(blocks), dim3(threads), shared_bytes, stream, args...);
#pragma once

#include <hip/hip_runtime.h>

#include "arithmetic/half.hpp"

#if defined(RLK_FIBER)
#  define RLK_DEVICE_CALL inline __attribute__((noinline))
#else
#  define RLK_DEVICE_CALL inline __device__ __noinline__
#endif

namespace rlk::simt {

// The block's dynamic shared memory, 16-byte aligned.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#if defined(RLK_FIBER)
  return static_cast<T*>(::rlk_fiber::dynamic_shared());
#else
  extern __shared__ uint4 rlk_dynamic_shared[];
  return reinterpret_cast<T*>(rlk_dynamic_shared);
#endif
}

// Orders shared-memory accesses among the lanes of one wave, without a block barrier.
__device__ __forceinline__ void wave_sync() {
#if defined(RLK_FIBER)
  ::rlk_fiber::wave_barrier();
#elif defined(__CUDA_ARCH__)
  __syncwarp();
#elif defined(__HIP_DEVICE_COMPILE__)
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
#endif
}

// Sum over aligned groups of Width lanes by a butterfly; every lane gets it. The order is fixed by Width
// alone, so the bits do not depend on the wave size.
template <int Width>
__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
  for (int step = 1; step < Width; step *= 2) v += __shfl_xor(v, step, Width);
  return v;
}

// Explicitly rounded operations: no compiler flag can contract them.
__device__ __forceinline__ float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__device__ __forceinline__ float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// log2 to a few units of 2^-20, for an estimate: not the same bits everywhere.
__device__ __forceinline__ float rough_log2(float x) {
#if defined(RLK_FIBER)
  return __builtin_log2f(x);
#else
  return __log2f(x);
#endif
}

}  // namespace rlk::simt
