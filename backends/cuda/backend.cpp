// The CUDA backend: its table of implementations, the devices it sees, and the services that let the harness
// put tensors on them. Links the static CUDA runtime only, so that it loads, and says why it cannot run, on a
// machine without a driver.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/device.hpp"
#include "cuda/lm_head/cublaslt.hpp"
#include "rlk/plugin.h"
#include "simt/device_services.hpp"
#include "simt/portable.hpp"

namespace rlk::cuda {

#define RLK_IMPLEMENTATION(name) extern const rlk_implementation name;
#include "cuda/implementations.def"
#undef RLK_IMPLEMENTATION

namespace {

struct DeviceRuntime : Runtime {
  static constexpr const char* kName = "cuda";
  static const char* words(Error error) { return cudaGetErrorString(error); }
  static Error allocate(void** out, std::size_t bytes) { return cudaMalloc(out, bytes); }
  static Error release(void* data) { return cudaFree(data); }
  static Error copy_in(void* to, const void* from, std::size_t bytes) {
    // A small copy of pageable memory returns when it is staged: a stream of one's own could look too early.
    const Error error = cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
    return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
  }
  static Error copy_out(void* to, const void* from, std::size_t bytes) {
    return cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
  }
  static cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
  static Error synchronize(void* stream) { return cudaStreamSynchronize(stream_of(stream)); }
  static Error stream_create(void** stream) {
    return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
  }
  static Error stream_destroy(void* stream) { return cudaStreamDestroy(stream_of(stream)); }
};
using Services = simt::DeviceServices<DeviceRuntime>;

const rlk_implementation* const kOwn[] = {
#define RLK_IMPLEMENTATION(name) &name,
#include "cuda/implementations.def"
#undef RLK_IMPLEMENTATION
};
const std::vector<const rlk_implementation*> kImplementations = simt::with_portable(kOwn);

// CUDA has one error for a driver that is not there and one that is too old; a user needs to know which.
std::string outage(cudaError_t error) {
  if (error == cudaSuccess || error == cudaErrorNoDevice) return "no NVIDIA GPU here";
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (error == cudaErrorInsufficientDriver && driver == 0) return "no NVIDIA driver here";
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  if (error == cudaErrorInsufficientDriver)
    return "the NVIDIA driver here serves CUDA " + version(driver) + ", this build needs " + version(runtime);
  return cudaGetErrorString(error);
}

int32_t devices(rlk_device* out, int32_t capacity, char* reason, size_t reason_size) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::snprintf(reason, reason_size, "%s", outage(error).c_str());
    return 0;
  }
  for (int id = 0; id < count && id < capacity; ++id) {
    int major = 0, minor = 0;
    cudaDeviceProp properties{};
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    out[id] = {kDLCUDA, id, major * 10 + minor, {}};
    if (cudaGetDeviceProperties(&properties, id) == cudaSuccess)
      std::string_view(properties.name).copy(out[id].name, sizeof out[id].name - 1);
  }
  return count;
}

int32_t capture_begin(const rlk_device* device, void* stream) {
  return Services::on_device(device, "begin a capture", [&] {
    return cudaStreamBeginCapture(DeviceRuntime::stream_of(stream), cudaStreamCaptureModeThreadLocal);
  });
}
int32_t capture_end(const rlk_device* device, void* stream, void** graph) {
  return Services::on_device(device, "end a capture", [&] {
    cudaGraph_t recorded = nullptr;
    if (cudaError_t e = cudaStreamEndCapture(DeviceRuntime::stream_of(stream), &recorded); e != cudaSuccess)
      return e;
    const cudaError_t e = cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(graph), recorded, 0);
    cudaGraphDestroy(recorded);
    return e;
  });
}
int32_t graph_launch(const rlk_device* device, void* graph, void* stream) {
  return Services::on_device(device, "launch a graph", [&] {
    return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), DeviceRuntime::stream_of(stream));
  });
}
int32_t graph_destroy(const rlk_device* device, void* graph) {
  return Services::on_device(device, "destroy a graph",
                             [&] { return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); });
}
int32_t describe(const rlk_device* device, char* out, size_t size) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::string text = "CUDA driver " + std::to_string(driver) + ", runtime " + std::to_string(runtime);
  const lm_head::CublasLt& lt = lm_head::cublaslt();
  text +=
      lt.reason.empty() ? ", cuBLASLt " + std::to_string(lt.get_version()) : ", no cuBLASLt: " + lt.reason;
  for (const std::string& name : lm_head::cublaslt_ambient()) text += ", " + name + " is set";
  std::snprintf(out, size, "%s", text.c_str());
  (void)device;
  return RLK_OK;
}

constexpr rlk_device_services kServices = [] {
  rlk_device_services t = Services::table(describe);
  t.capture_begin = capture_begin, t.capture_end = capture_end;
  t.graph_launch = graph_launch, t.graph_destroy = graph_destroy;
  return t;
}();

const rlk_backend kBackend = {sizeof(rlk_backend),
                              RLK_ABI_MAJOR,
                              RLK_ABI_MINOR,
                              "cuda",
                              RLK_VERSION,
                              "NVIDIA GPUs: own kernels, and cuBLASLt where it is installed",
                              kImplementations.data(),
                              static_cast<uint32_t>(kImplementations.size()),
                              nullptr,
                              0,
                              devices,
                              nullptr,
                              &kServices};

}  // namespace
}  // namespace rlk::cuda

extern "C" RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host* host) {
  if (host_abi_major != RLK_ABI_MAJOR) return nullptr;
  rlk::cuda::Services::host = host;
  return &rlk::cuda::kBackend;
}
