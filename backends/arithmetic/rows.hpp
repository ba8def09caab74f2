// Tensors as rows, for ops that treat every row [width] alike: leading axes of any strides, a dense last one. Plain data,
// passed to GPU kernels by value. Knows nothing of the registry.
#pragma once

#include <cstdint>

#include "arithmetic/half.hpp"
#include "rlk/float.hpp"

namespace rlk::rows {

using simt::bf16;
using simt::fp16;

using Type = Float;

RLK_HD std::int64_t size_of(Type t) { return t == Type::f32 ? 4 : 2; }

// Leading axes that a call still has after neighbours that all tensors walk alike were joined: mostly one.
inline constexpr int kMostAxes = 7;
struct Axes {
  int count = 0;
  std::int64_t size[kMostAxes] = {};
  std::int64_t rows = 1;
};

// Absent when data is null. Strides count elements.
struct Tensor {
  void* data = nullptr;
  Type type = Type::f32;
  std::int64_t stride[kMostAxes] = {};

  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD std::int64_t offset(const Axes& axes, std::int64_t row) const {
    if (axes.count == 1) return row * stride[0];
    std::int64_t at = 0;
    for (int i = axes.count - 1; i >= 0; --i) {
      at += row % axes.size[i] * stride[i];
      row /= axes.size[i];
    }
    return at;
  }
  RLK_HD void* row(const Axes& axes, std::int64_t r) const {
    return static_cast<char*>(data) + offset(axes, r) * size_of(type);
  }
};

RLK_HD float load(Type type, const void* p, std::int64_t i) {
  if (type == Type::f32) return static_cast<const float*>(p)[i];
  if (type == Type::bf16) return simt::to_float(static_cast<const bf16*>(p)[i]);
  return simt::to_float(static_cast<const fp16*>(p)[i]);
}
RLK_HD void store(Type type, void* p, std::int64_t i, float x) {
  if (type == Type::f32) {
    static_cast<float*>(p)[i] = simt::from_float<float>(x);
  } else if (type == Type::bf16) {
    static_cast<bf16*>(p)[i] = simt::from_float<bf16>(x);
  } else {
    static_cast<fp16*>(p)[i] = simt::from_float<fp16>(x);
  }
}
// One rounding from fp64: on the way through fp32 what is cut off leaves the last bit odd, so that no tie appears.
RLK_HD void store(Type type, void* p, std::int64_t i, double x) {
  float f = static_cast<float>(x);
  const std::uint32_t bits = simt::float_bits(f);
  if (type != Type::f32 && static_cast<double>(f) != x && x == x && (bits & 1u) == 0) {
    const double magnitude = f < 0 ? -static_cast<double>(f) : static_cast<double>(f);
    f = simt::bits_float(magnitude > (x < 0 ? -x : x) ? bits - 1 : bits + 1);
  }
  store(type, p, i, f);
}
// x as a tensor of this type holds it.
RLK_HD float round_to(Type type, float x) {
  if (type == Type::bf16) return simt::to_float(simt::from_float<bf16>(x));
  if (type == Type::f16) return simt::to_float(simt::from_float<fp16>(x));
  return x;
}

}  // namespace rlk::rows
