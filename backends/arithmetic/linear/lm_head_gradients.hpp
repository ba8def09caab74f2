// lm_head's gradients as those of linear, whose sums over the vocabulary have leaves that 1, 2, 4 or 8 devices may hold.
#pragma once

#include "rlk/ops.hpp"

namespace rlk::leaves {

inline LinearBwd as_linear(const LmHeadBwd& a) {
  LinearBwd b{.d_y = a.d_out, .x = a.hidden, .weight = a.weight};
  b.d_x = a.d_hidden, b.d_weight = a.d_weight, b.d_bias = a.d_bias;
  return b;
}

}  // namespace rlk::leaves
