// Launchers of rms_norm's gradients on Hopper.
#include "cuda/hopper/launch.h"
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
  gradients_of<S, Sum>(p, all, Share(p, blockIdx.x / kRanks), cluster_rank(), shares);
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
  return hopper::launch_early(join, (p.width + simt::kJoinChannels - 1) / simt::kJoinChannels, kJoinThreads,
                              0, stream, p, shares);
}

template <class S>
cudaError_t launch_gradients(const Problem& p, float* shares, cudaStream_t stream) {
  const auto kernel = p.d_sum ? gradients<S, true> : gradients<S, false>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(sizeof(Shared<S>)));
      e != cudaSuccess)
    return e;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.blocks() * kRanks));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = sizeof(Shared<S>);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kRanks, 1, 1};
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, shares);
}

// What has rows of up to a width, and from how many elements on it was faster than the portable kernels (H200).
struct Form {
  std::int64_t width, least;
  bool alone;  // two SMs have one cluster at a time
  cudaError_t (*launch)(const Problem&, float*, cudaStream_t);
};
constexpr std::int64_t kMillion = 1 << 20, kLeastWidth = 1536, kMostWidth = 8192;
constexpr Form kForms[] = {
    {2048, 14 * kMillion, false, launch_gradients<Shape<8, 2, 2, 2>>},
    {4096, 20 * kMillion, true, launch_gradients<Shape<16, 4, 1, 1>>},
    {kMostWidth, 28 * kMillion, true, launch_gradients<Shape<8, 8, 1, 1>>},
};
const Form& form_of(const Problem& p) {
  const Form* form = kForms;
  while (p.width > form->width) ++form;
  return *form;
}

// Clusters that are alone come in waves of 66, and a wave takes as long for few as for all.
bool fills_waves(std::int64_t clusters) {
  constexpr std::int64_t kWave = 66;
  const std::int64_t waves = (clusters + kWave - 1) / kWave;
  return 10 * clusters >= 7 * waves * kWave;
}
bool pays(const Problem& p) {
  if (p.width < kLeastWidth || p.width > kMostWidth) return false;
  const Form& form = form_of(p);
  return p.axes.rows * p.width >= form.least && (!form.alone || fills_waves(p.blocks()));
}

cudaError_t launch(const Problem& p, float* shares, cudaStream_t stream) {
  const cudaError_t error = form_of(p).launch(p, shares, stream);
  return error != cudaSuccess ? error : launch_join(p, shares, stream);
}

}  // namespace

bool suits(const Problem& p) {
  const auto whole = [&](const rows::Tensor& t) { return rows::lies_whole(p.axes, t); };
  return pays(p) && p.d_weight && (p.d_x || p.d_residual) && p.weight && p.weight_type == rows::Type::bf16 &&
         !p.residual && !p.gate && !p.d_gate && p.axes.count == 1 && p.width % kPack == 0 && whole(p.x) &&
         whole(p.d_y) && whole(p.d_sum) && whole(p.d_x) && whole(p.d_residual);
}

const char* run_gradients(const Problem& p, void* workspace, void* stream, int device) {
  return simt::on_device(
      device, [&] { return launch(p, static_cast<float*>(workspace), static_cast<cudaStream_t>(stream)); });
}

}  // namespace rlk::cuda::rms_norm
