// ratio_kl on the CPU (arithmetic loss32/f64), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/ratio_kl/ratio_kl.hpp"
#include "native/levels.hpp"

namespace rlk::native::ratio_kl {

using loss32::RatioProblem;

// A task is kTile tokens, or what is left of them.
inline constexpr std::int64_t kTile = 1024;

struct Engine {
  void (*forward)(const RatioProblem& p, std::int64_t first);
  void (*backward)(const RatioProblem& p, std::int64_t first);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::ratio_kl
