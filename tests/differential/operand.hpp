// Tensors of a call in guarded memory, laid out at random.
#pragma once

#include <string>
#include <vector>

#include "calls.hpp"
#include "guarded.hpp"
#include "rlk/tensor.hpp"

namespace differential {

// A dense array of one dtype.
struct Array {
  Shape shape;
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;

  Array() = default;
  Array(Shape shape, DType dtype);
  int64_t count() const;
  double operator[](int64_t i) const;
};

// One tensor: what a kernel may touch is its elements, and nothing else.
class Operand {
 public:
  // Strides at random where the argument may be strided.
  Operand(const rlk_argument& argument, const Shape& shape, DType dtype, Random& random);
  Operand(Operand&&) = default;

  const DLTensor* view();
  // Elements in, all memory read-only if the argument is.
  void put(const Array& values);
  Array get() const;
  // Bytes that belong to no element and were written.
  bool strayed() const;
  void poison() const { memory_.fill(); }

 private:
  void lay_out(const rlk_argument& argument, Random& random);
  int64_t offset(int64_t flat) const;

  Shape shape_, strides_;
  DType dtype_;
  bool dense_ = true, written_ = false;
  int64_t first_ = 0;  // elements from the start of the memory to the tensor's first one
  Guarded memory_;
  DLTensor dl_{};
};

}  // namespace differential
