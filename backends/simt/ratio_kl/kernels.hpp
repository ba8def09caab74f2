// The portable GPU kernels of ratio_kl (arithmetic loss32/f64): the bits of the native backend on every GPU. A thread has a
// token.
#pragma once

#include "arithmetic/ratio_kl/ratio_kl.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::ratio_kl {

using loss32::RatioProblem;

inline constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) forward(RatioProblem p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.tokens) return;
  const float mask = p.mask.at(i), logp = p.logp[i];
  p.ratio[i] = from_float<float>(loss32::ratio_of(p, mask, logp, p.old[i]));
  if (p.kl) p.kl[i] = from_float<float>(loss32::kl_of(p, mask, logp, p.ref[i]));
}

__global__ void __launch_bounds__(kThreads) backward(RatioProblem p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.tokens) return;
  const float mask = p.mask.at(i), logp = p.logp[i];
  const float ratio = p.d_ratio ? loss32::through_ratio(p, mask, logp, p.old[i], p.d_ratio[i]) : 0.0f;
  const float kl = p.d_kl ? loss32::through_kl(p, mask, logp, p.ref[i], p.d_kl[i]) : 0.0f;
  p.d_logp[i] = from_float<float>(ratio + kl);
}

inline dim3 grid(const RatioProblem& p) {
  return dim3(static_cast<unsigned>((p.tokens + kThreads - 1) / kThreads));
}

inline void launch_forward(const RatioProblem& p, hipStream_t stream) {
  if (p.tokens > 0) hipLaunchKernelGGL(forward, grid(p), dim3(kThreads), 0, stream, p);
}
inline void launch_backward(const RatioProblem& p, hipStream_t stream) {
  if (p.tokens > 0) hipLaunchKernelGGL(backward, grid(p), dim3(kThreads), 0, stream, p);
}

}  // namespace rlk::simt::ratio_kl
