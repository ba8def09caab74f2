// What a row of sample has beside the sums of logp's kernels (run.hpp), a thread each:
//
// note    an entry of the row where it has sums, and their temperatures
// finish  leaves to log-probabilities, or to what a part says of them
#pragma once

#include "cuda/sample/run.hpp"
#include "simt/simt.hpp"

namespace rlk::cuda::sample {

inline constexpr int kThreads = 128;

__device__ __forceinline__ std::int64_t row_of_thread() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ __forceinline__ std::int64_t target_of(const Problem& p, std::int64_t row) {
  if (p.partials) {
    const float most = sampling::float_of(p.state[row * p.state_stride + sampling::kStateMost]);
    return sampling::is_finite(most) ? 0 : -1;
  }
  if (p.status) return p.status[row] == static_cast<std::int32_t>(sampling::Audit::ok) ? p.recorded[row] : -1;
  return sampling::IntegerColumn{p.token.data, p.token.wide, p.token.stride}[row];
}

__global__ void __launch_bounds__(kThreads) note(Problem p, Sums sums) {
  const std::int64_t row = row_of_thread();
  if (row >= p.rows) return;
  const float temperature = sampling::temperature_of(p, sampling::parameters_of(p, row), row);
  sums.target[row] = target_of(p, row);
  sums.temperature[row] = temperature;
  sums.raw_temperature[row] = p.raw_temperature ? temperature : 1.0f;
}

__device__ __forceinline__ sampling::Part joined_leaves(const Problem& p, State* states, float temperature,
                                                        std::int64_t row) {
  return sampling::part_of(
      lse128::join_all(states + row * p.leaves, p.leaves, lse128::scale_of(temperature)));
}

__global__ void __launch_bounds__(kThreads) finish(Problem p, Sums sums) {
  const std::int64_t row = row_of_thread();
  if (row >= p.rows) return;
  const std::int64_t target = sums.target[row];
  sampling::Part kept, all;
  if (target >= 0) {
    if (sums.kept) kept = joined_leaves(p, sums.kept, sums.temperature[row], row);
    all = sums.all ? joined_leaves(p, sums.all, sums.raw_temperature[row], row) : kept;
  }
  if (p.partials) {
    if (target >= 0) sampling::put(p.partials + row * p.partials_stride, kept, all);
    return;
  }
  float logp = simt::from_float<float>(__builtin_nanf("")), raw = logp;
  if (target >= 0) {
    const sampling::Parameters r = sampling::parameters_of(p, row);
    const float z =
        sampling::capped(rows::round_to(p.round, rows::load(p.type, p.logits_of(row), target)), p.softcap);
    logp = sampling::log_probability(z, kept, r.tau);
    raw = sampling::log_probability(z, all, r.raw_tau);
  }
  if (p.logp) p.logp[row] = logp;
  if (p.logp_raw) p.logp_raw[row] = raw;
  if (!p.status || p.status[row] != static_cast<std::int32_t>(sampling::Audit::ok)) return;
  sampling::Drawn d;
  d.token = p.recorded[row], d.recorded_kept = true;
  d.logp = logp, d.logp_raw = raw;
  p.status[row] = static_cast<std::int32_t>(sampling::compared(p, row, d));
}

inline dim3 blocks_of(const Problem& p) {
  return dim3(static_cast<unsigned>((p.rows + kThreads - 1) / kThreads));
}
inline void launch_note(const Problem& p, const Sums& sums, hipStream_t stream) {
  if (p.rows > 0) hipLaunchKernelGGL(note, blocks_of(p), dim3(kThreads), 0, stream, p, sums);
}
inline void launch_finish(const Problem& p, const Sums& sums, hipStream_t stream) {
  if (p.rows > 0) hipLaunchKernelGGL(finish, blocks_of(p), dim3(kThreads), 0, stream, p, sums);
}

}  // namespace rlk::cuda::sample
