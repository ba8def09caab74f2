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

// The largest size of a number among the elements [first, end), or all; 0 where none is finite.
double largest(const Array& a, int64_t first, int64_t end);
inline double largest(const Array& a) { return largest(a, 0, a.numel()); }

// What the peaks of a result's rows are, by which errors are measured: the truth's.
struct Peaks {
  const Array* instead = nullptr;  // or those of another result
  const Array* terms = nullptr;    // or, where that is more, `part` of those of another
  double part = 0;
};

// Adds one result's distance from the truth (fp64) to what is known, and says in words when it breaks the
// bound.
class Distance {
 public:
  Distance(std::string result, DType dtype, const registry::Bound& bound);
  std::string add(const Array& got, const Array& truth, const registry::Bound& bound, int64_t reduction,
                  Difference& where, const Peaks& peaks = {});
  Accuracy summary() const;

 private:
  class Comparison;
  Accuracy a_;
  std::vector<double> samples_;  // of the metric, thinned
  int64_t exact_ = 0;
};

}  // namespace rlk::harness
