// Launchers of rms_norm's gradients on Hopper.
#include "cuda/rms_norm/gradients.cuh"
#include "cuda/rms_norm/sm90.h"
#include "simt/join.hpp"
#include "simt/on_device.hpp"

namespace rlk::cuda::rms_norm {
namespace {

template <class S, bool Sum>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    gradients(const __grid_constant__ Problem p, float* shares) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  auto& all = *simt::dynamic_shared<Shared<S>>();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 2 * S::kTeams) barrier_init(&all.barriers[0][0] + thread, 1);
  fence_barrier_init();
  cluster_arrive_relaxed();
  cluster_wait();
  gradients_of<S, Sum>(p, all, Share(p, blockIdx.x / S::kRanks), S::kRanks > 1 ? cluster_rank() : 0, shares);
}

// The shares' sum. What comes before is waited for here, so that this launch costs no time of its own.
inline constexpr int kJoinThreads = 256;
__global__ void __launch_bounds__(kJoinThreads) join(const __grid_constant__ Problem p, const float* shares) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const std::int64_t i = std::int64_t{blockIdx.x} * simt::kJoinChannels + threadIdx.x % simt::kJoinChannels;
  const double sum =
      simt::ascending_sum<kJoinThreads>(shares + i, p.width, static_cast<int>(p.blocks()), i < p.width);
  if (i < p.width && threadIdx.x < simt::kJoinChannels) rows::store(p.d_weight_type, p.d_weight, i, sum);
}

cudaError_t launch_join(const Problem& p, const float* shares, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((p.width + simt::kJoinChannels - 1) / simt::kJoinChannels));
  config.blockDim = dim3(kJoinThreads);
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, join, p, shares);
}

template <class S>
cudaError_t launch_gradients(const Problem& p, float* shares, cudaStream_t stream) {
  const auto kernel = p.d_sum ? gradients<S, true> : gradients<S, false>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(sizeof(Shared<S>)));
      e != cudaSuccess)
    return e;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.blocks() * S::kRanks));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = sizeof(Shared<S>);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {S::kRanks, 1, 1};
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, shares);
}

#ifndef RLK_TEAM
#  define RLK_TEAM 1
#endif

cudaError_t launch(const Problem& p, float* shares, cudaStream_t stream) {
#if RLK_TEAM == 1
  const auto start = p.width <= 1024   ? launch_gradients<Shape<4, 2, 1, 4, 4>>
                     : p.width <= 2048 ? launch_gradients<Shape<4, 1, 2, 2, 4>>
                     : p.width <= 4096 ? launch_gradients<Shape<8, 1, 4, 1, 2>>
                                       : launch_gradients<Shape<8, 1, 8, 1, 1>>;
#elif RLK_TEAM == 2
  const auto start = p.width <= 1024   ? launch_gradients<Shape<8, 4, 1, 4, 2>>
                     : p.width <= 2048 ? launch_gradients<Shape<8, 2, 2, 2, 2>>
                     : p.width <= 4096 ? launch_gradients<Shape<16, 2, 4, 1, 1>>
                                       : launch_gradients<Shape<8, 1, 8, 1, 1>>;
#else
  const auto start = p.width <= 1024   ? launch_gradients<Shape<8, 4, 1, 4, 2>>
                     : p.width <= 2048 ? launch_gradients<Shape<16, 4, 2, 2, 1>>
                     : p.width <= 4096 ? launch_gradients<Shape<16, 4, 4, 1, 1>>
                                       : launch_gradients<Shape<8, 2, 8, 1, 1>>;
#endif
  const cudaError_t error = start(p, shares, stream);
  return error != cudaSuccess || p.axes.rows <= kBlock ? error : launch_join(p, shares, stream);
}

}  // namespace

bool suits(const Problem& p) {
  const auto whole = [&](const rows::Tensor& t) { return rows::lies_whole(p.axes, t); };
  return p.d_weight && (p.d_x || p.d_residual) && p.weight && p.weight_type == rows::Type::bf16 &&
         !p.residual && !p.gate && !p.d_gate && p.axes.count == 1 && p.axes.rows >= 1000 && p.width >= 768 &&
         p.width <= 8192 && p.width % kPack == 0 && whole(p.x) && whole(p.d_y) && whole(p.d_sum) &&
         whole(p.d_x) && whole(p.d_residual);
}

const char* run_gradients(const Problem& p, void* workspace, void* stream, int device) {
  return simt::on_device(
      device, [&] { return launch(p, static_cast<float*>(workspace), static_cast<cudaStream_t>(stream)); });
}

}  // namespace rlk::cuda::rms_norm
