// silu and its gradient for the GPU kernels of short_conv: the bits of conv32 by fewer instructions where that is possible.
// Away from the edges of exp's range and of fp32's none of the special cases of the rule can matter; and of a silu that is
// rounded to bf16, fp32's last bits matter only where it lies close to the middle between two bf16 numbers.
#pragma once

#include "arithmetic/short_conv/conv.hpp"
#include "simt/sigmoid.hpp"

namespace rlk::simt::short_conv {

template <int Count>
struct Numbers {
  float at[Count];
};

template <int Count>
RLK_DEVICE_CALL Numbers<Count> silu_anywhere(Numbers<Count> z) {
  for (int k = 0; k < Count; ++k) z.at[k] = conv32::silu(z.at[k]);
  return z;
}
template <int Count>
RLK_DEVICE_CALL Numbers<Count> d_silu_anywhere(Numbers<Count> d_y, Numbers<Count> z) {
  for (int k = 0; k < Count; ++k) d_y.at[k] = conv32::d_silu(d_y.at[k], z.at[k]);
  return d_y;
}

#if defined(__CUDA_ARCH__)
// d_silu where |z| is at most 64.
__device__ __forceinline__ float d_silu_inside(float d_y, float z) {
  const float e = exp_of_minus(z), s = inverse_of(add_rn(e, 1));
  return mul_rn(mul_rn(d_y, s), fused(z, mul_rn(e, s), 1));
}

// About silu, for z from kLeastAbout on: within kReach units of fp32's last place of the rule's. By the approximations' own bounds and
// roundings, in units of 2^-24: 8 for the product with log2 e, 4 exp2, 1 the sum, 2 the inverse, 1 the product, and 4 of the
// rule's, or 20 of a last place at most; of all z none was farther than 10 on an H100.
inline constexpr std::uint32_t kReach = 20;
__device__ __forceinline__ float about_silu(float z) { return mul_rn(z, about_sigmoid(z)); }
#endif

template <int Count>
RLK_DEVICE_CALL Numbers<Count> silu_of(Numbers<Count> z) {
#if defined(__CUDA_ARCH__)
  bool inside = true;
#  pragma unroll
  for (int k = 0; k < Count; ++k) {
    const float size = fabsf(z.at[k]);
    inside = inside && ((size >= 0x1p-60f && size <= 64.0f) || float_bits(z.at[k]) == 0);
  }
  if (inside) {
#  pragma unroll
    for (int k = 0; k < Count; ++k) z.at[k] = silu_inside(z.at[k]);
    return z;
  }
#endif
  return silu_anywhere(z);
}

// What rounds to the bf16 numbers that the silu of z rounds to.
template <int Count>
__device__ __forceinline__ void silu_for_bf16(Numbers<Count>& z) {
#if defined(__CUDA_ARCH__)
  bool unsure = false;
  Numbers<Count> about;
#  pragma unroll
  for (int k = 0; k < Count; ++k) {
    about.at[k] = about_silu(z.at[k]);
    unsure = unsure || z.at[k] < kLeastAbout || near_middle<kReach>(about.at[k]);
  }
  if (!unsure) {
    z = about;
    return;
  }
#endif
  z = silu_of(z);
}

// d_y becomes the gradient of z.
template <int Count>
__device__ __forceinline__ void d_silu_of(Numbers<Count>& d_y, const Numbers<Count>& z) {
#if defined(__CUDA_ARCH__)
  bool inside = true;
#  pragma unroll
  for (int k = 0; k < Count; ++k) inside = inside && fabsf(z.at[k]) <= 64.0f;
  if (inside) {
#  pragma unroll
    for (int k = 0; k < Count; ++k) d_y.at[k] = d_silu_inside(d_y.at[k], z.at[k]);
    return;
  }
#endif
  d_y = d_silu_anywhere(d_y, z);
}

}  // namespace rlk::simt::short_conv
