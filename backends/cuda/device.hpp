// What every CUDA implementation needs around its launch: the right device, the stream, one error path.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "rlk/backend.hpp"

namespace rlk::cuda {

// Makes a device current for a scope. Free when it already is, which is the common case.
//
// A thread that has done nothing yet is told that device 0 is current, but has no context, without which
// cuBLASLt cannot launch: setting the device, even to the same, brings it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    static thread_local bool has_context = false;
    if (cudaGetDevice(&previous_) != cudaSuccess) return;
    if (previous_ == device && has_context) return;
    has_context = cudaSetDevice(device) == cudaSuccess;
    changed_ = has_context && previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream()); }

inline rlk_code check(const Call& call, const char* op, cudaError_t error) {
  if (error == cudaSuccess) return RLK_OK;
  return call.fail(RLK_BACKEND_ERROR, std::string(op) + ": " + cudaGetErrorString(error));
}

}  // namespace rlk::cuda
