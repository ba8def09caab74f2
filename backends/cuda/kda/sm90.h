// KDA forward and backward for Hopper: the plain parameters that the kernels of *_sm90.cu take, their
// workspace, and the two launchers. Knows nothing of the registry; sm90.cpp translates.
//
// Arithmetic id `sm90/kda64`: chunks of 64 tokens counted from the start of a sequence; decays as products of
// e^{g}, those and the sigmoid of a gate by the unit's ex2 and rcp; the chunk's two 64 x 64 products P and M
// in strips of 8 tokens, between strips with the decays to and from their bounds and inside one by halving
// (level s = 4, 2, 1 pairs each aligned group of s tokens with the group before it, anchored between them),
// so every factor is at most 1 and anchors depend on the past only; their operands in fp16 scaled by the
// row's largest exponent; the inverse of 16 x 16 blocks by fp32 substitution, of the rest by fp64 products;
// states in fp32, rounded to bf16 as operands. The sum of squares of the l2norm: channels 2 c, 2 c + 1, 2 c +
// 64 and 2 c + 65 in one chain for c = 0 .. 31, and these joined as a tree, c with c + 16, then + 8, .. 1.
//
// `sm90/kda64/seg4096`, of the forward: the same chunks, a sequence in segments of 4096 tokens. Of every whole one U is the state that its
// chunks make of zeros, T (K x K) what they make of the unit matrix where v is zero; the state behind it is T S + U, T S one fp32 fma chain
// over K ascending from +0. Every segment's outputs come of its chunks from its first state; what lies behind the whole ones is a chain of
// chunks.
//
// `sm90/kda64/f64`, of the backward, prepares the same and goes on: dP and dM rounded to 11 significant
// bits, times decayed q and k; those are rounded alike between blocks of 16 tokens, and inside a block by
// halving (level s = 8, 4, 2) keep 22 bits; where log decays are given (`gate` none) they are everywhere cut
// to 11 bits, after a factor that makes cutting unbiased. Neighbours meet in fp32. d_beta = D . v_new / beta;
// where |beta| is below 2^-64, the same as D . v + W . k. v_new and dS reach the gradients in bf16; where the
// gate is computed here in two terms, the second times everything but the other's, and before the first.
// Through the l2norm: x . d of 16 channels, c and c + 8 in one chain for c = 0 .. 7, these joined as a tree, c
// with c + 4, + 2, + 1, and the sixteens in order; where heads share q and k, in the order of the sum of
// squares, of d summed over the heads. d_a_log and d_dt_bias: sums over a chunk's tokens
// in fp32, all further ones in fp64. It replaces the backward's `sm90/kda64`, which summed these in fp32.
//
// `sm90/kda64/f64/seg4096`, of the backward: the same over the states of `sm90/kda64/seg4096` and its segments. Of every whole one W is the
// gradient that its chunks hand back of zeros behind it; the gradient before it is T^T dS + W, T that of the forward, T^T dS one fp32 fma
// chain over K ascending from +0. Every segment's chunks run from the gradient behind it; what lies behind the whole ones is a chain of
// chunks, and the first to run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "arithmetic/kda/problem.hpp"

namespace rlk::cuda::kda {

using ::rlk::kda::Gate;

// [batch, token, head, channel], last dimension dense; strides count elements.
template <class T>
struct Strided {
  T* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;
};

// fp32 or bf16 memory: g, beta and their gradients come in either.
struct Real {
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;
  bool bf16 = false;
};

enum { kSkipQ = 1, kSkipK = 2, kSkipV = 4, kSkipG = 8, kSkipBeta = 16 };

struct Params {
  std::int64_t batch = 0, tokens = 0, sequences = 0;  // sequences == batch unless packed
  int heads = 0, value_heads = 0, dim = 0;            // dim = K = V, 64 or 128
  const std::int64_t* cu_seqlens = nullptr;
  float scale = 0, lower_bound = -5;
  bool v_first = false, l2norm = false, beta_sigmoid = false, neg_eigval = false;
  Gate gate = Gate::none;

  Strided<const __nv_bfloat16> q, k, v;
  Real g, beta;
  const float* a_log = nullptr;    // [HV]
  const float* dt_bias = nullptr;  // [HV, K]
  const float* initial = nullptr;  // dense [N, HV, K, V] or [N, HV, V, K]

  Strided<__nv_bfloat16> out;  // forward
  float* final = nullptr;

  Strided<const __nv_bfloat16> d_out;  // backward
  const float* d_final = nullptr;
  Strided<__nv_bfloat16> d_q, d_k, d_v;
  Real d_g, d_beta;
  float* d_initial = nullptr;
  float* d_a_log = nullptr;
  float* d_dt_bias = nullptr;

  // What the caller keeps between the two: Record<dim> of every chunk and value head, written by forward, and
  // read by backward, which then prepares nothing. Null: backward prepares the same once more.
  char* records = nullptr;

  int skip = 0;           // gradients the caller does not want
  bool segments = false;  // sm90/kda64/seg4096, backward sm90/kda64/f64/seg4096
  bool unfused = false;   // backward: keep the inter-chunk gradients in memory between two kernels

  __host__ __device__ std::int64_t slots() const {
    return cu_seqlens ? tokens / 64 + sequences : sequences * ((tokens + 63) / 64);
  }
};

std::size_t forward_workspace(const Params& params);
std::size_t backward_workspace(const Params& params);
cudaError_t forward(const Params& params, void* workspace, cudaStream_t stream);
cudaError_t backward(const Params& params, void* workspace, cudaStream_t stream);

}  // namespace rlk::cuda::kda
