// The chain product's loops, written once and compiled once per instruction set. The including file provides
// RLK_ISA (a target attribute, so that no compiler flag and no other file is affected) and two lane types:
//
//   struct Lanes {
//     using Scalar, Vec;
//     kLanes, kVecs, kRows   a register tile is kRows x (kVecs * kLanes)
//     kLaneRows              up to so many rows lie in the lanes, b's elements broadcast (rows_in_lanes)
//     kDirectRows            up to so many rows b is not packed (direct); both 0 where there is no such path
//     kDirectColumns, direct_rows<Rows, type>                          of run_direct, where that is direct
//     zero, load, store, broadcast, fma, add
//     kStep (optional)       elements of the depth that a step takes: 1, or pairs
//     upcast_run(src, type, count, dst)                                neighbours to Scalar; of pairs pair_run(even, odd, ...)
//     kTile, pack_tile(rows, type, k, count, dst, stride) -> steps     transposes kTile columns of b
//     ChainMode (optional)   lives while chains run, and not where their sums are joined
//     store_row(...) -> columns written                                the vector part of finish_element
//   };
//
// Where things live: a block of a (kRowBlock x kDepthBlock) is upcast once into L2; b is transposed on the
// fly in chunks of kChunk x kPanel that stay in L1 while every row of the block uses them; running sums stay
// in scratch until finished. b is therefore read from memory once per kRowBlock rows, a once per kColBlock
// columns. Only the blocks of the fp32 arithmetic and how their sums join show in the bits; chunks and pieces of
// long blocks only carry a chain on, and fp64 carries its chain through everything.
#pragma once

#include <algorithm>
#include <utility>

#include "native/lm_head/chain_tiles.hpp"
#include "native/lm_head/thin.hpp"

namespace rlk::native {
namespace {

// A block of rows of a, from `first` on, as register tiles take them.
template <class Lanes>
RLK_ISA void pack_rows(const MatrixView& a, std::int64_t row, std::int64_t rows, std::int64_t first,
                       std::int64_t depth, typename Lanes::Scalar* packed) {
  for (std::int64_t i = 0; i < rows; i += Lanes::kRows)
    pack_a<Lanes>(a, row + i, rows - i < Lanes::kRows ? rows - i : Lanes::kRows, first, depth,
                  packed + i / Lanes::kRows * Blocking<Lanes>::kTileA);
}

// The panels of one piece. The sum of a block in one piece passes through `partial`, that of several through the
// chain's buffer. Sums join as they leave the registers, but in a mode that is the chains' alone.
template <class Lanes>
RLK_ISA void run_piece(const ChainProduct& p, const Piece& piece, std::int64_t rows, std::int64_t col,
                       std::int64_t cols, const typename Lanes::Scalar* packed_a,
                       typename Lanes::Scalar* packed_b, typename Lanes::Scalar* partial,
                       typename Lanes::Scalar* sums) {
  using B = Blocking<Lanes>;
  const bool ends = piece.to != kChain, whole = ends && !piece.resumes;
  const bool at_once = ends && piece.depth > 0 && !Modal<Lanes>;
  if (piece.depth == 0) std::fill_n(partial, rows * B::kPanel, 0.0f);
  for (std::int64_t j = 0; j < cols; j += B::kPanel) {
    const std::int64_t width = cols - j < B::kPanel ? cols - j : B::kPanel;
    typename Lanes::Scalar* to = whole ? partial : sums + kChain * B::kSums + j;
    const std::int64_t pitch = whole ? B::kPanel : B::kColBlock;
    run_panel<Lanes>(p.b, rows, col + j, width, cols - j - width, piece.first, piece.depth, packed_a,
                     packed_b, to, pitch, !piece.resumes,
                     at_once ? Join<Lanes>{sums + j, piece.meets, piece.to} : Join<Lanes>{});
    if (ends && !at_once) join_panel<Lanes>(rows, to, pitch, sums + j, piece);
  }
}

// Few rows, b not packed: Lanes::kDirectColumns columns to their whole depth before the next, so that every row of the weight is
// one long stream; rows longer than what of a fits in its place come in several turns of kPieces pieces.
using DirectRows = void (*)(const char* const* columns, std::int64_t depth, const float* a, float* sums,
                            const Piece& piece);
template <class Lanes, Float type>
DirectRows direct_rows_of(std::int64_t rows) {
  return [rows]<int... I>(std::integer_sequence<int, I...>) {
    constexpr DirectRows kOf[] = {Lanes::template direct_rows<I + 1, type>...};
    return kOf[rows - 1];
  }(std::make_integer_sequence<int, Lanes::kDirectRows>());
}
template <class Lanes>
RLK_ISA void run_direct(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                        std::int64_t cols, float* upcast, float* sums) {
  const DirectRows run = p.b.type == Float::f32    ? direct_rows_of<Lanes, Float::f32>(rows)
                         : p.b.type == Float::bf16 ? direct_rows_of<Lanes, Float::bf16>(rows)
                                                   : direct_rows_of<Lanes, Float::f16>(rows);
  using B = Blocking<Lanes>;
  constexpr int kColumns = Lanes::kDirectColumns;
  constexpr std::int64_t kPieces = B::kPackedA / (Lanes::kDirectRows * B::kDepthBlock);
  Piece pieces[kPieces];
  std::int64_t count = 0;
  const auto turn = [&]() RLK_ISA {
    for (std::int64_t n = 0; n < count; ++n)
      for (std::int64_t i = 0; i < rows; ++i) {
        const char* first = element_address(p.a, row + i, pieces[n].first);
        float* line = upcast + (n * Lanes::kDirectRows + i) * B::kDepthBlock;
        if (p.a.col_stride == 1)
          Lanes::upcast_run(first, p.a.type, pieces[n].depth, line);
        else
          for (std::int64_t k = 0; k < pieces[n].depth; ++k)
            line[k] = load_element(first, p.a.type, k * p.a.col_stride);
      }
    for (std::int64_t j = 0; j < cols; j += kColumns)
      for (std::int64_t n = 0; n < count; ++n) {
        const char* columns[kColumns];
        for (int c = 0; c < kColumns; ++c)
          columns[c] = element_address(p.b, pieces[n].first, col + std::min(j + c, cols - 1));
        run(columns, pieces[n].depth, upcast + n * Lanes::kDirectRows * B::kDepthBlock, sums + j, pieces[n]);
      }
    count = 0;
  };
  for_pieces(p, B::kDepthBlock, [&](const Piece& piece) RLK_ISA {
    pieces[count++] = piece;
    if (count == kPieces) turn();
  });
  turn();
  for (std::int64_t i = 0; i < rows; ++i) finish_row<Lanes>(p, row + i, col, cols, sums + i * B::kColBlock);
}

// Depths of so few steps are mostly results: the rows of a register tile are summed across all columns and written while
// their sums are in the nearest cache (those of a whole block fill the next one). All of b has its place at once.
template <class Lanes>
inline constexpr std::int64_t kShallow =
    std::min<std::int64_t>(4, Blocking<Lanes>::kPackedB / Blocking<Lanes>::kColBlock);

template <class Lanes>
RLK_ISA void run_shallow(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                         std::int64_t cols, typename Lanes::Scalar* packed_a,
                         typename Lanes::Scalar* packed_b, typename Lanes::Scalar* sums) {
  using B = Blocking<Lanes>;
  const std::int64_t depth = steps<Lanes>(p.depth);
  pack_rows<Lanes>(p.a, row, rows, 0, p.depth, packed_a);
  for (std::int64_t j = 0; j < cols; j += B::kPanel)
    pack_b<Lanes>(p.b, col + j, std::min<std::int64_t>(B::kPanel, cols - j), 0, p.depth,
                  packed_b + j * depth);
  for (std::int64_t i = 0; i < rows; i += Lanes::kRows) {
    const std::int64_t height = std::min<std::int64_t>(Lanes::kRows, rows - i);
    Fetch nothing;
    for (std::int64_t j = 0; j < cols; j += B::kPanel)
      register_tile_of<Lanes>(height, depth, packed_a + i / Lanes::kRows * B::kTileA, packed_b + j * depth,
                              B::kPanel, sums + j, B::kColBlock, true, Join<Lanes>{}, nothing);
    for (std::int64_t r = 0; r < height; ++r)
      finish_row<Lanes>(p, row + i + r, col, cols, sums + r * B::kColBlock);
  }
}

template <class Lanes>
RLK_ISA void run_block(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                       std::int64_t cols, typename Lanes::Scalar* scratch) {
  using B = Blocking<Lanes>;
  using Scalar = typename Lanes::Scalar;
  Scalar* packed_a = scratch;
  Scalar* packed_b = packed_a + B::kPackedA;
  Scalar* partial = packed_b + B::kPackedB;
  Scalar* sums = partial + B::kPartial;
  if (p.depth == 0) std::fill_n(sums, rows * B::kColBlock, Scalar{0});
  const bool plain = p.leaves == 0 && p.block == B::kDepthBlock;
  if constexpr (Lanes::kLaneRows > 0)
    if (plain && rows > Lanes::kRows && rows <= Lanes::kLaneRows && p.b.row_stride == 1 &&
        p.b.type == Float::f32 && p.a.col_stride == 1)
      return Lanes::rows_in_lanes(p, row, rows, col, cols, packed_a, sums);
  if constexpr (Lanes::kDirectRows > 0)
    if ((p.leaves > 0 || p.block <= B::kDepthBlock * kStep<Lanes>) && p.segments.count == 0 &&
        rows <= Lanes::kDirectRows && p.b.row_stride == 1 && (kStep<Lanes> == 1 || p.a.col_stride == 1))
      return Lanes::direct(p, row, rows, col, cols, packed_a, sums);

  if constexpr (!Modal<Lanes> && Lanes::kLanes > 1)
    if (p.leaves == 0 && p.depth > 0 && p.depth <= p.block && steps<Lanes>(p.depth) <= kShallow<Lanes>)
      return run_shallow<Lanes>(p, row, rows, col, cols, packed_a, packed_b, sums);

  if constexpr (B::kWide) {
    for (std::int64_t k0 = 0; k0 < p.depth; k0 += B::kDepthBlock) {
      const std::int64_t depth = p.depth - k0 < B::kDepthBlock ? p.depth - k0 : B::kDepthBlock;
      pack_rows<Lanes>(p.a, row, rows, k0, depth, packed_a);
      for (std::int64_t j = 0; j < cols; j += B::kPanel) {
        const std::int64_t width = cols - j < B::kPanel ? cols - j : B::kPanel;
        run_panel<Lanes>(p.b, rows, col + j, width, cols - j - width, k0, depth, packed_a, packed_b, sums + j,
                         B::kColBlock, k0 == 0, Join<Lanes>{});
      }
    }
  } else {
    for_pieces(p, B::kDepthBlock * kStep<Lanes>, [&](const Piece& piece) RLK_ISA {
      pack_rows<Lanes>(p.a, row, rows, piece.first, piece.depth, packed_a);
      run_piece<Lanes>(p, piece, rows, col, cols, packed_a, packed_b, partial, sums);
    });
  }
  for (std::int64_t i = 0; i < rows; ++i) finish_row<Lanes>(p, row + i, col, cols, sums + i * B::kColBlock);
}

template <class Lanes>
RLK_ISA void run_tile(const ChainProduct& p, const ChainTile& tile, void* scratch) {
  using B = Blocking<Lanes>;
  const DefaultFloatMode mode;
  if constexpr (kHasThin<Lanes>)
    if (p.thin()) return run_thin<Lanes>(p, tile, static_cast<float*>(scratch));
  // Row blocks of equal height: a last block of a few rows would read all of b for itself.
  const std::int64_t height = tile.row_end - tile.row_begin;
  const std::int64_t blocks = (height + B::kRowBlock - 1) / B::kRowBlock;
  const std::int64_t step =
      blocks == 0 ? 1 : ((height + blocks - 1) / blocks + Lanes::kRows - 1) / Lanes::kRows * Lanes::kRows;
  for (std::int64_t col = tile.col_begin; col < tile.col_end; col += B::kColBlock) {
    const std::int64_t cols = tile.col_end - col < B::kColBlock ? tile.col_end - col : B::kColBlock;
    for (std::int64_t row = tile.row_begin; row < tile.row_end; row += step) {
      const std::int64_t rows = tile.row_end - row < step ? tile.row_end - row : step;
      run_block<Lanes>(p, row, rows, col, cols, static_cast<typename Lanes::Scalar*>(scratch));
    }
  }
}

template <class F32, class F64>
constexpr ChainKernels kernels_of(const char* isa, std::int64_t col_step) {
  using A = Blocking<F32>;
  using B = Blocking<F64>;
  return {isa,
          std::max(A::kScratchBytes, B::kScratchBytes),
          std::max(A::kJoinedBytes, B::kJoinedBytes),
          col_step,
          &run_tile<F32>,
          &run_tile<F64>};
}

// Chains of one kind alone.
template <class Lanes>
constexpr ChainKernels kernels_of(const char* isa, std::int64_t col_step) {
  using B = Blocking<Lanes>;
  return {isa, B::kScratchBytes, B::kJoinedBytes, col_step, &run_tile<Lanes>, nullptr};
}

}  // namespace
}  // namespace rlk::native
