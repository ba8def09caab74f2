// embedding as plain data (arithmetic id embed32): which row of the weight a token has.
#pragma once

#include "arithmetic/rows.hpp"

namespace rlk::embed32 {

using rows::Tensor;

// A matrix [V, H] with dense rows.
struct Matrix {
  void* data = nullptr;
  rows::Type type = rows::Type::f32;
  std::int64_t stride = 0;

  RLK_HD void* row(std::int64_t i) const {
    return static_cast<char*>(data) + i * stride * rows::size_of(type);
  }
};

// Rows of the axes are tokens; `ids` has all of them and no width of its own, so its type is not used.
struct Problem {
  rows::Axes axes;
  std::int64_t width = 0, vocab = 0, start = 0, padding = -1;
  float scale = 1;
  bool wide_ids = false;
  Tensor ids, tokens;           // tokens: out, or d_out
  Matrix weight;                // or d_weight
  Matrix before;                // fp32, to which d_weight is added; its rows may be d_weight's
  std::int64_t tokens_end = 0;  // ids below are tokens
  std::int32_t* bad_count = nullptr;

  RLK_HD std::int64_t id(std::int64_t token) const {
    const std::int64_t at = ids.offset(axes, token);
    return wide_ids ? static_cast<const std::int64_t*>(ids.data)[at]
                    : static_cast<const std::int32_t*>(ids.data)[at];
  }
  // Of the weight, or -1 where it has no such row.
  RLK_HD std::int64_t row(std::int64_t token) const {
    const std::int64_t i = id(token);
    return i >= start && i - start < vocab ? i - start : -1;
  }
  // 1 for an id that is no token.
  RLK_HD int bad(std::int64_t token) const {
    const std::int64_t i = id(token);
    return i < 0 || i >= tokens_end ? 1 : 0;
  }
  // Where a token's gradient goes, or -1.
  RLK_HD std::int64_t gradient_row(std::int64_t token) const {
    return id(token) == padding ? -1 : row(token);
  }
};

}  // namespace rlk::embed32
