// A long sequence of few heads: its chunks in groups, the recurrences beside the rest, see groups_sm90.cu.
#pragma once

#include "cuda/beside.hpp"
#include "cuda/kda/device.cuh"

namespace rlk::cuda::kda {

// Whether a call is taken so; changes no bit.
bool in_groups(const Job& job, bool backward);
// In place of preparation and scan; of these (`prepare`: the first too), the other scan and the gradients.
cudaError_t forward_in_groups(const Job& job, cudaStream_t stream, const Beside& beside);
cudaError_t backward_in_groups(const Job& job, bool prepare, cudaStream_t stream, const Beside& beside);

}  // namespace rlk::cuda::kda
