// What launchers on portable kernels share: the right device, and the runtime's words for an error.
#pragma once

#include <hip/hip_runtime.h>

#include <type_traits>

namespace rlk::simt {

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device), before_(device) {
    error_ = hipGetDevice(&before_);
    if (error_ == hipSuccess && before_ != device_) error_ = hipSetDevice(device_);
  }
  ~OnDevice() {
    if (before_ != device_) static_cast<void>(hipSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  hipError_t error() const { return error_; }

 private:
  int device_, before_;
  hipError_t error_;
};

inline const char* words_of(hipError_t error) {
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

// Launches on a device: null, or the runtime's words for what went wrong. A launch that returns nothing leaves its
// error with the runtime.
template <class Launch>
const char* on_device(int device, Launch&& launch) {
  const OnDevice on(device);
  if (on.error() != hipSuccess) return words_of(on.error());
  if constexpr (std::is_void_v<decltype(launch())>) {
    launch();
    return words_of(hipGetLastError());
  } else {
    return words_of(launch());
  }
}

}  // namespace rlk::simt
