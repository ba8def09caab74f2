// Comparing results: bit for bit, and by distance from the truth.
#pragma once

#include <cstdint>
#include <optional>

#include "registry/op.hpp"
#include "rlk/harness.hpp"
#include "src/harness/problem.hpp"

namespace rlk::harness {

struct Difference {
  int64_t index;
  uint64_t expected, got;
  int bits;
};
// The first element whose bits differ, NaN payloads and signed zeros included.
std::optional<Difference> first_difference(const Array& expected, const Array& got);

// Adds one result's distance from the truth (fp64) to what is known, and says in words when it breaks the
// bound.
class Distance {
 public:
  Distance(std::string result, DType dtype, const registry::Bound& bound);
  // scale: where given, its rows' peaks take the place of the truth's.
  std::string add(const Array& got, const Array& truth, const registry::Bound& bound, int64_t reduction,
                  Difference& where, const Array* scale = nullptr);
  Accuracy summary() const;

 private:
  class Comparison;
  Accuracy a_;
  std::vector<double> samples_;  // of the metric, thinned
  int64_t exact_ = 0;
};

}  // namespace rlk::harness
