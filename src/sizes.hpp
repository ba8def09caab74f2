// How large a tensor is in the dimensions that evidence speaks of: what a certificate covered, and what a
// call has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rlk/plugin.h"

namespace rlk {

// "hidden" with its rows and its width where all leading axes are rows; otherwise "x/4", by rank, with every
// axis.
inline std::pair<std::string, std::vector<int64_t>> extent_of(const rlk_argument& a,
                                                              std::span<const int64_t> shape) {
  if (a.batch_axis != -2 || shape.empty())
    return {a.name + ("/" + std::to_string(shape.size())), {shape.begin(), shape.end()}};
  int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return {a.name, {rows, shape.back()}};
}

}  // namespace rlk
