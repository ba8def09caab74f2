// fp8 keys and values as bf16 or fp16: the product with a factor in fp32, rounded.
#pragma once

#include "cuda/attention/block.cuh"
#include "cuda/attention/exponential.cuh"

namespace rlk::cuda::attention {

// Two of them, in the lower bytes' order.
template <class T>
__device__ __forceinline__ std::uint32_t widen_two(std::uint16_t pair, float factor) {
  float low, high;
  asm("{.reg .b16 low, high;\n"
      ".reg .b32 both;\n"
      "cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mov.b32 {low, high}, both;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;}"
      : "=f"(low), "=f"(high)
      : "h"(pair));
  return pack<T>(__fmul_rn(low, factor), __fmul_rn(high, factor));
}
template <class T>
__device__ __forceinline__ void widen_four(std::uint32_t x, float factor, std::uint32_t& first,
                                           std::uint32_t& second) {
  first = widen_two<T>(static_cast<std::uint16_t>(x), factor);
  second = widen_two<T>(static_cast<std::uint16_t>(x >> 16), factor);
}

// A tile of the general kernel, where threads bring it: rows that are not there, and channels behind the last, are zeros.
template <class T, int Width>
__device__ __forceinline__ void widen_tile(unsigned char* to, const unsigned char* const* places, int width,
                                           float factor) {
  constexpr int kPieces = Width / 16, kAhead = 4;
  static_assert(kPieces % kAhead == 0);
  const int t = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
  for (int i = 0; i < kPieces; i += kAhead) {
    uint4 x[kAhead];
    bool there[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = t + (i + n) * 128, piece = at % kPieces;
      const unsigned char* const from = places[at / kPieces];
      there[n] = from != nullptr && piece * 16 < width;
      if (there[n]) x[n] = *reinterpret_cast<const uint4*>(from + piece * 16);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = t + (i + n) * 128, row = at / kPieces, piece = at % kPieces;
      uint4 low = make_uint4(0, 0, 0, 0), high = low;
      if (there[n]) {
        widen_four<T>(x[n].x, factor, low.x, low.y), widen_four<T>(x[n].y, factor, low.z, low.w);
        widen_four<T>(x[n].z, factor, high.x, high.y), widen_four<T>(x[n].w, factor, high.z, high.w);
      }
      *reinterpret_cast<uint4*>(to + swizzled(kTile, row, 2 * piece)) = low;
      *reinterpret_cast<uint4*>(to + swizzled(kTile, row, 2 * piece + 1)) = high;
    }
  }
}

}  // namespace rlk::cuda::attention
