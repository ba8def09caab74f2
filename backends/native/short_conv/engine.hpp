// short_conv on the CPU (arithmetic conv32), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/short_conv/conv.hpp"
#include "native/levels.hpp"

namespace rlk::native::short_conv {

using rlk::conv32::kBlock;
using rlk::conv32::kMostTaps;
using rlk::conv32::Problem;

// A task is kTile channels, from `first` on, of kBlock rows or of a sequence's state: few enough that what the rows share stays
// in the nearest cache.
inline constexpr std::int64_t kTile = 512;
inline constexpr std::int64_t kScratchFloats = (kMostTaps + 1) * kTile;

// `parameters` holds `taps` rows of weights in fp32 and one of the bias, where there is one. The backward adds the block's part
// of d_weight and d_bias to `share`, laid out alike, where it is wanted. d_state writes d_initial.
struct Engine {
  void (*forward)(const Problem& p, std::int64_t block, std::int64_t first, const float* parameters);
  void (*state)(const Problem& p, std::int64_t sequence, std::int64_t first, float* scratch);
  void (*backward)(const Problem& p, std::int64_t block, std::int64_t first, const float* parameters,
                   float* scratch, float* share);
  void (*d_state)(const Problem& p, std::int64_t sequence, std::int64_t first, const float* parameters,
                  float* scratch);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::short_conv
