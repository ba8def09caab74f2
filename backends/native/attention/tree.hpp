// The sum of a tile's kTile numbers in the rule's order, and the largest of them.
#pragma once

#include "arithmetic/attention/problem.hpp"
#include "native/rows.hpp"

namespace rlk::native::attention {

// Bits of the index are folded in the order 6, 3, 0, 1, 2, 4, 5. After bits 6 and 3 what is left is folded neighbour by
// neighbour.
template <class L, int W>
float tree(const float* p) {
  using Row = native::Row<L, W>;
  if constexpr (W == 1) {
    float v[32];
    for (int b = 0; b < 4; ++b)
      for (int i = 0; i < 8; ++i) {
        const float* x = p + 16 * b + i;
        v[8 * b + i] = (x[0] + x[64]) + (x[8] + x[72]);
      }
    for (int n = 16; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) v[i] = v[2 * i] + v[2 * i + 1];
    return v[0];
  } else {
    float v[4];
    for (int b = 0; b < 4; ++b) {
      const float* x = p + 16 * b;
      L sum = Row::load(x) + Row::load(x + 64);
      if constexpr (W == 16)
        sum += Row::template moved_down<8>(sum);
      else
        sum += Row::load(x + 8) + Row::load(x + 72);
      sum += Row::template moved_down<1>(sum);
      sum += Row::template moved_down<2>(sum);
      sum += Row::template moved_down<4>(sum);
      v[b] = sum[0];
    }
    return (v[0] + v[1]) + (v[2] + v[3]);
  }
}

// NaN is none of them.
template <class L, int W, int H = W / 2>
float largest(L most) {
  if constexpr (W == 1) {
    return most;
  } else {
    const L other = native::Row<L, W>::template moved_down<H>(most);
    most = other > most ? other : most;
    if constexpr (H == 1)
      return most[0];
    else
      return largest<L, W, H / 2>(most);
  }
}
template <class L, int W>
float largest(const float* p) {
  L most = L{} - __builtin_inff();
  for (int j = 0; j < attn128::kTile; j += W) {
    const L x = native::Row<L, W>::load(p + j);
    most = x > most ? x : most;
  }
  return largest<L, W>(most);
}

}  // namespace rlk::native::attention
