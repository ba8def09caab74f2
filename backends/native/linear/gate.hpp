// linear with activation = swiglu: a task computes a tile of gate and of up into its scratch, rounded as y holds them, and leaves their
// swiglu. So [M, N] products are neither written to memory nor read again; the bits are those of linear, then swiglu.
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"
#include "native/linear/run.hpp"
#include "native/lm_head/float.hpp"
#include "native/swiglu/engine.hpp"

namespace rlk::native {
namespace {

// swiglu of one row, from column `first` on, up to swiglu::kTile columns: an engine's forward, or golden's.
using Activate = void (*)(const act32::Problem& p, std::int64_t row, std::int64_t first);

inline void activate_golden(const act32::Problem& p, std::int64_t row, std::int64_t first) {
  const auto at = [&](const rows::Tensor& t) { return t.row(p.axes, row); };
  for (std::int64_t i = first; i < std::min(p.width, first + swiglu::kTile); ++i) {
    double value = act32::activated<double>(p, rows::load(p.gate.type, at(p.gate), i));
    if (p.twice) {
      std::uint32_t cell = 0;
      rows::store(p.gate.type, &cell, 0, value);
      value = rows::load(p.gate.type, &cell, 0);
    }
    rows::store(p.out.type, at(p.out), i, value * rows::load(p.up.type, at(p.up), i));
  }
}

inline bool gated(const Linear& a) { return a.activation == Linear::Activation::swiglu; }
inline bool interleaved(const Linear& a) { return a.gate_up == Linear::GateUp::interleaved64; }

// Rows of products [gate and up of each run in turn] and where their swiglu goes.
struct GatedRows {
  Float type;
  std::int64_t rows, columns, run;  // columns of the result
  const std::byte* products;
  std::int64_t stride;
  std::byte* out;
  std::int64_t out_stride;
  bool twice;

  void activate(Activate engine) const {
    act32::Problem p;
    p.twice = twice;
    p.axes.count = 1, p.axes.size[0] = rows, p.axes.rows = rows;
    const auto place = [&](const std::byte* data, std::int64_t at, std::int64_t step) {
      rows::Tensor t{const_cast<std::byte*>(data) + at * bytes_of(type), type};
      t.stride[0] = step;
      return t;
    };
    for (std::int64_t first = 0; first < columns; first += run) {
      p.width = std::min(run, columns - first);
      p.gate = place(products, 2 * first, stride), p.up = place(products, 2 * first + p.width, stride);
      p.out = place(out, first, out_stride);
      for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t i = 0; i < p.width; i += swiglu::kTile) engine(p, row, i);
    }
  }
};

// Tiles of the result, as many as keep the workers busy.
struct GatedTiles {
  static constexpr std::int64_t kRows = 252,
                                kColumns = 512;  // a block of the chains, which packs its rows once
  static constexpr std::int64_t kFewestRows = 24, kFewestColumns = gate_up::kRun;
  static constexpr std::uint64_t kBytes = sizeof(float) * kRows * 2 * kColumns;
  std::int64_t rows, columns, tile_rows, tile_columns = kColumns;

  GatedTiles(std::int64_t m, std::int64_t n, std::int64_t wanted)
      : rows(m), columns(n), tile_rows(even_rows(m)) {
    while (count() < wanted && tile_columns > kFewestColumns) tile_columns /= 2;
    while (count() < wanted && tile_rows > 2 * kFewestRows) tile_rows = (tile_rows + 23) / 24 * 12;
  }
  // Of equal tiles: a last one of a few rows would read all of the weight for itself.
  static std::int64_t even_rows(std::int64_t m) {
    const std::int64_t tiles = std::max<std::int64_t>(1, (m + kRows - 1) / kRows),
                       each = (m + tiles - 1) / tiles;
    return std::max<std::int64_t>(1, m <= kRows ? m : (each + 11) / 12 * 12);
  }
  std::int64_t down() const { return (rows + tile_rows - 1) / tile_rows; }
  std::int64_t count() const { return down() * ((columns + tile_columns - 1) / tile_columns); }
  static std::int64_t most(std::int64_t m, std::int64_t n) {
    return (m + kFewestRows - 1) / kFewestRows * ((n + kFewestColumns - 1) / kFewestColumns);
  }
  ChainTile tile(std::int64_t index) const {
    const std::int64_t row = index % down() * tile_rows, column = index / down() * tile_columns;
    return {row, std::min(rows, row + tile_rows), column, std::min(columns, column + tile_columns)};
  }
};

// product(weight_row, columns, at): so many columns of the products of a tile, to column `at` of its scratch.
template <class Product>
void for_products(const Linear& a, const ChainTile& tile, Product product) {
  const std::int64_t columns = tile.col_end - tile.col_begin;
  if (interleaved(a)) return product(2 * tile.col_begin, 2 * columns, 0);
  product(tile.col_begin, columns, 0);
  product(a.weight.dim(0) / 2 + tile.col_begin, columns, columns);
}

}  // namespace
}  // namespace rlk::native
