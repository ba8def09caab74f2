// embedding on the CPU (arithmetic embed32), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "native/levels.hpp"

namespace rlk::native::embedding {

using embed32::Problem;

// Columns that one task of the backward sums.
inline constexpr std::int64_t kTile = 2048;

// Tokens by row of d_weight, in their order: those of row v are [begin[v], begin[v + 1]) of `tokens`.
struct Order {
  std::int64_t *begin, *tokens;
};

struct Engine {
  // Tokens [first, last).
  void (*forward)(const Problem& p, std::int64_t first, std::int64_t last);
  // One tile, from column `column` on, of rows [first, last) of d_weight: each the sum over its tokens in their order.
  void (*backward)(const Problem& p, const Order& order, std::int64_t first, std::int64_t last,
                   std::int64_t column);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::embedding
