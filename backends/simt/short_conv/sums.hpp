// Where short_conv's sums over rows go: d_weight and d_bias, a channel of one tap after another.
#pragma once

#include "arithmetic/short_conv/conv.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::short_conv {

// Sums over rows: of every tap, and the bias' if its gradient is wanted.
RLK_HD std::int64_t sums(const conv32::Problem& p) { return (p.taps + (p.d_bias ? 1 : 0)) * p.width; }

// The sum of a channel of one tap, or of the bias; `at` among those of all.
__device__ __forceinline__ const conv32::Parameter& result_of(const conv32::Problem& p, std::int64_t at) {
  return at < p.taps * p.width ? p.d_weight : p.d_bias;
}
__device__ __forceinline__ void store_sum(const conv32::Problem& p, std::int64_t at, double sum) {
  const std::int64_t tap = at / p.width, channel = at - tap * p.width;
  const conv32::Parameter& to = result_of(p, at);
  rows::store(to.type, to.data, tap < p.taps ? channel * p.taps + tap : channel, sum);
}

}  // namespace rlk::simt::short_conv
