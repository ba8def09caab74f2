// Whose 2^x makes weights of scores, where a GPU's tensor cores are replayed: the library's own, or that of Hopper's special
// function units.
#pragma once

#include "arithmetic/attention/problem.hpp"
#include "registry/ex2_sm90.hpp"

namespace rlk::native::attention {

enum class Exponential { own, unit };

inline float weight_by(Exponential by, float score, float c, float minus_base) {
  return by == Exponential::own ? attn128::weight(score, c, minus_base)
                                : registry::ex2_sm90(simt::fused(score, c, minus_base));
}

}  // namespace rlk::native::attention
