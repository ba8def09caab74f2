// What launchers on portable kernels share: the right device, and the runtime's words for an error.
#pragma once

#include <hip/hip_runtime.h>

#include <type_traits>

#include "simt/device_guard.hpp"

namespace rlk::simt {

struct HipRuntime {
  using Error = hipError_t;
  static constexpr Error kSuccess = hipSuccess;
  static Error current_device(int* id) { return hipGetDevice(id); }
  static Error use_device(int id) { return hipSetDevice(id); }
  static bool has_context() { return true; }  // a launch brings it
};

inline const char* words_of(hipError_t error) {
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

// Launches on a device: null, or the runtime's words for what went wrong. A launch that returns nothing leaves its
// error with the runtime.
template <class Launch>
const char* on_device(int device, Launch&& launch) {
  const DeviceGuard<HipRuntime> guard(device);
  if (guard.error() != hipSuccess) return words_of(guard.error());
  if constexpr (std::is_void_v<decltype(launch())>) {
    launch();
    return words_of(hipGetLastError());
  } else {
    return words_of(launch());
  }
}

}  // namespace rlk::simt
