// Sizes of linear_bwd's segments as a call reads them. They lie in the caller's memory, and may have changed since calls of
// these shapes were checked.
#pragma once

#include <string>

#include "registry/linear/geometry.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::leaves {

inline rlk_code check_segments(const LinearBwd& a, const Call& call) {
  if (!a.segments) return RLK_OK;
  const std::int64_t n = a.weight.dim(0), whole = a.n_total ? a.n_total : n;
  std::int64_t sum = 0, held = 0;
  for (std::int64_t i = 0; i < a.segments.dim(0); ++i) {
    const std::int64_t size = a.segments.data<std::int64_t>()[i];
    if (size < 0 || size > whole - sum)
      return call.fail(RLK_INVALID_ARGUMENT, "linear_bwd: segments[" + std::to_string(i) + "] is " +
                                                 std::to_string(size) +
                                                 ", of n_total=" + std::to_string(whole) + " there are " +
                                                 std::to_string(whole - sum) + " left");
    sum += size, held += length(size, a.d_x_leaf_first, a.d_x_leaf_count);
  }
  if (sum != whole)
    return call.fail(RLK_INVALID_ARGUMENT, "linear_bwd: segments add up to " + std::to_string(sum) +
                                               ", n_total is " + std::to_string(whole));
  if (held != n)
    return call.fail(RLK_INVALID_ARGUMENT, "linear_bwd: N=" + std::to_string(n) + ", but leaves " +
                                               std::to_string(a.d_x_leaf_first) + " to " +
                                               std::to_string(a.d_x_leaf_first + a.d_x_leaf_count - 1) +
                                               " of the segments have " + std::to_string(held));
  return RLK_OK;
}
// None where only shapes are asked about.
inline Segments segments_of(const LinearBwd& a) {
  if (!a.segments || a.segments.data<std::int64_t>() == nullptr) return {};
  return segments_of(a.segments.data<std::int64_t>(), a.segments.dim(0), a.d_x_leaf_first, a.d_x_leaf_count);
}

}  // namespace rlk::leaves
