// [batch, token, head, channel] tensors as TMA walks them, in boxes of 64 tokens by 128 bytes of
// channels which lie in shared memory as `rows`, or by all channels one row behind the other. It knows where a
// tensor ends: past that it reads zeros and writes nothing. Where sequences are packed it would go on into the
// next one.
#pragma once

#include "cuda/hopper/tensor_map.h"
#include "cuda/kda/device.cuh"

namespace rlk::cuda::kda {

struct NoMaps {};  // threads copy instead

// A row of the batch along the grid's third dimension, if it can be: dividing to find it takes longer than
// what it is for.
__host__ __device__ inline bool by_sequence(const Job& p) {
  return !p.cu_seqlens && p.slots_each < 65536 && p.sequences < 65536;
}

enum class Box { lines, whole };  // of 128 bytes, swizzled; of all channels

// False where TMA cannot walk the tensor.
template <class T>
bool map_tensor(CUtensorMap& map, const Job& job, const T& t, int heads, bool wide = false,
                Box of = Box::lines) {
  if (!by_sequence(job) || hopper::encoder() == nullptr) return false;
  const std::int64_t bytes = wide ? 4 : 2;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(job.dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(job.tokens), static_cast<cuuint64_t>(job.batch)};
  const std::int64_t steps[3] = {t.head, t.token, t.batch};
  cuuint64_t strides[3];
  for (int i = 0; i < 3; ++i) {
    const std::int64_t step = sizes[i + 1] > 1 ? steps[i] : job.dim;  // a single row may come with any
    if (step <= 0) return false;
    strides[i] = static_cast<cuuint64_t>(step * bytes);
  }
  const bool whole = of == Box::whole;
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(whole ? job.dim : 128 / bytes), 1, 64, 1},
                   every[4] = {1, 1, 1, 1};
  return hopper::encoder()(
             &map, wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             const_cast<void*>(static_cast<const void*>(t.data)), sizes, strides, box, every,
             CU_TENSOR_MAP_INTERLEAVE_NONE, whole ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace rlk::cuda::kda
