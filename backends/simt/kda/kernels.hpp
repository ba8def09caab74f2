// The portable GPU kernels of KDA: chunked forward and backward, decode, gate. Arithmetic fma32/kda: the bits
// of the native backend on every GPU. No atomics, no wave-size dependence.
//
// forward, backward   one block per (sequence, head), looping when there are more than kMaxBlocks of them;
//                     everything a task touches twice stays in its scratch, which L1 and L2 hold
// step                one block per (sequence, value head), likewise: the state and the cache are read where they lie. One token
//                     of each sequence: step_token.hpp
// decode              one block per (sequence, value head) and 32 or 64 columns of V; a state is read once and
//                     written once, in 16-byte pieces when the layout allows: 8 K V bytes per (sequence,
//                     value head) and little else
#pragma once

#include <algorithm>

#include "arithmetic/kda/decode.hpp"
#include "arithmetic/kda/step.hpp"
#include "simt/kda/step_token.hpp"
#include "simt/kda/team.hpp"
#include "simt/kda/token.hpp"

namespace rlk::simt::kda {

using namespace rlk::kda;

// The chunked kernels wait for memory more than they compute.
inline constexpr int kChunkThreads = 512;
// Scratch grows with it; more is no faster on any GPU of today.
inline constexpr std::int64_t kMaxBlocks = 528;

__global__ void __launch_bounds__(kChunkThreads) forward(Problem p, float* scratch, std::int64_t floats) {
  BlockTeam team;
  for (std::int64_t task = blockIdx.x; task < chunked::forward_tasks(p); task += gridDim.x) {
    chunked::forward(team, p, task, scratch + std::int64_t(blockIdx.x) * floats);
  }
}

__global__ void __launch_bounds__(kChunkThreads)
    backward(Problem p, float* scratch, std::int64_t floats, double* partials) {
  BlockTeam team;
  for (std::int64_t task = blockIdx.x; task < chunked::backward_tasks(p); task += gridDim.x) {
    chunked::backward(team, p, task, scratch + std::int64_t(blockIdx.x) * floats, partials);
  }
}

__global__ void __launch_bounds__(kThreads) step(Step p, float* scratch, std::int64_t floats) {
  BlockTeam team;
  for (std::int64_t task = blockIdx.x; task < chunked::forward_tasks(p); task += gridDim.x) {
    chunked::step(team, p, task, scratch + std::int64_t(blockIdx.x) * floats);
  }
}

__global__ void __launch_bounds__(kThreads) finish(Problem p, const double* partials) {
  BlockTeam team;
  chunked::finish(team, p, int(blockIdx.x), partials);
}

// Four floats; those beyond `n` are zero, and not touched in memory.
template <bool kWide>
__device__ __forceinline__ void load4(const float* p, int n, float (&x)[4]) {
  if constexpr (kWide) {
    const float4 v = n > 0 ? *reinterpret_cast<const float4*>(p) : make_float4(0, 0, 0, 0);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    for (int c = 0; c < 4; ++c) x[c] = c < n ? p[c] : 0.0f;
  }
}
template <bool kWide>
__device__ __forceinline__ void store4(float* p, int n, const float (&x)[4]) {
  if constexpr (kWide) {
    if (n > 0) *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    for (int c = 0; c < 4; ++c) {
      if (c < n) p[c] = x[c];
    }
  }
}

// [K, V] states: a block has 64 columns, a thread rows part, part + 16, .. of four of them. 32 registers of
// state leave room for four blocks on a multiprocessor, which hide each other's waits.
inline constexpr int kBlockColumns = 64;

template <int kSteps, bool kWide>
__global__ void __launch_bounds__(kThreads, kSteps <= 8 ? 4 : 2) decode_columns(Problem p) {
  using decode::kParts;
  __shared__ SharedToken t;
  __shared__ float parts[kParts][kBlockColumns];
  const int thread = int(threadIdx.y) * 32 + int(threadIdx.x), part = thread / 16, column = thread % 16 * 4;
  const std::int64_t b = blockIdx.x / unsigned(p.value_heads);
  const int hv = int(blockIdx.x % unsigned(p.value_heads)), K = p.k_dim, V = p.v_dim;
  const int first = int(blockIdx.y) * kBlockColumns, j = first + column, left = V - j;
  const float* state =
      static_cast<const float*>(p.initial.data) + b * p.initial.row + hv * p.initial.head + j;
  float* next = static_cast<float*>(p.final.data) + b * p.final.row + hv * p.final.head + j;
  float s[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int d = part + i * kParts;
    load4<kWide>(state + d * V, d < K ? left : 0, s[i]);
  }
  read_token(p, b, hv, t);
  float sum[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int d = part + i * kParts;
    if (d >= K) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[i][c] = simt::mul_rn(s[i][c], t.decay[d]);
      sum[c] = simt::fused(s[i][c], t.k[d], sum[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) parts[part][column + c] = sum[c];
  __syncthreads();
  if (thread < kBlockColumns) {
    float total = 0;
    for (int i = 0; i < kParts; ++i) total = simt::add_rn(total, parts[i][thread]);
    parts[0][thread] = t.v[first + thread] - total;
  }
  __syncthreads();
  float r[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    r[c] = parts[0][column + c];
    sum[c] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int d = part + i * kParts;
    if (d >= K) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[i][c] = simt::fused(t.write_k[d], r[c], s[i][c]);
      sum[c] = simt::fused(s[i][c], t.q[d], sum[c]);
    }
    store4<kWide>(next + d * V, left, s[i]);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) parts[part][column + c] = sum[c];
  __syncthreads();
  if (thread < kBlockColumns && first + thread < V) {
    float total = 0;
    for (int i = 0; i < kParts; ++i) total = simt::add_rn(total, parts[i][thread]);
    store(p.out.data, p.out.type, at(p.out, b, 0, hv) + first + thread, total);
  }
}

// The butterfly of many sums at once, so that their shuffles overlap.
template <int kCount>
__device__ __forceinline__ void lane_sums(float (&sum)[kCount]) {
#pragma unroll
  for (int step = 1; step < decode::kLanes; step *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = simt::add_rn(sum[i], __shfl_xor(sum[i], step, decode::kLanes));
  }
}

// [V, K] states: 32 lanes hold a row, four neighbouring d (and, for kHalves = 2, four more 128 further on)
// each; a thread has kSteps rows.
template <int kHalves>
inline constexpr int kRowSteps = 8 / kHalves;

template <int kHalves, bool kWide>
__global__ void __launch_bounds__(kThreads, 4) decode_rows(Problem p) {
  constexpr int kSteps = kRowSteps<kHalves>;
  __shared__ SharedToken t;
  const std::int64_t b = blockIdx.x / unsigned(p.value_heads);
  const int hv = int(blockIdx.x % unsigned(p.value_heads)), K = p.k_dim, V = p.v_dim;
  const int lane = int(threadIdx.x), first = int(blockIdx.y) * kSteps * 8 + int(threadIdx.y);
  const float* state = static_cast<const float*>(p.initial.data) + b * p.initial.row + hv * p.initial.head;
  float* next = static_cast<float*>(p.final.data) + b * p.final.row + hv * p.final.head;
  float s[kSteps][kHalves][4], r[kSteps], sum[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int j = first + i * 8;
#pragma unroll
    for (int u = 0; u < kHalves; ++u) {
      const int d = u * 128 + lane * 4;
      load4<kWide>(state + j * K + d, j < V ? K - d : 0, s[i][u]);
    }
  }
  read_token(p, b, hv, t);
  // The token's vectors in registers, by 16-byte accesses: scalar ones would meet four to a bank.
#pragma unroll
  for (int i = 0; i < kSteps; ++i) sum[i] = 0;
#pragma unroll
  for (int u = 0; u < kHalves; ++u) {
    const int d = u * 128 + lane * 4;
    float decay[4], k[4];
    load4<true>(t.decay + d, 4, decay);
    load4<true>(t.k + d, 4, k);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[i][u][c] = simt::mul_rn(s[i][u][c], decay[c]);
        sum[i] = d + c < K ? simt::fused(s[i][u][c], k[c], sum[i]) : sum[i];
      }
    }
  }
  lane_sums(sum);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int j = first + i * 8;
    r[i] = (j < V ? t.v[j] : 0.0f) - sum[i];
    sum[i] = 0;
  }
#pragma unroll
  for (int u = 0; u < kHalves; ++u) {
    const int d = u * 128 + lane * 4;
    float write_k[4], q[4];
    load4<true>(t.write_k + d, 4, write_k);
    load4<true>(t.q + d, 4, q);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int j = first + i * 8;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[i][u][c] = simt::fused(write_k[c], r[i], s[i][u][c]);
        sum[i] = d + c < K ? simt::fused(s[i][u][c], q[c], sum[i]) : sum[i];
      }
      if (j < V) store4<kWide>(next + j * K + d, K - d, s[i][u]);
    }
  }
  lane_sums(sum);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int j = first + i * 8;
    if (lane == 0 && j < V) store(p.out.data, p.out.type, at(p.out, b, 0, hv) + j, sum[i]);
  }
}

__global__ void __launch_bounds__(kThreads) gate(Problem p) {
  const std::int64_t row = std::int64_t(p.value_heads) * p.k_dim, all = p.tokens * row;
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; i < all;
       i += std::int64_t(gridDim.x) * kThreads) {
    const int channel = int(i % row), hv = channel / p.k_dim, d = channel % p.k_dim;
    decode::gate_element(p, gate_parameters<float>(p, hv, d), i / row, hv, d);
  }
}

__global__ void __launch_bounds__(kThreads) gate_backward(Problem p, double* partials) {
  const int hv = int(blockIdx.y);
  double* partial = partials + (std::int64_t(blockIdx.x) * p.value_heads + hv) * 2 * p.k_dim;
  for (int d = int(threadIdx.x); d < p.k_dim; d += kThreads)
    decode::gate_backward_channel(p, blockIdx.x, hv, d, partial + d, partial + p.k_dim + d);
}

// ---- host side: sizes of workspaces, and launches on a stream ----

inline std::int64_t blocks(std::int64_t tasks) { return std::min(tasks, kMaxBlocks); }

inline std::int64_t partials_bytes(const Problem& p) {
  return std::int64_t(sizeof(double)) * 2 * p.sequences * p.value_heads * p.k_dim;
}
inline std::int64_t forward_bytes(const Problem& p) {
  return 64 + blocks(chunked::forward_tasks(p)) * chunked::forward_floats(p) * 4;
}
inline std::int64_t backward_bytes(const Problem& p) {
  return 128 + blocks(chunked::backward_tasks(p)) * chunked::backward_floats(p) * 4 + partials_bytes(p);
}
inline std::int64_t step_bytes(const Step& p) {
  return 64 + blocks(chunked::forward_tasks(p)) * chunked::step_floats(p) * 4;
}
inline std::int64_t gate_backward_bytes(const Problem& whole) {
  Problem p = whole;
  p.sequences = decode::gate_blocks(p);
  return 64 + partials_bytes(p);
}

template <class T>
T* aligned(void* p) {
  return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(p) + 63) / 64 * 64);
}

inline void launch_forward(const Problem& p, void* workspace, hipStream_t stream) {
  const std::int64_t tasks = chunked::forward_tasks(p);
  if (tasks == 0) return;
  hipLaunchKernelGGL(forward, dim3(unsigned(blocks(tasks))), dim3(kChunkThreads), 0, stream, p,
                     aligned<float>(workspace), chunked::forward_floats(p));
}

inline void launch_backward(const Problem& p, void* workspace, hipStream_t stream) {
  const std::int64_t tasks = chunked::backward_tasks(p);
  double* partials = aligned<double>(workspace);
  float* scratch = aligned<float>(partials + partials_bytes(p) / std::int64_t(sizeof(double)));
  if (tasks != 0) {
    hipLaunchKernelGGL(backward, dim3(unsigned(blocks(tasks))), dim3(kChunkThreads), 0, stream, p, scratch,
                       chunked::backward_floats(p), partials);
  }
  if (p.value_heads != 0 && (p.d_a_log || p.d_dt_bias)) {
    hipLaunchKernelGGL(finish, dim3(unsigned(p.value_heads)), dim3(kThreads), 0, stream, p,
                       static_cast<const double*>(partials));
  }
}

inline void launch_step(const Step& p, void* workspace, hipStream_t stream) {
  const std::int64_t tasks = chunked::forward_tasks(p);
  if (tasks == 0) return;
  if (one_token(p)) {
    hipLaunchKernelGGL(step_token, dim3(unsigned(tasks)), dim3(32, 8), 0, stream, p);
    return;
  }
  hipLaunchKernelGGL(step, dim3(unsigned(blocks(tasks))), dim3(kThreads), 0, stream, p,
                     aligned<float>(workspace), chunked::step_floats(p));
}

inline bool wide(const States& s) {
  return reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0 && s.row % 4 == 0 && s.head % 4 == 0;
}

inline void launch_decode(const Problem& p, hipStream_t stream) {
  const std::int64_t tasks = p.batch * p.value_heads;
  if (tasks == 0) return;
  const bool vectors = wide(p.initial) && wide(p.final) && (p.v_first ? p.k_dim : p.v_dim) % 4 == 0;
  const bool large = p.k_dim > 128;
  const int columns =
      !p.v_first ? kBlockColumns : 8 * (large ? kRowSteps<2> : kRowSteps<1>);  // of V, per block
  const dim3 grid(unsigned(tasks), unsigned((p.v_dim + columns - 1) / columns)), threads(32, 8);
  const auto launch = [&](auto kernel) { hipLaunchKernelGGL(kernel, grid, threads, 0, stream, p); };
  if (p.v_first) {
    if (large) {
      vectors ? launch(decode_rows<2, true>) : launch(decode_rows<2, false>);
    } else {
      vectors ? launch(decode_rows<1, true>) : launch(decode_rows<1, false>);
    }
  } else if (large) {
    vectors ? launch(decode_columns<16, true>) : launch(decode_columns<16, false>);
  } else {
    vectors ? launch(decode_columns<8, true>) : launch(decode_columns<8, false>);
  }
}

inline void launch_gate(const Problem& p, hipStream_t stream) {
  const std::int64_t all = p.tokens * p.value_heads * p.k_dim;
  if (all == 0) return;
  const std::int64_t count = std::min<std::int64_t>((all + kThreads - 1) / kThreads, 65536);
  hipLaunchKernelGGL(gate, dim3(unsigned(count)), dim3(kThreads), 0, stream, p);
}

inline void launch_gate_backward(Problem p, void* workspace, hipStream_t stream) {
  double* partials = aligned<double>(workspace);
  p.sequences = decode::gate_blocks(p);
  if (p.value_heads == 0) return;
  if (p.sequences != 0) {
    hipLaunchKernelGGL(gate_backward, dim3(unsigned(p.sequences), unsigned(p.value_heads)), dim3(kThreads), 0,
                       stream, p, partials);
  }
  hipLaunchKernelGGL(finish, dim3(unsigned(p.value_heads)), dim3(kThreads), 0, stream, p,
                     static_cast<const double*>(partials));
}

}  // namespace rlk::simt::kda
