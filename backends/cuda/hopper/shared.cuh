// Shared memory as instructions address it: 32-bit offsets into the shared window. What takes a place there
// takes such an address or a pointer (`Place`, `Barrier`).
#pragma once

#include <cstdint>

namespace rlk::cuda::hopper {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ std::uint32_t shared_address(std::uint32_t address) { return address; }

}  // namespace rlk::cuda::hopper
