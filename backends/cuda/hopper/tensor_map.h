// The tensor-map encoder comes from the driver at run time, so that this library loads on machines without
// one.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace rlk::cuda::hopper {

using Encode = decltype(&cuTensorMapEncodeTiled);
inline Encode encoder() {
  static const Encode found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      return Encode{};
    return reinterpret_cast<Encode>(entry);
  }();
  return found;
}

}  // namespace rlk::cuda::hopper
