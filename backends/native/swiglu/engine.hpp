// swiglu on the CPU (arithmetic act32), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/swiglu/swiglu.hpp"
#include "native/levels.hpp"

namespace rlk::native::swiglu {

using act32::Problem;

// A task is kTile columns of a row, or what is left of it.
inline constexpr std::int64_t kTile = 2048;

struct Engine {
  void (*forward)(const Problem& p, std::int64_t row, std::int64_t first);
  void (*backward)(const Problem& p, std::int64_t row, std::int64_t first);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::swiglu
