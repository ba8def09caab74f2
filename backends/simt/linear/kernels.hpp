// linear's products on a stream: lm_head's chains in fp32, joined as a tree, or for sums over tokens in order.
#pragma once

#include "simt/lm_head/kernel.hpp"

namespace rlk::simt::linear {

using lm_head::Product;

inline hipError_t launch(const Product& p, hipStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return hipSuccess;
  return p.leaves > 0 ? lm_head::launch_joined<float, lm_head::Tree>(p, stream)
                      : lm_head::launch_joined<float, lm_head::Row>(p, stream);
}

}  // namespace rlk::simt::linear
