// Thin chain products (ChainProduct::thin): memory bounds them, so the lines of b go past once, from end to end, and nothing
// is packed. Part of
// chain_kernels.hpp.
//
//   few rows     the sums of all columns wait in a near cache, some lines at a time are added to them
//   few steps    some rows of sums at a time, finished while they are in the nearest cache
#pragma once

#include <iterator>

#include "native/lm_head/chain_kernels.hpp"

namespace rlk::native {
namespace {

constexpr int kLinesAtOnce = 8;
constexpr std::int64_t kStrip = 128;  // columns that few steps finish together

// sums[Rows][columns] += a[Rows][Count] * lines[Count][columns], or from +0; whole vectors of columns.
template <class Lanes, int Rows, int Count>
RLK_ISA void add_vectors(const float* const* lines, const float* a, std::int64_t a_pitch,
                         std::int64_t columns, float* sums, std::int64_t pitch, bool start) {
  using Vec = typename Lanes::Vec;
  Vec factor[Rows][Count];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < Count; ++n) factor[i][n] = Lanes::broadcast(a + i * a_pitch + n);
  for (std::int64_t j = 0; j < columns; j += Lanes::kLanes) {
    Vec sum[Rows];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) sum[i] = start ? Lanes::zero() : Lanes::load(sums + i * pitch + j);
#pragma GCC unroll 8
    for (int n = 0; n < Count; ++n) {
      const Vec line = Lanes::load(lines[n] + j);
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) sum[i] = Lanes::fma(factor[i][n], line, sum[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) Lanes::store(sums + i * pitch + j, sum[i]);
  }
}

// The same of any number of columns: behind the last whole vector goes a copy of what is there. sums has room for whole ones.
template <class Lanes, int Rows, int Count>
RLK_ISA void add_lines(const MatrixView& b, std::int64_t row, std::int64_t col, std::int64_t columns,
                       const float* a, std::int64_t a_pitch, float* sums, std::int64_t pitch, bool start) {
  const float* lines[Count];
  for (int n = 0; n < Count; ++n) lines[n] = reinterpret_cast<const float*>(element_address(b, row + n, col));
  const std::int64_t whole = columns / Lanes::kLanes * Lanes::kLanes;
  add_vectors<Lanes, Rows, Count>(lines, a, a_pitch, whole, sums, pitch, start);
  if (whole == columns) return;
  alignas(64) float ends[Count][Lanes::kLanes] = {};
  for (int n = 0; n < Count; ++n) {
    for (std::int64_t j = whole; j < columns; ++j) ends[n][j - whole] = lines[n][j];
    lines[n] = ends[n];
  }
  add_vectors<Lanes, Rows, Count>(lines, a, a_pitch, Lanes::kLanes, sums + whole, pitch, start);
}

// to[rows][depth] = a from (row, k0) on.
template <class Lanes>
RLK_ISA void upcast_rows(const MatrixView& a, std::int64_t row, std::int64_t rows, std::int64_t k0,
                         std::int64_t depth, float* to) {
  for (std::int64_t i = 0; i < rows && depth > 0; ++i, to += depth)
    if (a.col_stride == 1)
      Lanes::upcast_run(element_address(a, row + i, k0), a.type, depth, to);
    else
      for (std::int64_t k = 0; k < depth; ++k)
        to[k] = load_element(element_address(a, row + i, k0 + k), a.type, 0);
}

// A tile of few rows. A buffer of the tree is [Rows][pitch], and all of them have their place where those of a product without
// joints have one.
constexpr std::int64_t kApart = ChainProduct::kThin * ChainProduct::kThinColumns;

template <class Lanes, int Rows>
RLK_ISA void run_few_rows(const ChainProduct& p, const ChainTile& tile, float* factors, float* sums) {
  using B = Blocking<Lanes>;
  const std::int64_t columns = tile.col_end - tile.col_begin,
                     pitch = (columns + B::kPanel - 1) / B::kPanel * B::kPanel;
  if (p.depth == 0) std::fill_n(sums, Rows * pitch, 0.0f);
  for_pieces(p, B::kDepthBlock, [&](const Piece& piece) RLK_ISA {
    float* chain = sums + piece.chain * kApart;
    upcast_rows<Lanes>(p.a, tile.row_begin, Rows, piece.first, piece.depth, factors);
    if (piece.depth == 0 && !piece.resumes) std::fill_n(chain, Rows * pitch, 0.0f);
    for (std::int64_t n = 0; n < piece.depth;) {
      const bool many = piece.depth - n >= kLinesAtOnce, start = n == 0 && !piece.resumes;
      const auto add = many ? add_lines<Lanes, Rows, kLinesAtOnce> : add_lines<Lanes, Rows, 1>;
      add(p.b, piece.first + n, tile.col_begin, columns, factors + n, piece.depth, chain, pitch, start);
      n += many ? kLinesAtOnce : 1;
    }
    if (!piece.ends || piece.meets == 0) return;
    for (std::int64_t j = 0; j < Rows * pitch; j += Lanes::kLanes) {
      typename Lanes::Vec sum = Lanes::load(chain + j);
      for (int level = 0; level < piece.meets; ++level)
        sum = Lanes::add(Lanes::load(sums + level * kApart + j), sum);
      Lanes::store(sums + piece.to * kApart + j, sum);
    }
  });
  for (std::int64_t i = 0; i < Rows; ++i)
    finish_row<Lanes>(p, tile.row_begin + i, tile.col_begin, columns, sums + i * pitch);
}

// A tile of `Steps` steps. Of the last rows there may be fewer than are computed.
template <class Lanes, int Steps>
RLK_ISA void run_few_steps(const ChainProduct& p, const ChainTile& tile, float* factors, float* sums) {
  constexpr int kRows = ChainProduct::kThin;
  std::fill_n(factors, kRows * Steps, 0.0f);
  for (std::int64_t row = tile.row_begin; row < tile.row_end; row += kRows) {
    const std::int64_t rows = std::min<std::int64_t>(kRows, tile.row_end - row);
    upcast_rows<Lanes>(p.a, row, rows, 0, Steps, factors);
    for (std::int64_t col = tile.col_begin; col < tile.col_end; col += kStrip) {
      const std::int64_t columns = std::min(kStrip, tile.col_end - col);
      add_lines<Lanes, kRows, Steps>(p.b, 0, col, columns, factors, Steps, sums, kStrip, true);
      for (std::int64_t i = 0; i < rows; ++i) finish_row<Lanes>(p, row + i, col, columns, sums + i * kStrip);
    }
  }
}

template <class Lanes>
RLK_ISA void run_thin(const ChainProduct& p, const ChainTile& tile, float* scratch) {
  using B = Blocking<Lanes>;
  using Run = void (*)(const ChainProduct&, const ChainTile&, float*, float*);
  constexpr Run kRows[] = {run_few_rows<Lanes, 1>, run_few_rows<Lanes, 2>, run_few_rows<Lanes, 3>,
                           run_few_rows<Lanes, 4>};
  constexpr Run kSteps[] = {run_few_steps<Lanes, 1>, run_few_steps<Lanes, 2>, run_few_steps<Lanes, 3>,
                            run_few_steps<Lanes, 4>};
  static_assert(std::size(kRows) == ChainProduct::kThin && std::size(kSteps) == ChainProduct::kThin);
  static_assert(sizeof(float) * (B::kPackedA + (kChain + 1) * kApart) <= B::kScratchBytes &&
                ChainProduct::kThinColumns % B::kPanel == 0 && kStrip % Lanes::kLanes == 0);
  const std::int64_t rows = tile.row_end - tile.row_begin;
  if (rows == 0) return;
  const Run run = p.few_rows() ? kRows[rows - 1] : kSteps[p.depth - 1];
  for (std::int64_t col = tile.col_begin; col < tile.col_end; col += ChainProduct::kThinColumns)
    run(p, {tile.row_begin, tile.row_end, col, std::min(col + ChainProduct::kThinColumns, tile.col_end)},
        scratch, scratch + B::kPackedA);
}

}  // namespace
}  // namespace rlk::native
