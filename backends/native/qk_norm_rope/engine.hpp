// qk_norm_rope on the CPU (arithmetic rms32/rope32), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/qk_norm_rope/problem.hpp"
#include "native/levels.hpp"

namespace rlk::native::qk_norm_rope {

using rlk::rms32_rope32::kMostDims;
using rlk::rms32_rope32::Part;
using rlk::rms32_rope32::Problem;

// The weights of a call in fp32.
struct Weights {
  alignas(64) float q[kMostDims], k[kMostDims];
};

struct Engine {
  void (*weights)(const Problem& p, Weights& out);
  // All heads of one token, whose position the tables have.
  void (*token)(const Problem& p, std::int64_t token, const Weights& weights);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::qk_norm_rope
