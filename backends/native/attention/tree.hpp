// The sum of a tile's kTile numbers in the rule's order.
#pragma once

#include "native/rows.hpp"

namespace rlk::native::attention {

// Bits of the index are folded in the order 6, 3, 0, 1, 2, 4, 5. After bits 6 and 3 what is left is folded neighbour by
// neighbour.
template <class L, int W>
float tree(const float* p) {
  float v[32], half[64];
  Row<L, W>::map(64, [](auto x, auto y) { return x + y; }, half, p, p + 64);
  for (int b = 0; b < 4; ++b)
    for (int i = 0; i < 8; ++i) v[8 * b + i] = half[16 * b + i] + half[16 * b + 8 + i];
  for (int n = 16; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) v[i] = v[2 * i] + v[2 * i + 1];
  return v[0];
}

}  // namespace rlk::native::attention
