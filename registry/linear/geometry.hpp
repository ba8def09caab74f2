// How a sum of length n is cut into eight leaves (page of linear): by what lies here checks, rules and kernels agree.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rlk::leaves {

inline constexpr int kLeaves = 8;
inline constexpr std::int64_t kMost = std::int64_t{1} << 53;  // lengths beyond are refused

// Leaf j is [j w, (j + 1) w) with what reaches over the end cut off; late ones may be empty.
inline std::int64_t width(std::int64_t n) { return (n + 127) / 128 * 16; }

// The length of leaves [first, first + count) of n.
inline std::int64_t length(std::int64_t n, std::int64_t first, std::int64_t count) {
  const std::int64_t w = width(n);
  return std::min(n, (first + count) * w) - std::min(n, first * w);
}

}  // namespace rlk::leaves
