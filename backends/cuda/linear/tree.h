// Launcher of linear's products on Hopper's wgmma, arithmetic sm90/t25k16/tree8: what the op layer (ops.cpp) calls and
// what the kernels (*_sm90.cu) implement. It neither allocates nor synchronises.
#pragma once

#include "cuda/lm_head/gemm.h"
#include "registry/linear/geometry.hpp"

namespace rlk::cuda::linear {

using lm_head::Operand;

// C(m, n) = the tree over `leaves` (1, 2, 4 or 8) leaves of `width` of k, of A(m, k) * B(n, k); then the bias and the
// residual, each rounded to `out`. Where A is row-contiguous, B is too, the leaves may be any number, of multiples of 64
// and none empty, and their sums are added in order. Both are bf16 or both fp16, and aligned16; k > 0.
struct Product {
  Operand a, b;
  void* c = nullptr;
  std::int64_t ldc = 0;
  const void *bias = nullptr, *residual = nullptr;  // [n] and [m, n], or null
  std::int64_t residual_ld = 0;
  Float bias_type = Float::bf16, residual_type = Float::bf16;
  std::int64_t m = 0, n = 0, k = 0, width = 0;
  int leaves = 8;
  // Of k, where B is row-contiguous: every leaf has `width` of every segment whole, multiples of 64, and they make up its own.
  rlk::leaves::Segments segments;
  Float out = Float::bf16;
  // C(m, i) = silu of column gate(i), times column gate(i) + up, where up is not 0; both are rounded first, with their bias,
  // and silu too where `twice`. There are n results of 2 n rows of B; no residual.
  std::int64_t run = 0, step = 0, up = 0;
  bool twice = false;
};

// How a product is cut, free of the bits: rows x columns of C per tile, and over how many blocks of a cluster its
// leaves are spread. Pairs of blocks, one above the other, share the columns they read.
struct Cut {
  int rows, columns, split;
  bool pair = false;
};
// Every one there is; swiglu has those of 128 columns, and 96 are for operands along k alone.
inline constexpr Cut kCuts[] = {
    {64, 64, 8},   {64, 64, 4},   {64, 64, 2},   {64, 64, 1},   {64, 128, 8},        {64, 128, 4},
    {64, 128, 2},  {64, 128, 1},  {128, 64, 8},  {128, 64, 4},  {128, 64, 2},        {128, 64, 1},
    {128, 128, 8}, {128, 128, 4}, {128, 128, 2}, {128, 128, 1}, {128, 128, 1, true}, {64, 96, 4},
    {64, 96, 2},   {64, 96, 1},   {128, 96, 4},  {128, 96, 2},  {128, 96, 1}};

// Likewise for 16 or 32 rows at most and both operands k-contiguous, by the kernel of few_rows.cuh: columns are the rows of
// b that a warp takes at a time, a leaf is a warp's.
inline constexpr Cut kFewCuts[] = {{16, 8, 1}, {16, 16, 1}, {16, 32, 1}, {32, 16, 1}};
inline constexpr int kFewRows = 32;

// Whether the driver offers the tensor-map encoder these kernels need.
bool tree_available();

// What the choice of a cut knows of a device; memory: bytes per microsecond.
struct Card {
  int multiprocessors = 0;
  double memory = 0;
};
cudaError_t read_card(Card*, int device);

// The fastest cut for the sizes of a product, by what was measured.
Cut cut_for(const Product&, const Card&);

cudaError_t launch_tree(const Product&, const Cut&, int multiprocessors, cudaStream_t);

}  // namespace rlk::cuda::linear
