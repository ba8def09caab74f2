#include "lm_head_nvcc.hpp"
#include "simt/lm_head/launch.hpp"
#include "simt/on_device.hpp"

namespace {

// Device memory with the bytes of a host array, which it gives back when asked.
class Mirror {
 public:
  Mirror(const void* host, std::size_t bytes) : host_(host), bytes_(host == nullptr ? 0 : bytes) {
    if (bytes_ == 0) return;
    error_ = hipMalloc(&data_, bytes_);
    if (error_ == hipSuccess) error_ = hipMemcpy(data_, host_, bytes_, hipMemcpyHostToDevice);
  }
  ~Mirror() { (void)hipFree(data_); }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  hipError_t error() const { return error_; }
  void* data() const { return data_; }
  hipError_t give_back() { return hipMemcpy(const_cast<void*>(host_), data_, bytes_, hipMemcpyDeviceToHost); }

 private:
  const void* host_;
  std::size_t bytes_;
  void* data_ = nullptr;
  hipError_t error_ = hipSuccess;
};

}  // namespace

const char* run_on_gpu(rlk::simt::lm_head::Product p, const Bytes& bytes, rlk::simt::lm_head::Sum sum) {
  const Mirror a(p.a.data, bytes.a), b(p.b.data, bytes.b), bias(p.bias, bytes.bias);
  Mirror out(p.out, bytes.out);
  for (const hipError_t error : {a.error(), b.error(), bias.error(), out.error()})
    if (error != hipSuccess) return rlk::simt::words_of(error);
  p.a.data = a.data(), p.b.data = b.data(), p.bias = bias.data(), p.out = out.data();
  hipError_t error = rlk::simt::lm_head::launch(p, sum, nullptr);
  if (error == hipSuccess) error = out.give_back();
  return rlk::simt::words_of(error);
}

bool gpu_is_here() {
  int count = 0;
  return hipGetDeviceCount(&count) == hipSuccess && count > 0;
}
