// This backend as the portable kernels of backends/simt see it.
#pragma once

#include "rlk/backend.hpp"

namespace rlk::cuda {

struct Portable {
  static constexpr std::int32_t kDevice = kDLCUDA;
  static constexpr const char* kId = "cuda.simt";
};

}  // namespace rlk::cuda
