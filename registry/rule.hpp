// What the written rules of arithmetic ids share: which results are wanted, how one is stored, how operands are read.
#pragma once

#include <bit>
#include <cmath>
#include <map>
#include <vector>

#include "registry/op.hpp"
#include "registry/reference.hpp"

namespace rlk::registry {

// Calls body(tensor, element) for every wanted element of result `argument`, if the call has it.
template <class Body>
void for_elements(const RuleQuery& q, std::size_t argument, Body body) {
  const DLTensor* t = q.slots[argument].tensor;
  if (!t) return;
  if (q.sample.empty())
    for (int64_t i = 0, n = In(t).numel(); i < n; ++i) body(*t, i);
  for (const Sample& s : q.sample)
    if (s.argument == argument)
      for (int64_t i : s.elements) body(*t, i);
}

// Rounds to the result's dtype; a NaN is the canonical one.
inline void finish(const DLTensor& out, int64_t element, double value) {
  const DType type = dtype_of(out.dtype);
  if (type == DType::f32 && std::isnan(value))
    static_cast<float*>(out.data)[element] = std::bit_cast<float>(kCanonicalNan32);
  else
    store(type, out.data, element, value);
}

// What is added to a rounded sum: exact in fp32 but for its one rounding, which the truth does without.
inline double add(DType type, double sum, double more) {
  if (type == DType::f64) return sum + more;
  return double{static_cast<float>(round_to(type, sum)) + static_cast<float>(more)};
}

// `count` elements of a dense tensor from `first` on, `step` apart.
inline void read(const In& t, int64_t first, int64_t step, int64_t count, std::vector<float>& to) {
  to.resize(static_cast<std::size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    to[static_cast<std::size_t>(i)] = static_cast<float>(load(t.dtype(), t.data<char>(), first + i * step));
}

// Vectors of `count` elements, number n from element n * `apart` on. A rule that writes all results meets each many
// times, and decodes it once; of a sample's few, which may be long, none is kept.
class Vectors {
 public:
  Vectors(const RuleQuery& q, const In& t, int64_t apart, int64_t step, int64_t count)
      : keeps_(q.sample.empty()), t_(t), apart_(apart), step_(step), count_(count) {}
  void read(int64_t n, std::vector<float>& to) {
    if (!keeps_) return registry::read(t_, n * apart_, step_, count_, to);
    const auto [known, fresh] = known_.try_emplace(n);
    if (fresh) registry::read(t_, n * apart_, step_, count_, known->second);
    to = known->second;
  }

 private:
  const bool keeps_;
  const In& t_;
  const int64_t apart_, step_, count_;
  std::map<int64_t, std::vector<float>> known_;
};

}  // namespace rlk::registry
