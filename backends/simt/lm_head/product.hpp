// The one product behind lm_head, linear and their gradients on portable kernels, as raw pointers and strides, for
// host and device:
//
//   out[i, j] = round(sum over r = 0 .. depth-1 of a[i, r] * b[r, j])   (+ bias[j])   (+ residual[i, j])
//
//   logits   = hidden  * weight^T    r runs over K
//   d_hidden = d_out   * weight      r runs over V
//   d_weight = d_out^T * hidden      r runs over M
//   d_bias   = ones    * d_out       r runs over M
//
// and the seam between a GPU backend's host code and its kernels, which different compilers build.
#pragma once

#include <cstdint>

#include "arithmetic/math.hpp"
#include "registry/linear/geometry.hpp"
#include "rlk/float.hpp"

namespace rlk::simt::lm_head {

// Where the i-th line of a tensor lies, in elements from its start. The leading dimensions of a [..., K]
// tensor are one index; those that no single stride walks are levels of their own, innermost first. No level:
// every line is the first one.
struct Axis {
  static constexpr int kLevels = 7;
  std::int32_t levels = 0;
  std::int64_t size[kLevels] = {}, stride[kLevels] = {};

  RLK_HD std::int64_t at(std::int64_t i) const {
    if (levels == 1) return i * stride[0];
    std::int64_t offset = 0;
    for (int level = 0; level < levels; ++level) {
      offset += i % size[level] * stride[level];
      i /= size[level];
    }
    return offset;
  }
  bool unit() const { return levels == 1 && stride[0] == 1; }
};

inline Axis every(std::int64_t stride) {
  Axis axis;
  axis.levels = 1;
  axis.size[0] = INT64_MAX;
  axis.stride[0] = stride;
  return axis;
}

// A matrix somebody else owns: `line` walks the rows of a or the columns of b, `depth` the summed index.
// Without data it is all ones.
struct Operand {
  const void* data = nullptr;
  Float type = Float::f32;
  Axis line, depth;
};

struct Product {
  std::int64_t rows = 0, cols = 0, depth = 0;
  Operand a, b;
  void* out = nullptr;  // [rows, cols], a row without gaps
  Float out_type = Float::f32;
  Axis out_row;
  const void* bias = nullptr;  // [cols] or null: added after the rounding, and rounded again
  Float bias_type = Float::f32;
  const void* residual = nullptr;  // [rows, cols] with dense rows, or null: added after the bias, likewise
  Float residual_type = Float::f32;
  Axis residual_row;
  std::int64_t block = 1024;  // of fp32 chains, a multiple of 16
  int leaves = 0;             // 0: block sums are added in order; 1, 2, 4, 8: that many, joined as a tree
  rlk::leaves::Segments segments;  // of joined leaves
  // Of joined leaves alone: result i is silu of column gate(i), times column gate(i) + up, where up is not 0. Both are
  // rounded first, with their bias, and silu too where `twice`. `cols` counts results, and b.line walks the columns as
  // tiles take them: kPaired gates, then their ups, in turn.
  static constexpr std::int64_t kPaired = 32;
  std::int64_t run = 0, step = 0, up = 0;
  bool twice = false;
  RLK_HD std::int64_t gate(std::int64_t i) const { return i / run * step + i % run; }
};

enum class Sum : std::uint8_t { fma32, fma64, mfma };

// Starts a product on a stream of a device; null, or the runtime's words for what went wrong.
using Launcher = const char* (*)(const Product& p, Sum sum, void* stream, int device);

}  // namespace rlk::simt::lm_head
