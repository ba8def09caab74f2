// kda_step on Hopper: the kernels of step/ and step/stages/, which give the same bits.
#include <algorithm>

#include "cuda/hopper/launch.h"
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

cudaError_t launch(void (*kernel)(Step), int threads, int shared, std::int64_t blocks, const Step& p,
                   cudaStream_t stream) {
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      e != cudaSuccess)
    return e;
  return hopper::launch_early(kernel, blocks, threads, shared, stream, p);
}

}  // namespace

cudaError_t launch_step(const Step& p, int device, cudaStream_t stream) {
  constexpr int kFew = sizeof(Shared), kMany = sizeof(stages::Shared);
  static_assert(kFew <= 227 * 1024 && kMany <= 227 * 1024, "what a block may have");
  const std::int64_t tasks = p.sequences * p.value_heads;
  if (tasks == 0) return cudaSuccess;
  int multiprocessors = 0;
  if (const cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  const std::int64_t blocks = std::min<std::int64_t>(tasks, multiprocessors);
  // Stages take longer for a task alone, and gain where a block has several.
  if (tasks <= 2 * multiprocessors) return launch(step_kernel, step::kThreads, kFew, blocks, p, stream);
  return launch(stages_kernel, stages::kThreads, kMany, blocks, p, stream);
}

}  // namespace rlk::cuda::kda
