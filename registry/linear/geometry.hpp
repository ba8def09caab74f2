// How a sum of length n is cut into eight leaves, and where gate and up lie among the rows of one weight (page of linear): by
// what lies here checks, rules and kernels agree.
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

// Projections fused along the dimension that is summed: leaf j is leaf j of each segment, in their order. Of a call that
// holds a part of the leaves, segment i is [start, start + length) and its leaves are `width` wide.
struct Segments {
  static constexpr int kMost = 8;
  int count = 0;  // 0: one segment, which is everything
  std::int64_t start[kMost] = {}, length[kMost] = {}, width[kMost] = {};
};
inline Segments segments_of(const std::int64_t* sizes, std::int64_t count, std::int64_t first,
                            std::int64_t leaf_count) {
  Segments s;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    s.start[i] = at, s.length[i] = length(sizes[i], first, leaf_count), s.width[i] = width(sizes[i]);
    at += s.length[i];
  }
  s.count = static_cast<int>(count);
  return s;
}

}  // namespace rlk::leaves

namespace rlk::gate_up {

inline constexpr std::int64_t kRun = 64;  // rows of each in turn, where they are interleaved

// Column i of `width` has its gate in row i / run * step + i % run of the weight, and its up `up` rows below.
struct Layout {
  std::int64_t run, step, up;
  Layout(bool interleaved, std::int64_t width)
      : run(interleaved ? kRun : std::max<std::int64_t>(width, 1)),
        step(2 * run),
        up(interleaved ? kRun : width) {}
  std::int64_t gate(std::int64_t i) const { return i / run * step + i % run; }
};

}  // namespace rlk::gate_up
