// What the tests of lm_head's portable kernels share: tensors of any layout, and the same call on the native
// backend.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/rlk.hpp"
#include "simt/lm_head/ops.hpp"

namespace lm_head_simt {

using rlk::DType;
using rlk::Tensor;
namespace kernels = rlk::simt::lm_head;
using kernels::Product;
using kernels::Sum;
using Shape = std::vector<std::int64_t>;

// A tensor in memory of exactly its size, so that the sanitizers see every step outside, with room to spare
// between rows where strides ask for it. What no element covers is a NaN.
struct Array {
  DType type;
  Shape shape, strides;
  std::vector<std::uint8_t> bytes;

  Array(DType t, Shape s, Shape st = {}) : type(t), shape(std::move(s)), strides(std::move(st)) {
    if (strides.empty()) {
      strides.assign(shape.size(), 1);
      for (std::size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
    }
    std::int64_t last = 0;
    for (std::size_t i = 0; i < shape.size(); ++i) last += (shape[i] - 1) * strides[i];
    if (empty()) last = -1;
    bytes.assign(static_cast<std::size_t>((last + 1) * rlk::size_of(t)), 0xff);
  }
  bool empty() const { return std::find(shape.begin(), shape.end(), 0) != shape.end(); }
  template <class F>
  Array& fill(F next) {
    if (empty()) return *this;
    std::vector<std::int64_t> index(shape.size(), 0);
    for (std::size_t done = 0; done == 0;) {
      std::int64_t at = 0;
      for (std::size_t i = 0; i < shape.size(); ++i) at += index[i] * strides[i];
      set(at, next());
      std::size_t i = shape.size();
      while (i-- > 0 && ++index[i] == shape[i]) index[i] = 0;
      if (i == std::size_t(-1)) done = 1;
    }
    return *this;
  }
  void set(std::int64_t at, float x) {
    if (type == DType::f32) {
      std::memcpy(&bytes[static_cast<std::size_t>(4 * at)], &x, 4);
    } else {
      const std::uint16_t h = type == DType::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
      std::memcpy(&bytes[static_cast<std::size_t>(2 * at)], &h, 2);
    }
  }
  float get(std::int64_t at) const {
    float x;
    std::uint16_t h;
    if (type == DType::f32) return std::memcpy(&x, &bytes[static_cast<std::size_t>(4 * at)], 4), x;
    std::memcpy(&h, &bytes[static_cast<std::size_t>(2 * at)], 2);
    return type == DType::bf16 ? rlk::bf16_to_float(h) : rlk::f16_to_float(h);
  }
  Tensor view() { return Tensor(bytes.data(), shape, type, {kDLCPU, 0}, strides); }
};

inline Array normal(DType type, Shape shape, unsigned seed, Shape strides = {}) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> next;
  return Array(type, std::move(shape), std::move(strides)).fill([&] { return next(engine); });
}

inline const char* native(Sum sum) { return sum == Sum::fma64 ? "native.golden" : "native.scalar"; }

}  // namespace lm_head_simt
