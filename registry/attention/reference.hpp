// One row of attention in fp64, for the reference and for samples of large calls.
#pragma once

#include <vector>

#include "registry/attention/rows.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::attention {

struct TrueRow {
  std::vector<double> out;
  double lse;
};
TrueRow true_row(const Attention& a, const Sequences<Attention>& all, const Sequence& s, int64_t i,
                 int64_t head);

}  // namespace rlk::registry::attention
