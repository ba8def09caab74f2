// Makes a device current for a scope, and the caller's again after it; one call of the runtime when it is current
// already. For host and device compilers, on either runtime:
//
//   struct Runtime {
//     using Error = hipError_t;
//     static constexpr Error kSuccess = hipSuccess;
//     static Error current_device(int* id), use_device(int id);
//     static bool has_context();  // false: use_device is due though the device is current
//   };
#pragma once

namespace rlk::simt {

template <class Runtime>
class DeviceGuard {
 public:
  using Error = typename Runtime::Error;

  explicit DeviceGuard(int device) : error_(Runtime::current_device(&before_)) {
    if (error_ != Runtime::kSuccess || (before_ == device && Runtime::has_context())) return;
    error_ = Runtime::use_device(device);
    changed_ = error_ == Runtime::kSuccess && before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(Runtime::use_device(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Error error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  Error error_;
};

}  // namespace rlk::simt
