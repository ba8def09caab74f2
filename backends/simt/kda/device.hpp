// Launchers on the portable kernels, for the file of a GPU backend that its device compiler builds:
//   kda::Launchers kda_portable() { return kda::kernels::launchers(); }
#pragma once

#include "simt/kda/kernels.hpp"
#include "simt/kda/launchers.hpp"

namespace rlk::kda::kernels {

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (hipGetDevice(&previous_) == hipSuccess && previous_ != device)
      changed_ = hipSetDevice(device) == hipSuccess;
  }
  ~DeviceScope() {
    if (changed_) (void)hipSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline const char* outcome() {
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

inline const char* run_forward(const Problem& p, void* workspace, void* stream, int device) {
  const DeviceScope scope(device);
  launch_forward(p, workspace, static_cast<hipStream_t>(stream));
  return outcome();
}
inline const char* run_backward(const Problem& p, void* workspace, void* stream, int device) {
  const DeviceScope scope(device);
  launch_backward(p, workspace, static_cast<hipStream_t>(stream));
  return outcome();
}
inline const char* run_decode(const Problem& p, void*, void* stream, int device) {
  const DeviceScope scope(device);
  launch_decode(p, static_cast<hipStream_t>(stream));
  return outcome();
}
inline const char* run_gate(const Problem& p, void*, void* stream, int device) {
  const DeviceScope scope(device);
  launch_gate(p, static_cast<hipStream_t>(stream));
  return outcome();
}
inline const char* run_gate_backward(const Problem& p, void* workspace, void* stream, int device) {
  const DeviceScope scope(device);
  launch_gate_backward(p, workspace, static_cast<hipStream_t>(stream));
  return outcome();
}

inline Launchers launchers() {
  return {forward_bytes, backward_bytes, gate_backward_bytes, run_forward, run_backward,
          run_decode,    run_gate,       run_gate_backward};
}

}  // namespace rlk::kda::kernels
