// lm_head's products on a stream, whose blocks are added in order. A header of its own: a compiler makes every kernel that a
// function it sees launches.
#pragma once

#include "simt/lm_head/kernel.hpp"

namespace rlk::simt::lm_head {

inline hipError_t launch(const Product& p, Sum sum, hipStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return hipSuccess;
  return sum == Sum::fma64 ? launch_joined<double, Row>(p, stream) : launch_joined<float, Row>(p, stream);
}

}  // namespace rlk::simt::lm_head
