// The part of a GPU backend that does not depend on whose GPU it is: the services that let the harness put
// tensors on its devices. A backend names its runtime's calls and makes the table of them:
//
//   struct Runtime {  // and what device_guard.hpp asks of it
//     static constexpr const char* kName = "hip";
//     static const char* words(Error e) { return hipGetErrorString(e); }
//     static Error allocate(void**, std::size_t), release(void*);
//     static Error copy_in(void*, const void*, std::size_t), copy_out(void*, const void*, std::size_t);
//     static Error synchronize(void* stream), stream_create(void** stream), stream_destroy(void* stream);
//   };
#pragma once

#include <cstddef>
#include <string>

#include "rlk/plugin.h"
#include "simt/device_guard.hpp"

namespace rlk::simt {

template <class Runtime>
struct DeviceServices {
  using Error = typename Runtime::Error;

  static inline const rlk_host* host = nullptr;  // who asked for the backend

  // Runs one runtime call on the device and turns its error into the host's words.
  template <class F>
  static int32_t on_device(const rlk_device* device, const char* what, F&& f) {
    const DeviceGuard<Runtime> guard(device->id);
    const Error error = guard.error() == Runtime::kSuccess ? f() : guard.error();
    if (error == Runtime::kSuccess) return RLK_OK;
    return host->fail(RLK_BACKEND_ERROR,
                      (std::string(Runtime::kName) + ": " + what + ": " + Runtime::words(error)).c_str());
  }

  static int32_t allocate(const rlk_device* device, uint64_t bytes, void** out) {
    return on_device(device, "allocate", [&] { return Runtime::allocate(out, bytes ? bytes : 1); });
  }
  static int32_t release(const rlk_device* device, void* data) {
    return on_device(device, "release", [&] { return Runtime::release(data); });
  }
  static int32_t copy_in(const rlk_device* device, void* to, const void* from, uint64_t bytes) {
    return on_device(device, "copy in", [&] { return Runtime::copy_in(to, from, bytes); });
  }
  static int32_t copy_out(const rlk_device* device, void* to, const void* from, uint64_t bytes) {
    return on_device(device, "copy out", [&] { return Runtime::copy_out(to, from, bytes); });
  }
  static int32_t synchronize(const rlk_device* device, void* stream) {
    return on_device(device, "synchronize", [&] { return Runtime::synchronize(stream); });
  }
  static int32_t stream_create(const rlk_device* device, void** stream) {
    return on_device(device, "create a stream", [&] { return Runtime::stream_create(stream); });
  }
  static int32_t stream_destroy(const rlk_device* device, void* stream) {
    return on_device(device, "destroy a stream", [&] { return Runtime::stream_destroy(stream); });
  }

  // Without graph capture, which a backend may add.
  static constexpr rlk_device_services table(decltype(rlk_device_services::describe) describe) {
    rlk_device_services t{};
    t.struct_size = sizeof(rlk_device_services);
    t.allocate = allocate, t.release = release, t.copy_in = copy_in, t.copy_out = copy_out;
    t.synchronize = synchronize, t.stream_create = stream_create, t.stream_destroy = stream_destroy;
    t.describe = describe;
    return t;
  }
};

}  // namespace rlk::simt
