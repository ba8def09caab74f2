// What the implementations of linear and its gradients share: sums with ones and copies of d_y, and the workspace's first part.
#pragma once

#include "native/lm_head/run.hpp"
#include "registry/linear/geometry.hpp"

namespace rlk::native {
namespace {

constexpr std::int64_t kTokens = 4096;  // of a block of d_weight and d_bias

inline std::uint64_t copies(const Linear& a) {
  return RowSet(a.x).copy_bytes() + (a.residual ? RowSet(a.residual).copy_bytes() : 0);
}
inline std::uint64_t copies(const LinearBwd& a) {
  return RowSet(a.d_y).copy_bytes() + RowSet(a.x).copy_bytes();
}

// Of the product, or of any of the gradients.
inline std::int64_t most_tiles(const Linear& a, const ChainKernels& kernels) {
  return most_tiles(RowSet(a.x).rows, a.weight.dim(0), kernels);
}
inline std::int64_t most_tiles(const LinearBwd& a, const ChainKernels& kernels) {
  const std::int64_t rows = RowSet(a.d_y).rows, out = a.weight.dim(0), in = a.weight.dim(1);
  return std::max({most_tiles(rows, in, kernels), most_tiles(out, in, kernels), most_tiles(1, out, kernels),
                   most_tiles(rows, out, kernels)});
}

// A residual as rows, where there is one.
inline void add_residual(ChainProduct& p, const ReadRows& residual, std::int64_t first) {
  p.residual = residual.row(first), p.residual_type = residual.type, p.residual_row_stride = residual.stride;
}

// d_bias[n] = sum over m, ascending, of 1 * d_y[m, n]
inline void bias_gradient(const LinearBwd& a, const ReadRows& d_y, const Call& call,
                          const ChainKernels& kernels, Chain chain, std::uint64_t shared) {
  ChainProduct p;
  p.rows = 1, p.cols = d_y.width, p.depth = d_y.rows, p.block = kTokens;
  p.a = {&kOne, Float::f32, 0, 0};
  p.b = d_y.matrix();
  p.out = a.d_bias.data<void>(), p.out_type = float_of(a.d_bias.dtype()), p.out_row_stride = d_y.width;
  if (a.d_bias_before) p.residual = a.d_bias_before.data<void>(), p.residual_row_stride = d_y.width;
  run_chain(call, p, kernels, chain, shared);
}

// d_y added to an empty sum.
inline void residual_gradient(const LinearBwd& a, const ReadRows& d_y, const Call& call,
                              const ChainKernels& kernels, Chain chain, std::uint64_t shared) {
  ChainProduct p;
  p.rows = d_y.rows, p.cols = d_y.width;
  p.a = d_y.matrix(), p.b = d_y.matrix();
  p.out_type = float_of(a.d_residual.dtype());
  for_row_runs(a.d_residual, p, [&](ChainProduct part, std::int64_t first) {
    add_residual(part, d_y, first);
    run_chain(call, part, kernels, chain, shared);
  });
}

}  // namespace
}  // namespace rlk::native
