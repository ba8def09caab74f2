// From the typed arguments of linear and linear_bwd to products.
#pragma once

#include "arithmetic/linear/segments.hpp"
#include "registry/linear/geometry.hpp"
#include "simt/lm_head/ops.hpp"

namespace rlk::simt::linear {

using lm_head::every;
using lm_head::lines_of;
using lm_head::operand;
using lm_head::Product;
using lm_head::rows_of;
using lm_head::write_to;

inline constexpr std::int64_t kTokens = 4096;  // of a block of d_weight and d_bias

inline void cut(Product& p, std::int64_t total, std::int64_t leaves) {
  p.block = leaves::width(total == 0 ? p.depth : total);
  p.leaves = static_cast<int>(leaves);
}
inline void add_residual(Product& p, const In& t) {
  p.residual = t.data<void>(), p.residual_type = float_of(t.dtype()), p.residual_row = lines_of(t);
}

// swiglu of the product: 32 rows of gate and 32 of up in turn, which lie in a 64th of the weight's runs or in two halves.
inline void gate(Product& p, const Linear& a) {
  if (a.activation == Linear::Activation::none || p.cols == 0) return;
  p.cols /= 2, p.twice = a.roundings == Linear::Roundings::twice;
  const bool interleaved = a.gate_up == Linear::GateUp::interleaved64;
  const gate_up::Layout rows(interleaved, p.cols);
  p.run = rows.run, p.step = rows.step, p.up = rows.up;
  constexpr std::int64_t kPaired = Product::kPaired, kRest = INT64_MAX;
  const std::int64_t row = a.weight.stride(0);
  p.b.line = interleaved ? lm_head::Axis{4,
                                         {kPaired, 2, 2, kRest},
                                         {row, gate_up::kRun * row, kPaired * row, 2 * gate_up::kRun * row}}
                         : lm_head::Axis{3, {kPaired, 2, kRest}, {row, p.up * row, kPaired * row}};
}

inline Product forward_product(const Linear& a) {
  Product p;
  p.rows = rows_of(a.x), p.cols = a.weight.dim(0), p.depth = a.weight.dim(1);
  p.a = operand(a.x, lines_of(a.x), every(1));
  p.b = operand(a.weight, lines_of(a.weight), every(1));
  write_to(p, a.y);
  cut(p, a.k_total, a.leaf_count);
  gate(p, a);
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype());
  if (a.residual) add_residual(p, a.residual);
  return p;
}

inline Product d_x_product(const LinearBwd& a) {
  Product p;
  p.rows = rows_of(a.d_y), p.cols = a.weight.dim(1), p.depth = a.weight.dim(0);
  p.a = operand(a.d_y, lines_of(a.d_y), every(1));
  p.b = operand(a.weight, every(1), lines_of(a.weight));
  write_to(p, a.d_x);
  cut(p, a.n_total, a.d_x_leaf_count);
  p.segments = leaves::segments_of(a);
  return p;
}

inline Product d_weight_product(const LinearBwd& a) {
  Product p;
  p.rows = a.weight.dim(0), p.cols = a.weight.dim(1), p.depth = rows_of(a.d_y), p.block = kTokens;
  p.a = operand(a.d_y, every(1), lines_of(a.d_y));
  p.b = operand(a.x, every(1), lines_of(a.x));
  write_to(p, a.d_weight);
  if (a.d_weight_before) add_residual(p, a.d_weight_before);
  return p;
}

inline Product d_bias_product(const LinearBwd& a) {
  Product p;
  p.rows = 1, p.cols = a.weight.dim(0), p.depth = rows_of(a.d_y), p.block = kTokens;
  p.b = operand(a.d_y, every(1), lines_of(a.d_y));
  write_to(p, a.d_bias);
  if (a.d_bias_before) add_residual(p, a.d_bias_before);
  return p;
}

// d_y added to an empty sum.
inline Product d_residual_product(const LinearBwd& a) {
  Product p;
  p.rows = rows_of(a.d_y), p.cols = a.weight.dim(0);
  write_to(p, a.d_residual);
  add_residual(p, a.d_y);
  return p;
}

}  // namespace rlk::simt::linear
