// swiglu by silu of bf16 in rows of whole packs at one stride, which is what models have. A thread has some packs, 16 bytes of
// each tensor, of all rows in one line, and asks for them before it computes.
//
// On NVIDIA GPUs what is rounded to bf16 comes from the special function units' 2^x and 1 / x, with a bound on how far the rule's
// number may be away, in units of 2^-24; where the bound holds a middle between two bf16 numbers, the element is computed by the
// rule. The units' own bounds are 4 and 2 (NVIDIA's documents; in fact they are better), so for |g| <= kMost
//
//     e = exp(-g)      6.2 + 1.23 |g|: the product with log2 e, 2^x, and what the rule's own exp is off; less than 15 at kMost
//     s = 1 / (1 + e)  (1 - s) of e's and 5;  e s: s of e's and 7
//     act = g s        23 with its product with d_out or up
//     f = 1 + g e s    |f| 2 and |g e s| of that of e s; d_gate = d_out up s f is within 5 (g g + 5) of d_out up s.
//
// A gate so small that g s is subnormal is zero to those units, which then give 1 and 1 / 2. With Hopper's 2^x in integers
// (registry/ex2_sm90.hpp) and 1 / x up to a place off, s, act and s f of every bf16 gate were within 10, 11 and 1.6 (g g + 5).
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"
#include "simt/rows.hpp"
#include "simt/sigmoid.hpp"

namespace rlk::simt::swiglu::whole {

using act32::Problem;
using rows::Bytes16;
using rows::kPack;

inline constexpr int kThreads = 256, kEach = 1;  // packs of a thread
// Elements that a thread computes at a time: more would take registers from threads that could have reads under way.
inline constexpr int kGroup = 4;

// ---- arithmetic

struct Gradients {
  float d_gate, d_up;
};
RLK_DEVICE_CALL float product_by_rule(float gate, float up) { return act32::activated(Problem{}, gate) * up; }
RLK_DEVICE_CALL Gradients gradients_by_rule(float d, float gate, float up) {
  const act32::Inside<float> in{gate, gate, 1};
  const float e = act32::falling(in);
  return {act32::d_gate(Problem{}, in, e, d, gate, up), d * act32::activated(in, e)};
}

__device__ __forceinline__ float element(const Bytes16& pack, int k) {
  const std::uint32_t word = pack.word[k / 2];
  return bits_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
__device__ __forceinline__ void put_element(Bytes16& pack, int k, float x) {
  const std::uint32_t bits = rows::pair_of<bf16>(x, 0) & 0xffffu;
  std::uint32_t& word = pack.word[k / 2];
  word = k % 2 == 0 ? (word & 0xffff0000u) | bits : (word & 0xffffu) | bits << 16;
}

#if defined(__CUDA_ARCH__)
inline constexpr float kMost = 11.0f, kUnit = 0x1p-24f;
inline constexpr std::uint32_t kReach = 24;
// Of a number smaller than this the factors may be subnormal, and bounds relative to them do not hold.
inline constexpr float kLeast = 0x1p-120f;

// For 2^-60 <= |gate| <= kMost the rule by fewer instructions.
__device__ __forceinline__ bool is_inside(float gate) {
  const float size = fabsf(gate);
  return size <= kMost && size >= 0x1p-60f;
}
__device__ __forceinline__ Gradients exact_gradients(float d, float gate, float up) {
  if (!is_inside(gate)) return gradients_by_rule(d, gate, up);
  const float e = exp_of_minus(gate), sum = e + 1, s = inverse_of(sum);
  return {d * up * s * fused(gate, e * s, 1), d * quotient_inside(gate, sum, s)};
}
__device__ __forceinline__ float exact_product(float gate, float up) {
  return is_inside(gate) ? silu_inside(gate) * up : product_by_rule(gate, up);
}
__device__ __forceinline__ bool is_far(float gate) { return !(fabsf(gate) <= kMost); }
#endif

// out = silu(gate) up.
struct Forward {
  static constexpr int kIn = 2, kOut = 1;
  __device__ __forceinline__ static void apply(const Bytes16 (&in)[kIn], Bytes16 (&out)[kOut]) {
#if defined(__CUDA_ARCH__)
#  pragma unroll
    for (int k = 0; k < kPack; k += kGroup) group(in, out, k);
#else
    for (int k = 0; k < kPack; ++k)
      put_element(out[0], k, product_by_rule(element(in[0], k), element(in[1], k)));
#endif
  }

#if defined(__CUDA_ARCH__)
  // Those from `first` on.
  __device__ __forceinline__ static void group(const Bytes16 (&in)[kIn], Bytes16 (&out)[kOut], int first) {
    float made[kGroup];
    bool unsure = false;
#  pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const float gate = element(in[0], first + k);
      made[k] = gate * about_sigmoid(gate) * element(in[1], first + k);
      unsure |= is_far(gate) | near_middle<kReach>(made[k]);
    }
#  pragma unroll
    for (int i = 0; i < kGroup / 2; ++i)
      out[0].word[first / 2 + i] = rows::pair_of<bf16>(made[2 * i], made[2 * i + 1]);
    if (!unsure) return;
#  pragma unroll
    for (int k = 0; k < kGroup; ++k)
      if (const float gate = element(in[0], first + k); is_far(gate) || near_middle<kReach>(made[k]))
        put_element(out[0], first + k, exact_product(gate, element(in[1], first + k)));
  }
#endif
};

// d_gate and d_up from d_out, gate and up.
struct Backward {
  static constexpr int kIn = 3, kOut = 2;
  __device__ __forceinline__ static void apply(const Bytes16 (&in)[kIn], Bytes16 (&out)[kOut]) {
#if defined(__CUDA_ARCH__)
#  pragma unroll
    for (int k = 0; k < kPack; k += kGroup) group(in, out, k);
#else
    for (int k = 0; k < kPack; ++k) {
      const Gradients made = gradients_by_rule(element(in[0], k), element(in[1], k), element(in[2], k));
      put_element(out[0], k, made.d_gate);
      put_element(out[1], k, made.d_up);
    }
#endif
  }

#if defined(__CUDA_ARCH__)
  // Those from `first` on.
  __device__ __forceinline__ static void group(const Bytes16 (&in)[kIn], Bytes16 (&out)[kOut], int first) {
    float d_gate[kGroup], d_up[kGroup], low[kGroup], high[kGroup];
    bool unsure = false;
#  pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const float d = element(in[0], first + k), gate = element(in[1], first + k);
      const float e = about_exp2(mul_rn(gate, -ExpConstants<float>::kLog2e)), s = about_inverse(add_rn(e, 1));
      const float d_s = d * element(in[2], first + k) * s;
      d_up[k] = d * (gate * s);
      d_gate[k] = d_s * fused(gate, e * s, 1);
      const float reach = d_s * fused(gate, gate, 5);
      low[k] = fused(reach, -5 * kUnit, d_gate[k]), high[k] = fused(reach, 5 * kUnit, d_gate[k]);
      unsure |= is_far(gate) | near_middle<kReach>(d_up[k]) | (fabsf(d_gate[k]) < kLeast);
    }
    std::uint32_t differ[kGroup / 2];
#  pragma unroll
    for (int i = 0; i < kGroup / 2; ++i) {
      std::uint32_t& made = out[0].word[first / 2 + i];
      made = rows::pair_of<bf16>(low[2 * i], low[2 * i + 1]);
      differ[i] = made ^ rows::pair_of<bf16>(high[2 * i], high[2 * i + 1]);
      out[1].word[first / 2 + i] = rows::pair_of<bf16>(d_up[2 * i], d_up[2 * i + 1]);
      unsure |= differ[i] != 0;
    }
    if (!unsure) return;
#  pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const float d = element(in[0], first + k), gate = element(in[1], first + k),
                  up = element(in[2], first + k);
      const bool small = fabsf(d_gate[k]) < kLeast && d * up != 0;
      if (!is_far(gate) && !near_middle<kReach>(d_up[k]) && !small &&
          (differ[k / 2] >> 16 * (k % 2) & 0xffffu) == 0)
        continue;
      const Gradients exact = exact_gradients(d, gate, up);
      put_element(out[0], first + k, exact.d_gate);
      put_element(out[1], first + k, exact.d_up);
    }
  }
#endif
};

// ---- a thread's packs

// n / d for n < 2^31 and 0 < d < 2^31, by a product.
struct Divisor {
  std::uint32_t by = 1, factor = 0, shift = 0;
  Divisor() = default;
  explicit Divisor(std::uint32_t d) : by(d) {
    while (std::uint64_t{1} << shift < d) ++shift;
    factor = static_cast<std::uint32_t>((std::uint64_t{1} << (31 + shift)) / d + 1);
  }
  __device__ __forceinline__ std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{n} * factor >> 31 >> shift);
  }
};

// What a launch of an operation works on; strides are in packs. `kFlat`: rows follow each other in all tensors.
template <class Op>
struct Job {
  static constexpr int kTensors = Op::kIn + Op::kOut;
  Bytes16* data[kTensors];
  std::uint32_t stride[kTensors], packs;
  Divisor across;
  template <bool kFlat>
  __device__ __forceinline__ Bytes16* at(int tensor, std::uint32_t pack, std::uint32_t row,
                                         std::uint32_t column) const {
    return data[tensor] + (kFlat ? pack : row * stride[tensor] + column);
  }
};

template <class Op, bool kFlat>
__global__ void __launch_bounds__(kThreads) line(const Job<Op> job) {
  const std::uint32_t first = blockIdx.x * (kThreads * kEach) + threadIdx.x;
  std::uint32_t row[kEach] = {}, column[kEach] = {};
  Bytes16 in[kEach][Op::kIn];
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const std::uint32_t pack = first + c * kThreads;
    if (!kFlat) row[c] = job.across.quotient(pack), column[c] = pack - row[c] * job.across.by;
    if (pack < job.packs)
#pragma unroll
      for (int i = 0; i < Op::kIn; ++i) in[c][i] = *job.template at<kFlat>(i, pack, row[c], column[c]);
  }
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const std::uint32_t pack = first + c * kThreads;
    if (pack >= job.packs) return;
    Bytes16 out[Op::kOut];
    Op::apply(in[c], out);
#pragma unroll
    for (int i = 0; i < Op::kOut; ++i) *job.template at<kFlat>(Op::kIn + i, pack, row[c], column[c]) = out[i];
  }
}

// ---- launches

// Whether these kernels have a call of these tensors.
template <class... Tensors>
bool suits(const Problem& p, const Tensors&... tensors) {
  constexpr std::int64_t kMostPacks = std::int64_t{1} << 31;
  const auto fits = [&](const rows::Tensor& t) {
    return t && rows::lies_whole(p.axes, t) && t.stride[0] >= 0 &&
           p.axes.rows * (t.stride[0] / kPack) < kMostPacks && t.stride[0] < kMostPacks;
  };
  return p.act == act32::Act::silu && !p.twice && p.axes.count == 1 && p.width % kPack == 0 &&
         p.axes.rows * p.width > 0 && p.axes.rows * p.width / kPack < kMostPacks && (fits(tensors) && ...);
}
template <class Op, class... Tensors>
void launch(const Problem& p, hipStream_t stream, const Tensors&... tensors) {
  const auto packs_of = [](std::int64_t elements) { return static_cast<std::uint32_t>(elements / kPack); };
  Job<Op> job{{static_cast<Bytes16*>(tensors.data)...},
              {packs_of(tensors.stride[0])...},
              packs_of(p.axes.rows * p.width),
              Divisor(packs_of(p.width))};
  const bool flat = p.axes.rows == 1 || ((tensors.stride[0] == p.width) && ...);
  const dim3 grid((job.packs + kThreads * kEach - 1) / (kThreads * kEach));
  if (flat)
    hipLaunchKernelGGL((line<Op, true>), grid, dim3(kThreads), 0, stream, job);
  else
    hipLaunchKernelGGL((line<Op, false>), grid, dim3(kThreads), 0, stream, job);
}

}  // namespace rlk::simt::swiglu::whole
