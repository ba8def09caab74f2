// What attention and attention_part share of the golden implementation.
#pragma once

#include <vector>

#include "arithmetic/attention/problem.hpp"
#include "arithmetic/math.hpp"

namespace rlk::native::attention {

// The scores of keys [first, last), by absolute position, of a row of q.
inline std::vector<double> golden_scores(const attn128::Problem& p, std::int64_t n, const void* q,
                                         std::int64_t kv_head, attn128::Visible keys) {
  const attn128::KeyRows places = p.key_rows(n);
  const std::int64_t from = p.here(n).first;
  const float factor = p.k_scale.of(kv_head);
  std::vector<double> scores;
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    const void* k = p.key(p.k, n, places, j - from, kv_head);
    double x = 0;
    for (std::int64_t d = 0; d < p.width; ++d)
      x = simt::fused(double{rows::load(p.q.type, q, d)}, double{attn128::element(p.k, k, d, factor)}, x);
    x *= p.scale64;
    if (p.cap64 != 0) x = p.cap64 * simt::tanh<double>(x / p.cap64);
    scores.push_back(x);
  }
  return scores;
}

}  // namespace rlk::native::attention
