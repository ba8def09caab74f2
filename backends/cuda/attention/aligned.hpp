// Whether tensors lie as attention's kernels on Hopper read them.
#pragma once

#include <cstdint>

#include "rlk/tensor.hpp"

namespace rlk::cuda::attention {

// Whether every row [.., width] starts on `bytes`.
template <class View>
bool aligned(const View& v, std::int64_t bytes) {
  if (v.numel() == 0) return true;
  const std::int64_t size = v.dtype() == DType::f32 ? 4 : 2;
  if (reinterpret_cast<std::uintptr_t>(v.template data<char>()) % static_cast<std::uintptr_t>(bytes) != 0)
    return false;
  for (std::int32_t i = 0; i + 1 < v.rank(); ++i)
    if (v.dim(i) > 1 && v.stride(i) * size % bytes != 0) return false;
  return true;
}

}  // namespace rlk::cuda::attention
