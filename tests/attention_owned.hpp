// What tests of attention and of its gradients share.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace attention_test {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<int64_t>;

// A dense tensor that owns its bytes.
struct Owned {
  Shape shape;
  DType type;
  std::vector<std::byte> bytes;

  Owned(Shape s, DType t, double fill) : shape(std::move(s)), type(t) {
    bytes.resize(static_cast<std::size_t>(count() * rlk::size_of(t)));
    for (int64_t i = 0; i < count(); ++i) set(i, fill);
  }
  Owned(Shape s, DType t, std::mt19937& random) : Owned(std::move(s), t, 0.0) {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < count(); ++i) set(i, normal(random));
  }
  int64_t count() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  void set(int64_t i, double x) {
    const auto single = static_cast<float>(x);
    const uint16_t half = type == DType::bf16 ? rlk::double_to_bf16(x) : rlk::double_to_f16(x);
    if (type == DType::f8_e4m3)
      bytes[static_cast<std::size_t>(i)] = std::byte{rlk::double_to_f8_e4m3(x)};
    else if (type == DType::f32)
      std::memcpy(bytes.data() + 4 * i, &single, 4);
    else
      std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  float f32(int64_t i) const {
    float x;
    std::memcpy(&x, bytes.data() + 4 * i, 4);
    return x;
  }
  double number(int64_t i) const {
    uint16_t half;
    std::memcpy(&half, bytes.data() + i * rlk::size_of(type), 2);
    return type == DType::f32    ? double{f32(i)}
           : type == DType::bf16 ? rlk::bf16_to_float(half)
                                 : rlk::f16_to_float(half);
  }
  // Bytes of one row of the first axis.
  std::size_t row() const { return bytes.size() / static_cast<std::size_t>(shape[0]); }
  // From row `from` of the first axis on, as a tensor with `leading` in that axis's place.
  Tensor view(int64_t from, const Shape& leading) const {
    Shape s = leading;
    s.insert(s.end(), shape.begin() + 1, shape.end());
    return Tensor(const_cast<std::byte*>(bytes.data()) + static_cast<std::size_t>(from) * row(), std::span(s),
                  type);
  }
  void copy_row(int64_t to, const Owned& from, int64_t at) {
    std::memcpy(bytes.data() + static_cast<std::size_t>(to) * row(),
                from.bytes.data() + static_cast<std::size_t>(at) * row(), row());
  }
};

// Whether rows [from, from + count) of x are the rows from `at` on of y.
inline bool same_rows(const Owned& x, int64_t from, int64_t count, const Owned& y, int64_t at) {
  return count == 0 || std::memcmp(x.bytes.data() + static_cast<std::size_t>(from) * x.row(),
                                   y.bytes.data() + static_cast<std::size_t>(at) * y.row(),
                                   static_cast<std::size_t>(count) * x.row()) == 0;
}

// A call was refused in these words.
inline void says(const rlk::Status& status, const char* text) {
  CAPTURE(std::string(status.message()));
  CHECK(!status);
  CHECK(std::string(status.message()).find(text) != std::string::npos);
}

}  // namespace attention_test
