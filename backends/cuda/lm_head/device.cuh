// Device helpers shared by the lm_head kernels: exact upcasts, the roundings to the output type, staged tile
// loads, a launch with much shared memory. NaN results are stored as the all-ones pattern of the positive NaN
// (0x7fffffff, 0x7fff), which is what the tensor core itself produces, so that a NaN has one bit pattern in every
// arithmetic.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/hopper/copy.cuh"
#include "cuda/lm_head/gemm.h"

namespace rlk::cuda::lm_head {

using namespace hopper;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class Out>
__device__ __forceinline__ Out round_to(float x);
template <>
__device__ __forceinline__ float round_to<float>(float x) {
  return x != x ? __int_as_float(0x7fffffff) : x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 round_to<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half round_to<__half>(float x) {
  return __float2half_rn(x);
}

// Two results rounded and packed in one instruction, the first in the low half.
template <class Out>
__device__ __forceinline__ std::uint32_t round_pair(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<Out, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// fp64 to fp32 with the sticky bit kept in the last place (round to odd): a following rounding to 16 bits
// then equals one rounding from fp64. Rounding twice to nearest would not.
__device__ __forceinline__ float round_to_odd(double x) {
  float truncated = __double2float_rz(x);
  if (x == x && static_cast<double>(truncated) != x)
    truncated = __int_as_float(__float_as_int(truncated) | 1);
  return truncated;
}

template <class Out>
__device__ __forceinline__ Out round_to(double x) {
  return round_to<Out>(round_to_odd(x));
}
template <>
__device__ __forceinline__ float round_to<float>(double x) {
  return round_to<float>(__double2float_rn(x));
}

// The dtypes of operands and results are values, not template arguments, wherever a branch all threads agree
// on costs nothing: a kernel per combination would be forty of each.

__device__ __forceinline__ float load_element(const void* data, Float t, std::int64_t i) {
  switch (t) {
    case Float::f32:
      return static_cast<const float*>(data)[i];
    case Float::bf16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    default:
      return to_float(static_cast<const __half*>(data)[i]);
  }
}

// The raw bits of an element, exactly upcast. `type` tells the two 16-bit formats apart.
__device__ __forceinline__ float raw_to_float(float x, Float) { return x; }
__device__ __forceinline__ float raw_to_float(std::uint16_t x, Float type) {
  return type == Float::bf16 ? __uint_as_float(std::uint32_t{x} << 16) : __half2float(__ushort_as_half(x));
}

// Stores one finished product: rounded to the output type, then the bias added and rounded again. The fp32
// sum of two 16-bit numbers rounded to their type is the correctly rounded sum: 24 >= 2*11+2 bits.
template <class Out, class Acc>
__device__ __forceinline__ void store_rounded(const Gemm& p, std::int64_t row, std::int64_t column, Acc acc) {
  Out y = round_to<Out>(acc);
  if (p.bias) y = round_to<Out>(__fadd_rn(to_float(y), load_element(p.bias, p.b.type, column)));
  static_cast<Out*>(p.c)[row * p.ldc + column] = y;
}
template <class Acc>
__device__ __forceinline__ void store_product(const Gemm& p, std::int64_t row, std::int64_t column, Acc acc) {
  if (row >= p.m || column >= p.n) return;
  switch (p.out) {
    case Float::f32:
      return store_rounded<float>(p, row, column, acc);
    case Float::bf16:
      return store_rounded<__nv_bfloat16>(p, row, column, acc);
    default:
      return store_rounded<__half>(p, row, column, acc);
  }
}

// A tile of R rows by K elements of k in shared memory, kept in the operand's own order so that 16-byte
// copies work; the 16 bytes of padding per line make the fragment reads of the tensor-core kernels free of
// bank conflicts.
template <class T, int R, int K, bool KContiguous>
struct Tile {
  static constexpr int kLine = KContiguous ? K : R;
  static constexpr int kLines = KContiguous ? R : K;
  static constexpr int kStride = kLine + 16 / static_cast<int>(sizeof(T));
  static constexpr int kElements = kLines * kStride;

  __device__ static int index(int row, int k) { return KContiguous ? row * kStride + k : k * kStride + row; }

  // Rows past `rows` and k past `depth` become zeros: they change no sum of any arithmetic that uses this
  // loader.
  template <int Threads>
  __device__ static void load(T* to, const Operand& from, bool vector, std::int64_t row0, std::int64_t rows,
                              std::int64_t k0, std::int64_t depth) {
    if (vector)
      load_by<Threads, true>(to, from, row0, rows, k0, depth);
    else
      load_by<Threads, false>(to, from, row0, rows, k0, depth);
  }

 private:
  template <int Threads, bool Vector>
  __device__ static void load_by(T* to, const Operand& from, std::int64_t row0, std::int64_t rows,
                                 std::int64_t k0, std::int64_t depth) {
    const T* data = static_cast<const T*>(from.data);
    const std::int64_t line0 = KContiguous ? row0 : k0, lines = KContiguous ? rows : depth;
    const std::int64_t at0 = KContiguous ? k0 : row0, ats = KContiguous ? depth : rows;
    constexpr int kVec = Vector ? 16 / static_cast<int>(sizeof(T)) : 1;
    constexpr int kPerLine = kLine / kVec;
#pragma unroll(Vector ? 8 : 1)
    for (int i = threadIdx.x; i < kLines * kPerLine; i += Threads) {
      const int line = i / kPerLine, at = (i % kPerLine) * kVec;
      const std::int64_t left = line0 + line < lines ? ats - (at0 + at) : 0;
      T* target = to + line * kStride + at;
      const T* source = data + (line0 + line) * from.ld + at0 + at;
      if constexpr (Vector) {
        const int valid = left >= kVec ? 16 : left > 0 ? static_cast<int>(left * sizeof(T)) : 0;
        copy16(target, valid ? source : data, valid);
      } else {
        *target = left > 0 ? *source : T(0.0f);
      }
    }
  }
};

// Consecutive blocks walk up a band of at most `tall` row tiles before moving on along n, so that a band's
// rows and one weight tile are reused from L2 by the blocks that run together.
struct TilePosition {
  std::int64_t m, n;
};
__device__ __forceinline__ TilePosition place(std::int64_t block, std::int64_t tiles_m, std::int64_t tiles_n,
                                              int tall = 16) {
  // Fewer than 2^31: so many tiles of 64 x 64 fill no memory. Divisions of 64 bits take longer than a copy.
  const auto at = static_cast<unsigned>(block), across = static_cast<unsigned>(tiles_n) * tall,
             band = at / across, first = band * tall, left = static_cast<unsigned>(tiles_m) - first,
             height = left < static_cast<unsigned>(tall) ? left : tall, inside = at - band * across,
             n = inside / height;
  return {first + (inside - n * height), n};
}

// Calls f with a value of the C++ type that `t` names.
template <class F>
auto with_float_type(Float t, F&& f) {
  switch (t) {
    case Float::f32:
      return f(float{});
    case Float::bf16:
      return f(__nv_bfloat16{});
    default:
      return f(__half{});
  }
}

// Launches a kernel that takes more dynamic shared memory than one gets unasked: `bytes`, the same for every launch, for the
// attribute is the kernel's, and another thread may be between setting it and its launch.
template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, int bytes,
                   cudaStream_t stream, const std::type_identity_t<Parameters>&... arguments) {
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      e != cudaSuccess)
    return e;
  kernel<<<blocks, threads, static_cast<std::size_t>(bytes), stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace rlk::cuda::lm_head
