// This backend as the portable kernels of backends/simt see it.
#pragma once

#include "rlk/backend.hpp"

namespace rlk::hip {

struct Portable {
  static constexpr std::int32_t kDevice = kDLROCM;
  static constexpr const char* kId = "hip.simt";
};

}  // namespace rlk::hip
