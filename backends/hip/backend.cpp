// The HIP backend: its table of implementations, the AMD GPUs it sees, and the services that let the harness
// put tensors on them. Without libamdhip64 the plugin does not load, without a GPU it says so.
#include <hip/hip_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

#include "rlk/plugin.h"

namespace rlk::hip {

#define RLK_IMPLEMENTATION(name) extern const rlk_implementation name;
#include "hip/implementations.def"
#undef RLK_IMPLEMENTATION

namespace {

const rlk_host* host_services = nullptr;

const rlk_implementation* const kImplementations[] = {
#define RLK_IMPLEMENTATION(name) &name,
#include "hip/implementations.def"
#undef RLK_IMPLEMENTATION
};

int32_t devices(rlk_device* out, int32_t capacity, char* reason, size_t reason_size) {
  int count = 0;
  const hipError_t error = hipGetDeviceCount(&count);
  if (error != hipSuccess || count == 0) {
    std::snprintf(reason, reason_size, "%s", error == hipSuccess ? "no AMD GPU" : hipGetErrorString(error));
    return 0;
  }
  for (int id = 0; id < count && id < capacity; ++id) {
    out[id] = {kDLROCM, id, 0, {}};
    hipDeviceProp_t properties{};
    if (hipGetDeviceProperties(&properties, id) != hipSuccess) continue;
    // "gfx90a:sramecc+:xnack-" is 0x90a
    if (std::strncmp(properties.gcnArchName, "gfx", 3) == 0)
      out[id].arch = static_cast<int32_t>(std::strtol(properties.gcnArchName + 3, nullptr, 16));
    std::snprintf(out[id].name, sizeof out[id].name, "%.63s", properties.name);
  }
  return count;
}

// Runs one runtime call on the device and turns its error into the host's words.
template <class F>
int32_t on_device(const rlk_device* device, const char* what, F&& f) {
  int previous = device->id;
  (void)hipGetDevice(&previous);
  hipError_t error = previous == device->id ? hipSuccess : hipSetDevice(device->id);
  if (error == hipSuccess) error = f();
  if (previous != device->id) (void)hipSetDevice(previous);
  if (error == hipSuccess) return RLK_OK;
  return host_services->fail(RLK_BACKEND_ERROR,
                             (std::string("hip: ") + what + ": " + hipGetErrorString(error)).c_str());
}

hipStream_t stream_of(void* handle) { return static_cast<hipStream_t>(handle); }

int32_t allocate(const rlk_device* device, uint64_t bytes, void** out) {
  return on_device(device, "allocate", [&] { return hipMalloc(out, bytes ? bytes : 1); });
}
int32_t release(const rlk_device* device, void* data) {
  return on_device(device, "release", [&] { return hipFree(data); });
}
int32_t copy_in(const rlk_device* device, void* to, const void* from, uint64_t bytes) {
  return on_device(device, "copy in", [&] { return hipMemcpy(to, from, bytes, hipMemcpyHostToDevice); });
}
int32_t copy_out(const rlk_device* device, void* to, const void* from, uint64_t bytes) {
  return on_device(device, "copy out", [&] { return hipMemcpy(to, from, bytes, hipMemcpyDeviceToHost); });
}
int32_t synchronize(const rlk_device* device, void* stream) {
  return on_device(device, "synchronize", [&] { return hipStreamSynchronize(stream_of(stream)); });
}
int32_t stream_create(const rlk_device* device, void** stream) {
  return on_device(device, "create a stream", [&] {
    return hipStreamCreateWithFlags(reinterpret_cast<hipStream_t*>(stream), hipStreamNonBlocking);
  });
}
int32_t stream_destroy(const rlk_device* device, void* stream) {
  return on_device(device, "destroy a stream", [&] { return hipStreamDestroy(stream_of(stream)); });
}
int32_t describe(const rlk_device*, char* out, size_t size) {
  int driver = 0, runtime = 0;
  (void)hipDriverGetVersion(&driver);
  (void)hipRuntimeGetVersion(&runtime);
  std::snprintf(out, size, "HIP driver %d, runtime %d", driver, runtime);
  return RLK_OK;
}

// No graph capture: what it would promise was never seen on a GPU here.
const rlk_device_services kServices = {sizeof(rlk_device_services),
                                       allocate,
                                       release,
                                       copy_in,
                                       copy_out,
                                       synchronize,
                                       stream_create,
                                       stream_destroy,
                                       nullptr,
                                       nullptr,
                                       nullptr,
                                       nullptr,
                                       describe};

const rlk_backend kBackend = {sizeof(rlk_backend),
                              RLK_ABI_MAJOR,
                              RLK_ABI_MINOR,
                              "hip",
                              RLK_VERSION,
                              "AMD GPUs: portable kernels",
                              kImplementations,
                              std::size(kImplementations),
                              nullptr,
                              0,
                              devices,
                              nullptr,
                              &kServices};

}  // namespace
}  // namespace rlk::hip

extern "C" RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host* host) {
  if (host_abi_major != RLK_ABI_MAJOR) return nullptr;
  rlk::hip::host_services = host;
  return &rlk::hip::kBackend;
}
