// Launches of kernels that know of the one before them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace rlk::cuda::hopper {

// A kernel that may begin while the one before it ends: it waits for that itself (griddepcontrol.wait).
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), std::int64_t blocks, int threads, int shared,
                         cudaStream_t stream, const Arguments&... arguments) {
  return launch_early(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared, stream, arguments...);
}

}  // namespace rlk::cuda::hopper
