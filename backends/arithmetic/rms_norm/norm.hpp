// rms_norm in fp32 (arithmetic id rms32): the call as plain data, and what is done to one element. Templates over float or
// a GCC vector of float, for native code and GPU kernels alike.
//
// The sum over a row, rms32: 1024 lanes, lane j takes i = j, j + 1024, .. by fma from +0; then for h = 512, 256, .. 1 lane
// j < h adds lane j + h.
#pragma once

#include "arithmetic/activation.hpp"
#include "arithmetic/rows.hpp"

namespace rlk::rms32 {

using activation::Gate;
using rows::Tensor;
using rows::Type;

inline constexpr int kLanes = 1024;
inline constexpr int kBlock = 128;  // rows whose share of d_weight is one fp32 chain

// Both directions: `y` and `d_y` have x's rows, dtype and width.
struct Problem {
  rows::Axes axes;
  std::int64_t width = 0;
  float eps = 0;
  bool offset = false, early = false;
  Gate act = Gate::silu;
  Tensor x, residual, gate, y, sum, rstd;  // rstd: its first element of a row
  Tensor d_y, d_sum, d_x, d_residual, d_gate;
  const void* weight = nullptr;
  Type weight_type = Type::f32;
  void* d_weight = nullptr;
  Type d_weight_type = Type::f32;

  RLK_HD std::int64_t blocks() const { return (axes.rows + kBlock - 1) / kBlock; }
  RLK_HD float weight_at(std::int64_t i) const {
    if (weight == nullptr) return 1;
    const float w = rows::load(weight_type, weight, i);
    return offset ? 1 + w : w;
  }
};

// 1 / rms from the sum of squares.
RLK_HD float reciprocal(float squares, std::int64_t width, float eps) {
  const float mean = squares / static_cast<float>(width);
  return 1 / simt::root(mean + eps);
}

// One element of the gradient of a: `g` is the gradient of the normalised value, `mean` that of g * normal.
template <class T>
RLK_HD T gradient(T r, T normal, T mean, T g) {
  const T minus = -normal;
  return r * simt::fused(minus, mean, g);
}

}  // namespace rlk::rms32
