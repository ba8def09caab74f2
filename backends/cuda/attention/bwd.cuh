// The kernel of attention's backward on Hopper and its launch, for one element type.
#pragma once

#include <algorithm>

#include "cuda/attention/bwd_consumer.cuh"
#include "cuda/attention/bwd_producer.cuh"

namespace rlk::cuda::attention {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) backward_kernel(const __grid_constant__ BackwardJob job) {
  extern __shared__ __align__(1024) unsigned char raw[];
  const BackwardShared<S> shared(raw);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  // The join may have the SMs that this leaves, and what the stats' kernel has done is there.
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
  if (threadIdx.x >= S::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    produce_all<S>(job, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    BackwardConsumer<S, Side::keys> keys(job, shared, {});
    while (keys.run()) {
    }
    BackwardConsumer<S, Side::queries> queries(job, shared, keys.turns);
    while (queries.run()) {
    }
  }
}

// One side's tensors, in boxes of `box` rows.
inline bool map_side(const Backward& g, bool keys, int box, CUtensorMap (&maps)[2]) {
  const Problem& p = g.p;
  if (encoder() == nullptr) return false;
  if (!keys) {
    const std::int64_t outer = p.cu_q ? 1 : p.sequences;
    return map_tensor(maps[0], p.q, outer, p.queries, g.all_heads(), p.width, box) &&
           map_tensor(maps[1], g.d_out, outer, p.queries, g.all_heads(), p.value_width, box);
  }
  const std::int64_t outer = p.cu_k ? 1 : p.sequences;
  return map_tensor(maps[0], p.k, outer, p.room, p.heads, p.width, box) &&
         map_tensor(maps[1], p.v, outer, p.room, p.heads, p.value_width, box);
}

// Pairs of a sequence and query head whose moving sides the L2 cache holds at once; of heads that share keys all.
inline int pairs_abreast(const Backward& g, bool keys, std::int64_t pairs) {
  const Problem& p = g.p;
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  const std::int64_t of_one = 2 * (keys ? p.queries : p.room) * (p.width + p.value_width),
                     side_by_side = keys ? 1 : p.group;
  const std::int64_t fit = kBytes / std::max<std::int64_t>(of_one, 1) * side_by_side;
  return static_cast<int>(std::clamp<std::int64_t>(fit, std::min(side_by_side, pairs), pairs));
}

// Fills in one side's part of the job.
template <class S>
void describe(BackwardJob& job, bool keys) {
  const Backward& g = job.g;
  const Problem& p = g.p;
  const int side = !keys, together = keys ? job.gathered.together : 1;
  const bool packed = static_cast<bool>(keys ? p.cu_k : p.cu_q),
             wanted = keys ? g.d_k || g.d_v : static_cast<bool>(g.d_q);
  const std::int64_t heads = g.all_heads() / together,
                     tiles = ((keys ? p.room : p.queries) + S::kStill - 1) / S::kStill,
                     pairs = heads * (packed ? 1 : p.sequences);
  job.mapped[side] = map_side(g, keys, S::kMoving, job.maps[side]);
  job.items[side] =
      wanted ? static_cast<unsigned>((packed ? tiles + p.sequences : tiles * p.sequences) * heads) : 0;
  // Few and long items: the longest of all first.
  job.pairs[side] = together > 1 ? static_cast<int>(pairs) : pairs_abreast(g, keys, pairs);
}

template <class S>
cudaError_t start(BackwardJob& job, cudaStream_t stream) {
  const auto kernel = backward_kernel<S>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
      e != cudaSuccess)
    return e;
  describe<S>(job, true), describe<S>(job, false);
  const unsigned items = job.items[0] + job.items[1];
  if (items == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t e = blocks_for(items, blocks); e != cudaSuccess) return e;
  return launch_early(kernel, blocks, S::kThreads, S::kBytes, stream, job);
}

template <class T, int Width, bool Unit>
cudaError_t start(BackwardJob& job, cudaStream_t stream) {
  const bool prefixed = static_cast<bool>(job.g.p.prefix_of);
  if (job.g.p.cap != 0)
    return prefixed ? start<BackwardShape<T, Width, Width, true, Unit, true>>(job, stream)
                    : start<BackwardShape<T, Width, Width, true, Unit, false>>(job, stream);
  return prefixed ? start<BackwardShape<T, Width, Width, false, Unit, true>>(job, stream)
                  : start<BackwardShape<T, Width, Width, false, Unit, false>>(job, stream);
}

template <class T, bool Unit>
cudaError_t start_backward(const Backward& g, const Gathered& gathered, cudaStream_t stream) {
  BackwardJob job{g, gathered, {}, {}, {}, {}};
  const int width = std::max(g.p.width, g.p.value_width);
  if (width <= 64) return start<T, 64, Unit>(job, stream);
  return width <= 96 && g.p.cap == 0 && !g.p.prefix_of
             ? start<BackwardShape<T, 96, 96, false, Unit, false>>(job, stream)
             : start<T, 128, Unit>(job, stream);
}

// Wide heads. Softcaps and prefixes share a kernel.
template <class T, int Width, int ValueWidth, bool Unit>
cudaError_t start_wide(BackwardJob& job, cudaStream_t stream) {
  return job.g.p.cap != 0 || job.g.p.prefix_of
             ? start<BackwardShape<T, Width, ValueWidth, true, Unit, true>>(job, stream)
             : start<BackwardShape<T, Width, ValueWidth, false, Unit, false>>(job, stream);
}
template <class T, bool Unit>
cudaError_t start_wide_backward(const Backward& g, const Gathered& gathered, cudaStream_t stream) {
  BackwardJob job{g, gathered, {}, {}, {}, {}};
  return g.p.width <= 192 && g.p.value_width <= 128 ? start_wide<T, 192, 128, Unit>(job, stream)
                                                    : start_wide<T, 256, 256, Unit>(job, stream);
}

}  // namespace rlk::cuda::attention
