// rms_norm on the CPU (arithmetic rms32), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/rms_norm/norm.hpp"
#include "native/levels.hpp"

namespace rlk::native::rms_norm {

using rlk::rms32::kBlock;
using rlk::rms32::kLanes;
using rlk::rms32::Problem;

// A task is a block of kBlock rows. `weight` holds the width's factors in fp32, or is null; `scratch` has
// scratch_floats(). The backward writes the block's share of d_weight to `partial`, where it is wanted.
struct Engine {
  void (*weights)(const Problem& p, float* out);
  void (*forward)(const Problem& p, std::int64_t block, const float* weight, float* scratch);
  void (*backward)(const Problem& p, std::int64_t block, const float* weight, float* scratch, float* partial);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

inline std::int64_t scratch_floats(std::int64_t width) { return kLanes + 5 * width; }

}  // namespace rlk::native::rms_norm
