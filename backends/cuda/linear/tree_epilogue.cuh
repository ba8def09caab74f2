// How finished sums of linear's tree kernel wait and leave. A thread holds, of each 8 columns, two neighbours in rows
// `lane / 4` and `lane / 4 + 8` of its warp's 16. The slot is the block's tile in fp32; each warp has its 16 rows of it.
#pragma once

#include "arithmetic/activation.hpp"
#include "cuda/linear/tree.h"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::linear {

// A thread's sums in its warp's part of the slot, in an order that only it knows.
template <int Floats>
class Waiting {
 public:
  __device__ __forceinline__ Waiting(unsigned char* slot, int warp)
      : at_(reinterpret_cast<float4*>(slot + warp * 32 * Floats * 4) + threadIdx.x % 32) {}
  __device__ __forceinline__ void keep(const float (&acc)[Floats]) const {
#pragma unroll
    for (int i = 0; i < Floats / 4; ++i)
      at_[i * 32] = make_float4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]);
  }
  __device__ __forceinline__ void add_to(float (&acc)[Floats]) const {
#pragma unroll
    for (int i = 0; i < Floats / 4; ++i) {
      const float4 left = at_[i * 32];
      acc[i * 4] = __fadd_rn(left.x, acc[i * 4]), acc[i * 4 + 1] = __fadd_rn(left.y, acc[i * 4 + 1]);
      acc[i * 4 + 2] = __fadd_rn(left.z, acc[i * 4 + 2]), acc[i * 4 + 3] = __fadd_rn(left.w, acc[i * 4 + 3]);
    }
  }

 private:
  float4* at_;
};

// The slot as rows of BN sums, four by four; which four lie where changes with the row, so that neither the threads of a
// product's layout nor those of a line meet in a bank.
template <int BN>
struct Slot {
  static constexpr int kFours = BN / 4;
  __device__ static __forceinline__ int offset(int row, int four) {
    return (row * kFours + (four ^ (row & 3) << 1)) * 16;
  }
  // Of a block of eight columns, as a thread has it.
  __device__ static __forceinline__ void put_block(unsigned char* slot, int warp, int block, float4 x) {
    const int lane = static_cast<int>(threadIdx.x) % 32, row = warp * 16 + lane / 4,
              four = 2 * block + lane % 4 / 2;
    unsigned char* const at = slot + lane % 2 * 8;
    *reinterpret_cast<float2*>(at + offset(row, four)) = make_float2(x.x, x.y);
    *reinterpret_cast<float2*>(at + offset(row + 8, four)) = make_float2(x.z, x.w);
  }
  __device__ static __forceinline__ void put(unsigned char* slot, int warp, const float (&acc)[BN / 2]) {
#pragma unroll
    for (int i = 0; i < BN / 8; ++i)
      put_block(slot, warp, i, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
  }
};

// Whether four neighbours of c, the bias and the residual may be loaded and stored at once.
inline bool fours_aligned(const Product& g) {
  const auto even = [](const void* data, std::int64_t ld, Float type) {
    return reinterpret_cast<std::uintptr_t>(data) % (4 * bytes_of(type)) == 0 && ld % 4 == 0;
  };
  return even(g.c, g.m == 1 ? 0 : g.ldc, g.out) && even(g.bias, 0, g.bias_type) &&
         even(g.residual, g.m == 1 ? 0 : g.residual_ld, g.residual_type);
}

// Four neighbours of a row of `data`, the first `count` of which exist; `aligned`: they may be loaded at once.
__device__ __forceinline__ void load_four(float (&to)[4], const void* data, Float type, std::int64_t at,
                                          int count, bool aligned) {
  if (aligned && count == 4) {
    if (type == Float::f32) {
      const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
      const ushort4 x = *reinterpret_cast<const ushort4*>(static_cast<const std::uint16_t*>(data) + at);
      const std::uint16_t raw[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] = lm_head::raw_to_float(raw[e], type);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e] = e < count ? lm_head::load_element(data, type, at + e) : 0.0f;
}

// Four results of a row.
template <class Out>
union Four {
  Out y[4];
  float4 whole;
  ushort4 halves;
};

template <class Out>
__device__ __forceinline__ void store(const Four<Out>& out, const Product& g, bool aligned, std::int64_t row,
                                      std::int64_t column, int count) {
  Out* const to = static_cast<Out*>(g.c) + row * g.ldc + column;
  if (aligned && count == 4) {
    if constexpr (sizeof(Out) == 4)
      __stcs(reinterpret_cast<float4*>(to), out.whole);
    else
      __stcs(reinterpret_cast<ushort4*>(to), out.halves);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (e < count) to[e] = out.y[e];
}

template <class Out>
__device__ __forceinline__ void finish_four(const Product& g, bool aligned, std::int64_t row,
                                            std::int64_t column, const float (&sum)[4], int count) {
  Four<Out> out;
#pragma unroll
  for (int e = 0; e < 4; ++e) out.y[e] = lm_head::round_to<Out>(sum[e]);
  const auto add = [&](const void* data, Float type, std::int64_t at) {
    float more[4];
    load_four(more, data, type, at, count, aligned);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      out.y[e] = lm_head::round_to<Out>(__fadd_rn(lm_head::to_float(out.y[e]), more[e]));
  };
  if (g.bias) add(g.bias, g.bias_type, column);
  if (g.residual) add(g.residual, g.residual_type, row * g.residual_ld + column);
  store(out, g, aligned, row, column, count);
}

// Stores four sums of a row: rounded to the output's type, then bias and residual, each rounded again. The fp32 sum of
// two 16-bit numbers rounded to their type is the correctly rounded sum.
template <class T>
__device__ __forceinline__ void store_four(const Product& g, bool aligned, std::int64_t row,
                                           std::int64_t column, float4 four) {
  if (column >= g.n) return;
  const int count = g.n - column < 4 ? static_cast<int>(g.n - column) : 4;
  const float sum[4] = {four.x, four.y, four.z, four.w};
  if (g.out == Float::f32)
    finish_four<float>(g, aligned, row, column, sum, count);
  else
    finish_four<T>(g, aligned, row, column, sum, count);
}

// swiglu of two numbers that have `Out`'s values: their product is rounded once, or silu before it too.
template <class Out>
__device__ __forceinline__ Out gated_pair(float gate, float up, bool twice) {
  float value = activation::gated<float>(gate, gate);
  if (twice) value = lm_head::to_float(lm_head::round_to<Out>(value));
  return lm_head::round_to<Out>(__fmul_rn(value, up));
}

// swiglu of four columns of a row from `column` on, of sums that are not rounded yet.
template <class Out>
__device__ __forceinline__ void finish_gated(const Product& g, bool aligned, std::int64_t row,
                                             std::int64_t column, const float (&gate)[4],
                                             const float (&up)[4], int count) {
  Four<Out> out;
  const std::int64_t at = column / g.run * g.step + column % g.run;  // four columns lie in one run
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const auto held = [&](float sum, std::int64_t i) {
      Out x = lm_head::round_to<Out>(sum);
      if (g.bias && e < count)
        x = lm_head::round_to<Out>(
            __fadd_rn(lm_head::to_float(x), lm_head::load_element(g.bias, g.bias_type, i + e)));
      return lm_head::to_float(x);
    };
    out.y[e] = gated_pair<Out>(held(gate[e], at), held(up[e], at + g.up), g.twice);
  }
  store(out, g, aligned, row, column, count);
}
template <class T>
__device__ __forceinline__ void store_gated(const Product& g, bool aligned, std::int64_t row,
                                            std::int64_t column, float4 gate, float4 up) {
  if (column >= g.n) return;
  const int count = g.n - column < 4 ? static_cast<int>(g.n - column) : 4;
  const float x[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
  if (g.out == Float::f32)
    finish_gated<float>(g, aligned, row, column, x, u, count);
  else
    finish_gated<T>(g, aligned, row, column, x, u, count);
}

}  // namespace rlk::cuda::linear
