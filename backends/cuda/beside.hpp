// A second stream for a call whose kernels can run beside each other. Nobody waits in it for work that it
// would not wait for without it: what is borrowed has nothing unfinished in it but what comes from the
// caller's stream, or belongs to the graph that is being captured.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

namespace rlk::cuda {

class Beside {
 public:
  // Null where there is none to be had: the call then goes on in its own stream alone.
  static std::shared_ptr<Beside> borrow(cudaStream_t callers) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // looking at streams must not end a capture
    cudaThreadExchangeStreamCaptureMode(&mode);
    std::shared_ptr<Beside> found = find(callers);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return found;
  }

  cudaStream_t stream() const { return stream_; }
  // What comes next in `behind` waits for what is in `first` so far.
  cudaError_t order(cudaStream_t first, cudaStream_t behind) const {
    const cudaError_t error = cudaEventRecord(event_, first);
    return error == cudaSuccess ? cudaStreamWaitEvent(behind, event_, 0) : error;
  }

  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

 private:
  Beside() = default;

  static unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    return cudaStreamGetCaptureInfo(stream, &status, &id) == cudaSuccess &&
                   status != cudaStreamCaptureStatusNone
               ? id
               : 0;
  }
  static bool idle(cudaStream_t stream) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady) cudaGetLastError();  // no error
    return error == cudaSuccess;
  }
  // Of this device, in nobody's hands.
  static std::shared_ptr<Beside> find(cudaStream_t callers) {
    // Never freed: when the process ends the driver may be gone before us.
    static auto& all = *new std::vector<std::shared_ptr<Beside>>;
    static std::mutex lock;
    const std::lock_guard guard(lock);
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
    const unsigned long long capture = capture_of(callers);
    for (const auto& one : all) {
      if (one.use_count() > 1 || one->device_ != device) continue;
      const unsigned long long own = capture_of(one->stream_);
      if (own != 0 ? own != capture : one->callers_ != callers && !idle(one->stream_)) continue;
      one->callers_ = callers;
      return one;
    }
    std::shared_ptr<Beside> one(new Beside);
    int least = 0, greatest = 0;
    if (cudaDeviceGetStreamPriorityRange(&least, &greatest) != cudaSuccess ||
        cudaStreamCreateWithPriority(&one->stream_, cudaStreamNonBlocking, greatest) != cudaSuccess ||
        cudaEventCreateWithFlags(&one->event_, cudaEventDisableTiming) != cudaSuccess)
      return nullptr;
    one->device_ = device;
    one->callers_ = callers;
    all.push_back(one);
    return one;
  }

  int device_ = 0;
  cudaStream_t stream_ = nullptr, callers_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

}  // namespace rlk::cuda
