// What the written rules of arithmetic ids share: which results are wanted, how one is stored, how operands are read.
#pragma once

#include <bit>
#include <cmath>
#include <span>
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

// The vectors of `count` elements that a tensor consists of, number n from element n * `apart` on. A rule that writes all
// results meets each many times, so all are decoded at once; of a sample's few, which may be long, one at a time, until
// the next is read.
class Vectors {
 public:
  Vectors(const RuleQuery& q, const In& t, int64_t apart, int64_t step, int64_t count)
      : keeps_(q.sample.empty()), t_(t), apart_(apart), step_(step), count_(count) {}
  std::span<const float> operator[](int64_t n) {
    const auto count = static_cast<std::size_t>(count_);
    if (!keeps_ || count == 0) {
      read(t_, n * apart_, step_, count_, decoded_);
      return decoded_;
    }
    if (decoded_.empty()) decode_all();
    return std::span(decoded_).subspan(static_cast<std::size_t>(n) * count, count);
  }

 private:
  void decode_all() {
    decoded_.resize(static_cast<std::size_t>(t_.numel()));
    float* to = decoded_.data();
    for (int64_t n = 0; n < t_.numel() / count_; ++n)
      for (int64_t i = 0; i < count_; ++i)
        *to++ = static_cast<float>(load(t_.dtype(), t_.data<char>(), n * apart_ + i * step_));
  }

  const bool keeps_;
  const In& t_;
  const int64_t apart_, step_, count_;
  std::vector<float> decoded_;
};

}  // namespace rlk::registry
