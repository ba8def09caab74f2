// One long sequence of few heads. Its recurrences keep few multiprocessors busy for long: a block per head and
// 64 columns of V, chunk after chunk. So its chunks are taken in groups: while the recurrences work on one in
// a stream of their own, the other multiprocessors prepare the next, and compute the gradients of those that
// both recurrences have passed. A group is a call of its own, whose states come from and go to its neighbours
// in fp32, so no bit differs.
#include <algorithm>

#include "cuda/kda/groups.h"

namespace rlk::cuda::kda {
namespace {

constexpr std::int64_t kGroup = 128;  // chunks

template <class T>
void advance(T*& p, std::int64_t by) {
  if (p) p += by;
}
template <class T>
void advance(Strided<T>& t, std::int64_t tokens) {
  advance(t.data, tokens * t.token);
}
void advance(Real& t, std::int64_t tokens) {
  auto data = static_cast<char*>(t.data);
  advance(data, tokens * t.token * (t.bf16 ? 2 : 4));
  t.data = data;
}

struct Groups {
  const Job& job;
  std::int64_t chunks = (job.tokens + kChunk - 1) / kChunk, count = (chunks + kGroup - 1) / kGroup;

  // Group i. Its slots are those of a call that begins there.
  Job part(std::int64_t i) const {
    Job p = job;
    const std::int64_t first = i * kGroup, token = first * kChunk, items = first * job.value_heads,
                       k = job.dim;
    p.tokens = std::min(kGroup * kChunk, job.tokens - token);
    p.slots_each = static_cast<int>(std::min(kGroup, chunks - first));
    const auto at_token = [&](auto&... t) { (advance(t, token), ...); };
    at_token(p.q, p.k, p.v, p.g, p.beta, p.out, p.d_out, p.d_q, p.d_k, p.d_v, p.d_g, p.d_beta);
    const auto at_item = [&](std::int64_t size, auto&... x) { (advance(x, items * size), ...); };
    at_item(k == 128 ? Record<128>::kSize : Record<64>::kSize, p.records);
    at_item(k * k, p.states, p.d_states, p.d_states_rest);
    at_item(k * kChunk, p.v_new, p.v_new_rest, p.d_x);
    at_item(kChunk, p.beta_half);
    at_item(k, p.bias_part);
    at_item(k / 32, p.a_log_part);
    at_item(k / 64 * kInter, p.inter);
    const auto at_row = [&](std::int64_t size, auto&... x) { (advance(x, token * size), ...); };
    at_row(job.value_heads * k, p.q_part, p.k_part);
    at_row(job.heads * k, p.q_norm, p.k_norm);
    at_row(job.heads, p.q_factor, p.k_factor);
    const bool last = i == count - 1;
    if (i > 0) p.initial = p.carried, p.d_initial = p.d_carried;
    if (!last) p.final = p.carried, p.d_final = p.d_carried;
    return p;
  }
};

}  // namespace

bool in_groups(const Job& job, bool backward) {
  return job.batch == 1 && !job.cu_seqlens && job.value_heads <= (backward ? 16 : 32) &&
         job.tokens >= 4 * kGroup * kChunk;
}

cudaError_t forward_in_groups(const Job& job, cudaStream_t stream, const Beside& beside) {
  const Groups groups{job};
  cudaError_t error = cudaSuccess;
  for (std::int64_t i = 0; i < groups.count && error == cudaSuccess; ++i) {
    const Job part = groups.part(i);
    launch_prepare(part, stream);
    error = beside.order(stream, beside.stream());
    launch_forward_scan(part, beside.stream());
  }
  return error == cudaSuccess ? beside.order(beside.stream(), stream) : error;
}

// Step i takes group i forward and the i-th from the end back.
cudaError_t backward_in_groups(const Job& job, bool prepare, cudaStream_t stream, const Beside& beside) {
  const Groups groups{job};
  cudaError_t error = cudaSuccess;
  for (std::int64_t i = 0; i < groups.count && error == cudaSuccess; ++i) {
    const std::int64_t j = groups.count - 1 - i;
    const Job ahead = groups.part(i), back = groups.part(j);
    if (prepare && i <= j) launch_prepare(ahead, stream);
    if (prepare && i < j) launch_prepare(back, stream);
    if (i <= j) error = beside.order(stream, beside.stream());
    launch_both_scans(ahead, back, beside.stream());
    if (i < j) continue;
    if (error == cudaSuccess) error = beside.order(beside.stream(), stream);
    launch_gradients(ahead, stream);
    if (i > j) launch_gradients(back, stream);
  }
  return error;
}

}  // namespace rlk::cuda::kda
