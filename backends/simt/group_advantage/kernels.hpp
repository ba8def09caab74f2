// The portable GPU kernel of group_advantage (arithmetic loss32/f64): the bits of the native backend on every GPU. A thread
// has a group: groups are some ten rewards, and their sums have an order. Rewards of no group have advantage 0.
#pragma once

#include "arithmetic/group_advantage/advantage.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::group_advantage {

using loss32::GroupProblem;

inline constexpr int kThreads = 64;

__global__ void __launch_bounds__(kThreads) groups(GroupProblem p) {
  const std::int64_t group = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (group < p.groups.parts) loss32::advantages_of(p, group);
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = p.groups.at(p.groups.parts) + group; i < p.groups.limit; i += threads)
    p.advantages[i] = 0;
}

inline void launch(const GroupProblem& p, hipStream_t stream) {
  const std::int64_t blocks = 1 + p.groups.parts / kThreads;
  hipLaunchKernelGGL(groups, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, p);
}

}  // namespace rlk::simt::group_advantage
