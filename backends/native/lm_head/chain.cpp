#include "native/lm_head/chain.hpp"

#include <algorithm>

namespace rlk::native {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

// Columns first: a tile 512 wide reuses what it packs over its rows. Rows are cut only when the columns alone
// cannot feed the workers, down to tiles that still amortise a transposed panel. Thin products go along whole lines, pages at
// least while there is one for every worker.
constexpr std::int64_t kShortest = 48;  // rows of a tile, but where the product has fewer

ChainPlan plan_chain(const ChainProduct& product, const ChainKernels& kernels, std::int64_t workers) {
  const bool thin = product.thin();
  const std::int64_t width = thin ? ChainProduct::kThinColumns : 512;
  constexpr std::int64_t kTallest = 2520;
  const std::int64_t wanted = workers <= 1 ? 1 : 4 * workers;
  ChainPlan plan;
  plan.tile_cols = width;
  plan.tile_rows = std::min(std::max<std::int64_t>(product.rows, 1), kTallest);
  const auto count = [&] {
    return ceil_div(product.rows, plan.tile_rows) * ceil_div(product.cols, plan.tile_cols);
  };
  while (count() < wanted && plan.tile_rows > 2 * kShortest)
    plan.tile_rows = ceil_div(plan.tile_rows, 2 * 12) * 12;
  constexpr std::int64_t kPage = 1024;
  const auto narrowest = [&] { return thin && count() >= workers ? kPage : kernels.col_step; };
  while (count() < wanted && plan.tile_cols > narrowest()) plan.tile_cols /= 2;
  plan.tile_cols = std::max(plan.tile_cols, kernels.col_step);
  plan.row_tiles = ceil_div(product.rows, plan.tile_rows);
  plan.col_tiles = ceil_div(product.cols, plan.tile_cols);
  return plan;
}

std::int64_t most_tiles(std::int64_t rows, std::int64_t cols, const ChainKernels& kernels) {
  return ceil_div(rows, kShortest) * ceil_div(cols, kernels.col_step);
}

// Neighbouring tiles share their columns, so that workers find each other's part of b in a shared cache.
ChainTile ChainPlan::tile(const ChainProduct& product, std::int64_t index) const {
  const std::int64_t row = (index % row_tiles) * tile_rows;
  const std::int64_t col = (index / row_tiles) * tile_cols;
  return {row, std::min(row + tile_rows, product.rows), col, std::min(col + tile_cols, product.cols)};
}

}  // namespace rlk::native
