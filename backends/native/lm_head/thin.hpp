// Thin chain products (ChainProduct::thin): memory bounds them, so the lines of b go past once, from end to end, and nothing
// is packed. Part of chain_kernels.hpp's loops.
//
//   few rows     the sums of all columns wait in a near cache, some lines at a time are added to them
//   few steps    some rows of sums at a time, finished while they are in the nearest cache
#pragma once

#include "native/lm_head/chain_tiles.hpp"

namespace rlk::native {
namespace {

// Lanes of fp32 whose steps are single elements.
template <class Lanes>
inline constexpr bool kHasThin =
    sizeof(typename Lanes::Scalar) == 4 && Lanes::kLanes > 1 && kStep<Lanes> == 1;

constexpr int kLinesAtOnce = 8;
constexpr std::int64_t kFewAtOnce = 4;  // rows, by registers
constexpr std::int64_t kPage = 1024;    // columns of lines that wait in the nearest cache for more rows
constexpr std::int64_t kStrip = 128;    // columns that few steps finish together, of so many rows
constexpr std::int64_t kStepRows = 6;

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

// Lines [row, row + Count) to all rows of a tile, whose sums are `pitch` apart.
template <class Lanes, int Count>
RLK_ISA void add_to_rows(const MatrixView& b, std::int64_t row, const ChainTile& tile, const float* a,
                         std::int64_t a_pitch, float* sums, std::int64_t pitch, bool start) {
  using Add = void (*)(const MatrixView&, std::int64_t, std::int64_t, std::int64_t, const float*,
                       std::int64_t, float*, std::int64_t, bool);
  constexpr Add kAdd[] = {add_lines<Lanes, 1, Count>, add_lines<Lanes, 2, Count>, add_lines<Lanes, 3, Count>,
                          add_lines<Lanes, 4, Count>};
  const std::int64_t rows = tile.row_end - tile.row_begin, columns = tile.col_end - tile.col_begin;
  for (std::int64_t j = 0; j < columns; j += kPage)
    for (std::int64_t i = 0; i < rows; i += kFewAtOnce)
      kAdd[std::min(kFewAtOnce, rows - i) - 1](b, row, tile.col_begin + j, std::min(kPage, columns - j),
                                               a + i * a_pitch, a_pitch, sums + i * pitch + j, pitch, start);
}

// A buffer of the tree is [rows][pitch], and all of them have their place where those of a product without joints have one.
constexpr std::int64_t kApart = ChainProduct::kFewRows * ChainProduct::kThinColumns;

template <class Lanes>
RLK_ISA void run_few_rows(const ChainProduct& p, const ChainTile& tile, float* factors, float* sums) {
  using B = Blocking<Lanes>;
  const std::int64_t rows = tile.row_end - tile.row_begin, columns = tile.col_end - tile.col_begin,
                     pitch = (columns + B::kPanel - 1) / B::kPanel * B::kPanel;
  if (p.depth == 0) std::fill_n(sums, rows * pitch, 0.0f);
  for_pieces(p, B::kDepthBlock, [&](const Piece& piece) RLK_ISA {
    float* chain = sums + piece.chain * kApart;
    upcast_rows<Lanes>(p.a, tile.row_begin, rows, piece.first, piece.depth, factors);
    if (piece.depth == 0 && !piece.resumes) std::fill_n(chain, rows * pitch, 0.0f);
    for (std::int64_t n = 0; n < piece.depth;) {
      const bool many = piece.depth - n >= kLinesAtOnce;
      const auto add = many ? add_to_rows<Lanes, kLinesAtOnce> : add_to_rows<Lanes, 1>;
      add(p.b, piece.first + n, tile, factors + n, piece.depth, chain, pitch, n == 0 && !piece.resumes);
      n += many ? kLinesAtOnce : 1;
    }
    if (!piece.ends || piece.meets == 0) return;
    for (std::int64_t j = 0; j < rows * pitch; j += Lanes::kLanes)
      Lanes::store(sums + piece.to * kApart + j,
                   joined<Lanes>(Lanes::load(chain + j), sums + j, piece.meets, kApart));
  });
  for (std::int64_t i = 0; i < rows; ++i)
    finish_row<Lanes>(p, tile.row_begin + i, tile.col_begin, columns, sums + i * pitch);
}

template <class Lanes>
RLK_ISA void run_few_steps(const ChainProduct& p, const ChainTile& tile, float* factors, float* rest) {
  using B = Blocking<Lanes>;
  float *end = rest,
        *sums = rest + B::kPackedB;  // columns behind the last whole panel, packed; sums of a strip
  const std::int64_t columns = tile.col_end - tile.col_begin, whole = columns / B::kPanel * B::kPanel;
  if (whole < columns) pack_b<Lanes>(p.b, tile.col_begin + whole, columns - whole, 0, p.depth, end);
  for (std::int64_t row = tile.row_begin; row < tile.row_end; row += kStepRows) {
    const std::int64_t rows = std::min(kStepRows, tile.row_end - row);
    pack_a<Lanes>(p.a, row, rows, 0, p.depth, factors);
    for (std::int64_t first = 0; first < columns; first += kStrip) {
      const std::int64_t last = std::min(first + kStrip, columns);
      for (std::int64_t j = first; j < last; j += B::kPanel) {
        const bool lies = j < whole;
        const float* b =
            lies ? reinterpret_cast<const float*>(element_address(p.b, 0, tile.col_begin + j)) : end;
        Fetch nothing;
        register_tile_of<Lanes, false>(rows, p.depth, factors, b, lies ? p.b.row_stride : B::kPanel,
                                       sums + j - first, kStrip, true, Join<Lanes>{}, nothing);
      }
      for (std::int64_t i = 0; i < rows; ++i)
        finish_row<Lanes>(p, row + i, tile.col_begin + first, last - first, sums + i * kStrip);
    }
  }
}

template <class Lanes>
RLK_ISA void run_thin(const ChainProduct& p, const ChainTile& tile, float* scratch) {
  using B = Blocking<Lanes>;
  static_assert(sizeof(float) * (B::kPackedA + (kChain + 1) * kApart) <= B::kScratchBytes &&
                ChainProduct::kThinColumns % B::kPanel == 0 && kStrip % B::kPanel == 0 &&
                ChainProduct::kFewSteps <= B::kChunk && kStepRows <= Lanes::kRows);
  if (tile.row_begin == tile.row_end) return;
  const auto run = p.few_rows() ? run_few_rows<Lanes> : run_few_steps<Lanes>;
  for (std::int64_t col = tile.col_begin; col < tile.col_end; col += ChainProduct::kThinColumns)
    run(p, {tile.row_begin, tile.row_end, col, std::min(col + ChainProduct::kThinColumns, tile.col_end)},
        scratch, scratch + B::kPackedA);
}

}  // namespace
}  // namespace rlk::native
