// embedding on the CPU (arithmetic embed32), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/embedding/gather.hpp"
#include "native/levels.hpp"

namespace rlk::native::embedding {

using embed32::Problem;

// Columns that one task of the backward sums.
inline constexpr std::int64_t kTile = 1024;

struct Engine {
  void (*forward)(const Problem& p, std::int64_t token);
  // One tile, from column `first` on, of a row of d_weight: the sum over `count` tokens in the order given.
  void (*backward)(const Problem& p, std::int64_t row, std::int64_t first, const std::int64_t* tokens,
                   std::int64_t count);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::embedding
