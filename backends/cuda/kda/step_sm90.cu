// kda_step on Hopper: the kernels of step/ and step/stages/, which give the same bits.
#include <algorithm>

#include "cuda/kda/step.h"
#include "cuda/kda/step/row.cuh"
#include "cuda/kda/step/stages/columns.cuh"
#include "cuda/kda/step/stages/keys.cuh"

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

__global__ void __launch_bounds__(stages::kThreads, 1) stages_kernel(const __grid_constant__ Step p) {
  using namespace stages;
  extern __shared__ __align__(128) char memory[];
  stages::Shared& s = *reinterpret_cast<stages::Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  init_barriers(s, thread);
  __syncthreads();
  const int task = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  if (thread < kKeyThreads) {
    consume_keys(p, s, task, step, {thread, thread % stages::kHalf, thread < stages::kHalf});
  } else if (thread < kKeyThreads + kColumnThreads) {
    consume_columns(p, s, task, step, thread - kKeyThreads);
  } else if (thread == kKeyThreads + kColumnThreads) {
    produce_keys(p, s, task, step);
  } else if (thread == kKeyThreads + kColumnThreads + 32) {
    produce_columns(p, s, task, step);
  }
}

cudaError_t launch(void (*kernel)(Step), int threads, std::size_t bytes, std::int64_t blocks, const Step& p,
                   cudaStream_t stream) {
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
      e != cudaSuccess)
    return e;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

cudaError_t launch_step(const Step& p, int device, cudaStream_t stream) {
  constexpr std::size_t kMost = 227 * 1024;
  static_assert(sizeof(Shared) <= kMost && sizeof(stages::Shared) <= kMost, "what a block may have");
  const std::int64_t tasks = p.sequences * p.value_heads;
  if (tasks == 0) return cudaSuccess;
  int multiprocessors = 0;
  if (const cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  const std::int64_t blocks = std::min<std::int64_t>(tasks, multiprocessors);
  // Stages take longer for a task alone, and gain where a block has several.
  if (tasks <= 2 * multiprocessors)
    return launch(step_kernel, step::kThreads, sizeof(Shared), blocks, p, stream);
  return launch(stages_kernel, stages::kThreads, sizeof(stages::Shared), blocks, p, stream);
}

}  // namespace rlk::cuda::kda
