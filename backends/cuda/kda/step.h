// kda_step for Hopper: one token of every sequence, K = V = 128, chunks of 64, a [K, V] state and a cache that begin on 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include "arithmetic/kda/problem.hpp"

namespace rlk::cuda::kda {

cudaError_t launch_step(const ::rlk::kda::Step& p, int device, cudaStream_t stream);

}  // namespace rlk::cuda::kda
