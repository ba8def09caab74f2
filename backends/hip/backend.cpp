// The HIP backend: its table of implementations, the AMD GPUs it sees, and the services that let the harness
// put tensors on them. Without libamdhip64 the plugin does not load, without a GPU it says so.
#include <hip/hip_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "rlk/plugin.h"
#include "simt/device_services.hpp"
#include "simt/portable.hpp"

namespace rlk::hip {

#define RLK_IMPLEMENTATION(name) extern const rlk_implementation name;
#include "hip/implementations.def"
#undef RLK_IMPLEMENTATION

namespace {

struct Runtime {
  static constexpr const char* kName = "hip";
  using Error = hipError_t;
  static constexpr Error kSuccess = hipSuccess;
  static const char* words(Error error) { return hipGetErrorString(error); }
  static Error current_device(int* id) { return hipGetDevice(id); }
  static Error use_device(int id) { return hipSetDevice(id); }
  static bool has_context() { return true; }
  static Error allocate(void** out, std::size_t bytes) { return hipMalloc(out, bytes); }
  static Error release(void* data) { return hipFree(data); }
  static Error copy_in(void* to, const void* from, std::size_t bytes) {
    // A small copy of pageable memory may return when it is staged: a stream of one's own could look too
    // early.
    const Error error = hipMemcpy(to, from, bytes, hipMemcpyHostToDevice);
    return error == hipSuccess ? hipStreamSynchronize(nullptr) : error;
  }
  static Error copy_out(void* to, const void* from, std::size_t bytes) {
    return hipMemcpy(to, from, bytes, hipMemcpyDeviceToHost);
  }
  static hipStream_t stream_of(void* handle) { return static_cast<hipStream_t>(handle); }
  static Error synchronize(void* stream) { return hipStreamSynchronize(stream_of(stream)); }
  static Error stream_create(void** stream) {
    return hipStreamCreateWithFlags(reinterpret_cast<hipStream_t*>(stream), hipStreamNonBlocking);
  }
  static Error stream_destroy(void* stream) { return hipStreamDestroy(stream_of(stream)); }
};
using Services = simt::DeviceServices<Runtime>;

const rlk_implementation* const kOwn[] = {
#define RLK_IMPLEMENTATION(name) &name,
#include "hip/implementations.def"
#undef RLK_IMPLEMENTATION
};
const std::vector<const rlk_implementation*> kImplementations = simt::with_portable(kOwn);

int32_t devices(rlk_device* out, int32_t capacity, char* reason, size_t reason_size) {
  int count = 0;
  const hipError_t error = hipGetDeviceCount(&count);
  if (error != hipSuccess || count == 0) {
    std::snprintf(
        reason, reason_size, "%s",
        error == hipSuccess || error == hipErrorNoDevice ? "no AMD GPU here" : hipGetErrorString(error));
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

int32_t describe(const rlk_device*, char* out, size_t size) {
  int driver = 0, runtime = 0;
  (void)hipDriverGetVersion(&driver);
  (void)hipRuntimeGetVersion(&runtime);
  std::snprintf(out, size, "HIP driver %d, runtime %d", driver, runtime);
  return RLK_OK;
}

// No graph capture: what it would promise was never seen on a GPU here.
constexpr rlk_device_services kServices = Services::table(describe);

const rlk_backend kBackend = {sizeof(rlk_backend),
                              RLK_ABI_MAJOR,
                              RLK_ABI_MINOR,
                              "hip",
                              RLK_VERSION,
                              "AMD GPUs: portable kernels",
                              kImplementations.data(),
                              static_cast<uint32_t>(kImplementations.size()),
                              nullptr,
                              0,
                              devices,
                              nullptr,
                              &kServices};

}  // namespace
}  // namespace rlk::hip

extern "C" RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host* host) {
  if (host_abi_major != RLK_ABI_MAJOR) return nullptr;
  rlk::hip::Services::host = host;
  return &rlk::hip::kBackend;
}
