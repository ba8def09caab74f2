// KDA on Hopper: the small kernels around the large ones (chunk plan of a packed batch, l2norm before a
// backward that prepares nothing, sums over groups of heads after it, parameter gradients), the workspace, and
// the order of launches.
#include <algorithm>

#include "arithmetic/bump.hpp"
#include "cuda/kda/groups.h"
#include "cuda/kda/segments.cuh"

namespace rlk::cuda::kda {
namespace {

// The sequence of each slot of a packed batch, or -1.
__global__ void plan_kernel(const Job p, int* slot_sequence) {
  const int slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot >= p.slots()) return;
  int lo = 0, hi = static_cast<int>(p.sequences) - 1;  // the last sequence whose first slot is <= slot
  while (lo < hi) {
    const int mid = (lo + hi + 1) / 2;
    if (first_slot(p, mid) <= slot) {
      lo = mid;
    } else {
      hi = mid - 1;
    }
  }
  const std::int64_t used = (sequence_length(p, lo) + kChunk - 1) / kChunk;
  slot_sequence[slot] = slot - first_slot(p, lo) < used ? lo : -1;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int off = 16; off > 0; off /= 2) x += __shfl_xor_sync(~0u, x, off);
  return x;
}

// One warp per (token, head): x (sum x^2 + 1e-6)^-1/2 rounded to bf16, and the factor; the bits of the
// preparation.
template <int K>
__global__ void normalise_kernel(const Job p) {
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= p.batch * p.tokens * p.heads) return;
  const int lane = threadIdx.x % 32, h = static_cast<int>(at % p.heads);
  const std::int64_t row = at / p.heads / p.tokens, token = at / p.heads % p.tokens;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const bf16* from = row_of(which ? p.k : p.q, row, token, h);
    bf16* to = (which ? p.k_norm : p.q_norm) + at * K;
    std::uint32_t x[K / 64];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < K / 64; ++i) {
      x[i] = reinterpret_cast<const std::uint32_t*>(from)[32 * i + lane];
      sum = fmaf(low(x[i]), low(x[i]), sum);
      sum = fmaf(high(x[i]), high(x[i]), sum);
    }
    const float factor = 1.f / sqrtf(warp_sum(sum) + 1e-6f);
#pragma unroll
    for (int i = 0; i < K / 64; ++i) {
      reinterpret_cast<std::uint32_t*>(to)[32 * i + lane] = pack(low(x[i]) * factor, high(x[i]) * factor);
    }
    if (lane == 0) (which ? p.k_factor : p.q_factor)[at] = factor;
  }
}

// One warp per (token, head): dq and dk of the group's value heads summed in order, then through the l2norm.
template <int K>
__global__ void finish_kernel(const Job p) {
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= p.batch * p.tokens * p.heads) return;
  const int lane = threadIdx.x % 32, h = static_cast<int>(at % p.heads), group = p.value_heads / p.heads;
  const std::int64_t place = at / p.heads, row = place / p.tokens, token = place % p.tokens;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float* from = (which ? p.k_part : p.q_part) + (place * p.value_heads + h * group) * K;
    float2 d[K / 64];
#pragma unroll
    for (int i = 0; i < K / 64; ++i) d[i] = make_float2(0.f, 0.f);
    for (int j = 0; j < group; ++j) {
#pragma unroll
      for (int i = 0; i < K / 64; ++i) {
        const float2 x = reinterpret_cast<const float2*>(from + j * K)[32 * i + lane];
        d[i].x += x.x, d[i].y += x.y;
      }
    }
    if (p.l2norm) {
      const auto y = reinterpret_cast<const std::uint32_t*>((which ? p.k_norm : p.q_norm) + at * K);
      const float factor = (which ? p.k_factor : p.q_factor)[at];
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < K / 64; ++i) {
        dot = fmaf(d[i].x, low(y[32 * i + lane]), dot);
        dot = fmaf(d[i].y, high(y[32 * i + lane]), dot);
      }
      dot = warp_sum(dot);
#pragma unroll
      for (int i = 0; i < K / 64; ++i) {
        d[i].x = factor * (d[i].x - low(y[32 * i + lane]) * dot);
        d[i].y = factor * (d[i].y - high(y[32 * i + lane]) * dot);
      }
    }
    bf16* to = row_of(which ? p.d_k : p.d_q, row, token, h);
#pragma unroll
    for (int i = 0; i < K / 64; ++i)
      reinterpret_cast<std::uint32_t*>(to)[32 * i + lane] = pack(d[i].x, d[i].y);
  }
}

// Sums over all chunks of value head `hv` of Width numbers a chunk, the first at `from`, chunks `pitch` apart:
// 1024 / Width strands in slot order, then the strands in order. The sum of number threadIdx.x.
template <int Width, class T>
__device__ inline double sum_chunks(const Job& p, const T* from, int pitch, double* strands) {
  constexpr int kStrands = 1024 / Width;
  const int column = threadIdx.x % Width, strand = threadIdx.x / Width;
  double sum = 0;
#pragma unroll 4
  for (std::int64_t slot = strand; slot < p.slots(); slot += kStrands) {
    const bool used = !p.slot_sequence || p.slot_sequence[slot] >= 0;
    sum += used ? static_cast<double>(from[slot * pitch + column]) : 0;
  }
  strands[threadIdx.x] = sum;
  __syncthreads();
  if (strand > 0) return 0;
  for (int s = 1; s < kStrands; ++s) sum += strands[s * Width + column];
  return sum;
}

// Blocks (value head, 32 channels) have d_dt_bias, the last of a head has d_a_log.
template <int K>
__global__ void __launch_bounds__(1024) parameters_kernel(const Job p) {
  constexpr int kParts = K / 32;
  __shared__ double strands[1024];
  const int hv = blockIdx.x, part = blockIdx.y;
  if (part < kParts) {
    const double sum = sum_chunks<32>(p, p.bias_part + hv * K + 32 * part, p.value_heads * K, strands);
    if (threadIdx.x < 32 && p.d_dt_bias)
      p.d_dt_bias[hv * K + 32 * part + threadIdx.x] = static_cast<float>(sum);
  } else {
    double sum = sum_chunks<kParts>(p, p.a_log_part + hv * kParts, p.value_heads * kParts, strands);
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int off = kParts / 2; off > 0; off /= 2) sum += __shfl_xor_sync(~0u, sum, off);
    if (threadIdx.x == 0 && p.d_a_log) p.d_a_log[hv] = static_cast<float>(sum);
  }
}

using Bump = simt::Bump<char, 1024>;  // pieces of whole KiB
template <class T>
T* take(Bump& bump, std::int64_t count) {
  return reinterpret_cast<T*>(bump.take(count * static_cast<std::int64_t>(sizeof(T))));
}

std::size_t lay_out(Job& job, void* workspace, bool backward) {
  Bump bump{static_cast<char*>(workspace)};
  job.slots_each = static_cast<int>((job.tokens + kChunk - 1) / kChunk);
  // n / d = (floor(n m / 2^32) + n) / 2^s for all n < 2^31, with 2^s >= d and m = 2^32 (2^s - d) / d + 1.
  while ((std::int64_t{1} << job.slots_shift) < job.slots_each) ++job.slots_shift;
  job.slots_magic = static_cast<unsigned>(
      ((std::int64_t{1} << 32) * ((std::int64_t{1} << job.slots_shift) - job.slots_each)) /
          std::max(job.slots_each, 1) +
      1);
  const std::int64_t k = job.dim, items = job.slots() * job.value_heads, rows = job.batch * job.tokens;
  if (job.cu_seqlens) job.slot_sequence = take<int>(bump, job.slots());
  if (!job.records)
    job.records = take<char>(bump, items * (k == 128 ? Record<128>::kSize : Record<64>::kSize));
  if (job.l2norm && backward) {
    job.q_norm = take<bf16>(bump, rows * job.heads * k);
    job.k_norm = take<bf16>(bump, rows * job.heads * k);
    job.q_factor = take<float>(bump, rows * job.heads);
    job.k_factor = take<float>(bump, rows * job.heads);
  }
  if (job.segments) {
    const std::int64_t floats = map_count(job) * job.value_heads * k * k;
    job.ends = take<float>(bump, floats), job.moves = take<float>(bump, floats);
    if (backward) {
      job.d_ends = take<float>(bump, piece_count(job) * job.value_heads * k * k);
      job.d_moves = take<float>(bump, floats);
    }
  } else if (in_groups(job, backward)) {
    job.carried = take<float>(bump, job.value_heads * k * k);
    if (backward) job.d_carried = take<float>(bump, job.value_heads * k * k);
  }
  if (backward) {
    job.states = take<bf16>(bump, items * k * k);
    job.d_states = take<bf16>(bump, items * k * k);
    job.v_new = take<bf16>(bump, items * k * kChunk);
    job.d_x = take<bf16>(bump, items * k * kChunk);
    if (job.gate != Gate::none) {
      job.v_new_rest = take<bf16>(bump, items * k * kChunk);
      job.d_states_rest = take<bf16>(bump, items * k * k);
    }
    if (job.heads != job.value_heads) {
      job.q_part = take<float>(bump, rows * job.value_heads * k);
      job.k_part = take<float>(bump, rows * job.value_heads * k);
    }
    if (k == 128) job.beta_half = take<unsigned>(bump, items * kChunk);
    if (job.d_a_log || job.d_dt_bias) {
      job.bias_part = take<float>(bump, items * k);
      job.a_log_part = take<double>(bump, items * (k / 32));
    }
    // Gradients that nobody asked for are computed all the same, here.
    auto scratch = [&](auto& t, std::int64_t heads, std::int64_t width, bool absent) {
      if (!absent) return;
      t.batch = job.tokens * heads * width, t.token = heads * width, t.head = width;
    };
    const auto half = [&](Strided<bf16>& t, std::int64_t heads, bool absent) {
      scratch(t, heads, k, absent);
      if (absent) t.data = take<bf16>(bump, rows * heads * k);
    };
    half(job.d_q, job.heads, job.skip & kSkipQ);
    half(job.d_k, job.heads, job.skip & kSkipK);
    half(job.d_v, job.value_heads, job.skip & kSkipV);
    const auto real = [&](Real& t, std::int64_t width, bool absent) {
      scratch(t, job.value_heads, width, absent);
      if (absent) t.data = take<float>(bump, rows * job.value_heads * width), t.bf16 = false;
    };
    real(job.d_g, k, job.skip & kSkipG);
    real(job.d_beta, 1, job.skip & kSkipBeta);
    if (job.unfused) job.inter = take<float>(bump, items * (k / 64) * kInter);
  }
  return static_cast<std::size_t>(bump.used);
}

unsigned warps_to_blocks(std::int64_t warps) { return static_cast<unsigned>((warps + 7) / 8); }

}  // namespace

void launch_before(const Job& job, cudaStream_t stream) {
  if (job.slots() == 0) return;
  if (job.cu_seqlens) {
    plan_kernel<<<static_cast<unsigned>((job.slots() + 255) / 256), 256, 0, stream>>>(
        job, const_cast<int*>(job.slot_sequence));
  }
}

void launch_normalise(const Job& job, cudaStream_t stream) {
  if (job.l2norm && job.batch * job.tokens > 0) {
    const unsigned blocks = warps_to_blocks(job.batch * job.tokens * job.heads);
    job.dim == 128 ? normalise_kernel<128><<<blocks, 256, 0, stream>>>(job)
                   : normalise_kernel<64><<<blocks, 256, 0, stream>>>(job);
  }
}

void launch_after(const Job& job, cudaStream_t stream) {
  if (job.q_part && job.batch * job.tokens > 0) {
    const unsigned blocks = warps_to_blocks(job.batch * job.tokens * job.heads);
    job.dim == 128 ? finish_kernel<128><<<blocks, 256, 0, stream>>>(job)
                   : finish_kernel<64><<<blocks, 256, 0, stream>>>(job);
  }
  if (job.bias_part) {
    const dim3 blocks(static_cast<unsigned>(job.value_heads), static_cast<unsigned>(job.dim / 32 + 1));
    job.dim == 128 ? parameters_kernel<128><<<blocks, 1024, 0, stream>>>(job)
                   : parameters_kernel<64><<<blocks, 1024, 0, stream>>>(job);
  }
}

Job plan_job(const Params& params, void* workspace, bool backward) {
  Job job{params};
  if (backward) job.final = nullptr;  // the recomputed forward writes nothing of the caller's
  lay_out(job, workspace, backward);
  return job;
}

std::size_t forward_workspace(const Params& params) {
  Job job{params};
  return lay_out(job, nullptr, false);
}
std::size_t backward_workspace(const Params& params) {
  Job job{params};
  return lay_out(job, nullptr, true);
}

cudaError_t forward(const Params& params, void* workspace, cudaStream_t stream) {
  const Job job = plan_job(params, workspace, false);
  const auto beside = !job.segments && in_groups(job, false) ? Beside::borrow(stream) : nullptr;
  launch_before(job, stream);
  if (job.segments && map_count(job) > 0) {
    launch_prepare(job, stream);
    launch_map_scan(job, stream);
    launch_join(job, stream);
    launch_piece_scan(job, stream);
  } else if (beside) {
    if (const cudaError_t error = forward_in_groups(job, stream, *beside); error != cudaSuccess) return error;
  } else {
    launch_prepare(job, stream);
    launch_forward_scan(job, stream);
  }
  return cudaGetLastError();
}

cudaError_t backward(const Params& params, void* workspace, cudaStream_t stream) {
  const Job job = plan_job(params, workspace, true);
  const auto beside = !job.segments && in_groups(job, true) ? Beside::borrow(stream) : nullptr;
  launch_before(job, stream);
  if (params.records) launch_normalise(job, stream);
  if (beside) {
    const cudaError_t error = backward_in_groups(job, !params.records, stream, *beside);
    if (error != cudaSuccess) return error;
  } else {
    if (!params.records) launch_prepare(job, stream);
    if (job.segments && map_count(job) > 0) {
      launch_map_scan(job, stream);
      launch_join(job, stream);
      launch_piece_scan(job, stream);
    } else {
      launch_both_scans(job, job, stream);
    }
    launch_gradients(job, stream);
  }
  launch_after(job, stream);
  return cudaGetLastError();
}

}  // namespace rlk::cuda::kda
