// cuBLAS is opened at run time: this program builds everywhere and says "no device" where there is none.
#include <dlfcn.h>

#include "child.hpp"

using namespace rlk::ambient;

namespace {

void* first_of(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (void* handle = dlopen(name, RTLD_NOW)) return handle;
  return nullptr;
}

struct Cuda {
  void* runtime = first_of({"libcudart.so.13", "libcudart.so.12", "libcudart.so"});
  void* blas = first_of({"libcublas.so.13", "libcublas.so.12", "libcublas.so"});
  template <class F>
  F* get(void* from, const char* name) const {
    return reinterpret_cast<F*>(from ? dlsym(from, name) : nullptr);
  }
  int (*allocate)(void**, std::size_t) = get<int(void**, std::size_t)>(runtime, "cudaMalloc");
  int (*copy)(void*, const void*, std::size_t,
              int) = get<int(void*, const void*, std::size_t, int)>(runtime, "cudaMemcpy");
  int (*create)(void**) = get<int(void**)>(blas, "cublasCreate_v2");
  using Sgemm = int(void*, int, int, int, int, int, const float*, const void*, int, const void*, int,
                    const float*, void*, int);
  Sgemm* sgemm = get<Sgemm>(blas, "cublasSgemm_v2");

  void* to_device(const void* data, std::size_t bytes) const {
    void* out = nullptr;
    if (!allocate || allocate(&out, bytes) != 0) return nullptr;
    if (data) copy(out, data, bytes, 1);
    return out;
  }
  std::vector<float> back(const void* from) const {
    std::vector<float> out(kM * kN);
    copy(out.data(), from, out.size() * 4, 2);
    return out;
  }
};

void through_rlk(const Cuda& cuda, const char* name, rlk::DType type, void* a, void* b, void* to) {
  const DLDevice device{kDLCUDA, 0};
  const rlk::Tensor h(a, {kM, kK}, type, device), w(b, {kN, kK}, type, device),
      y(to, {kM, kN}, rlk::DType::f32, device);
  const rlk::Status s =
      rlk::lm_head({.hidden = h, .weight = w, .out = y}, {.precision = rlk::Precision::strict});
  s ? print("rlk", name, cuda.back(to)) : print("rlk", name, s.message());
}

}  // namespace

int main() {
  const Cuda cuda;
  const std::vector<float> a = numbers(kM * kK, 1), b = numbers(kN * kK, 2);
  const std::vector<uint16_t> a16 = halved(a), b16 = halved(b);
  void* const x = cuda.to_device(a.data(), a.size() * 4);
  if (!x || !cuda.create || !cuda.sgemm) return std::puts("no device"), 0;
  void *const w = cuda.to_device(b.data(), b.size() * 4), *const y = cuda.to_device(nullptr, kM * kN * 4),
              *const x16 = cuda.to_device(a16.data(), a16.size() * 2),
              *const w16 = cuda.to_device(b16.data(), b16.size() * 2);
  void* handle = nullptr;
  const float one = 1, zero = 0;
  // Row-major y = x w^T is column-major y^T = w x^T.
  if (cuda.create(&handle) == 0 &&
      cuda.sgemm(handle, 1, 0, kN, kM, kK, &one, w, kK, x, kK, &zero, y, kN) == 0)
    print("direct", "fp32", cuda.back(y));
  through_rlk(cuda, "fp32", rlk::DType::f32, x, w, y);
  through_rlk(cuda, "bf16", rlk::DType::bf16, x16, w16, y);
}
