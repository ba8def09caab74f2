// kda_step on Hopper: the kernel of step/.
#include <algorithm>

#include "cuda/kda/step.h"
#include "cuda/kda/step/row.cuh"

namespace rlk::cuda::kda {
namespace {

using namespace step;

__global__ void __launch_bounds__(step::kThreads, 1) step_kernel(const __grid_constant__ Step p) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(&s.full[slot], 1);
      barrier_init(&s.empty[slot], kHalf);
    }
    barrier_init(&s.closed, 1);
    fence_barrier_init();
  }
  __syncthreads();
  // What the kernel before this one wrote may be read from here on, and the one behind it may begin as far as here.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (thread < kConsumers) {
    consume(p, s, blockIdx.x, gridDim.x, {thread, thread % kHalf, thread < kHalf});
  } else if (thread == kConsumers) {
    produce(p, s, blockIdx.x, gridDim.x);
  }
}

}  // namespace

cudaError_t launch_step(const Step& p, int device, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  static_assert(kBytes <= 227 * 1024, "what a block may have");
  const std::int64_t tasks = p.sequences * p.value_heads;
  if (tasks == 0) return cudaSuccess;
  int multiprocessors = 0;
  if (const cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  if (const cudaError_t e =
          cudaFuncSetAttribute(step_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      e != cudaSuccess)
    return e;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(tasks, multiprocessors));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(step::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, step_kernel, p);
}

}  // namespace rlk::cuda::kda
