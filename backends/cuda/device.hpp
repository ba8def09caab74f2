// What every CUDA implementation needs around its launch: the right device, the stream, one error path.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "rlk/backend.hpp"
#include "simt/device_guard.hpp"

namespace rlk::cuda {

// The part of the CUDA runtime that simt/ is written on.
class Runtime {
 public:
  using Error = cudaError_t;
  static constexpr Error kSuccess = cudaSuccess;
  static Error current_device(int* id) { return cudaGetDevice(id); }
  // A thread that has done nothing yet is told that device 0 is current, but has no context, without which
  // cuBLASLt cannot launch: setting the device, even to the same, brings it.
  static bool has_context() { return has_context_; }
  static Error use_device(int id) {
    const Error error = cudaSetDevice(id);
    has_context_ = error == cudaSuccess;
    return error;
  }

 private:
  static inline thread_local bool has_context_ = false;
};
using DeviceGuard = simt::DeviceGuard<Runtime>;

inline cudaStream_t stream_of(const Call& call) { return static_cast<cudaStream_t>(call.stream()); }

inline rlk_code check(const Call& call, const char* op, cudaError_t error) {
  if (error == cudaSuccess) return RLK_OK;
  return call.fail(RLK_BACKEND_ERROR, std::string(op) + ": " + cudaGetErrorString(error));
}

}  // namespace rlk::cuda
