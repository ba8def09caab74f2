// Tensor maps of matrices: what TMA needs to copy boxes of lines into shared memory, swizzled as wgmma reads them.
#pragma once

#include <cstdint>

#include "cuda/hopper/tensor_map.h"
#include "rlk/float.hpp"

namespace rlk::cuda::hopper {

// `outer` lines of `inner` elements, `ld` apart. False where the driver refuses.
inline bool encode(CUtensorMap* map, const void* data, Float type, std::int64_t inner, std::int64_t outer,
                   std::int64_t ld, int box_inner, int box_outer) {
  const auto bytes = static_cast<std::int64_t>(bytes_of(type));
  const CUtensorMapDataType data_type = type == Float::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                        : type == Float::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const std::int64_t line = box_inner * bytes;
  const CUtensorMapSwizzle swizzle = line == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : line == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_32B;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  // A single line may come with any stride; the encoder wants one that is valid.
  const cuuint64_t strides[1] = {
      static_cast<cuuint64_t>(outer > 1 ? ld * bytes : (inner * bytes + 15) / 16 * 16)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_inner), static_cast<cuuint32_t>(box_outer)},
                   step[2] = {1, 1};
  return encoder()(map, data_type, 2, const_cast<void*>(data), sizes, strides, box, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace rlk::cuda::hopper
