// From arguments of the loss ops to plain data.
#pragma once

#include <limits>
#include <string>

#include "arithmetic/loss.hpp"
#include "rlk/tensor.hpp"

namespace rlk::loss32 {

inline const float* floats(const In& t) { return t ? t.data<float>() : nullptr; }
inline float* floats(const Out& t) { return t ? t.data<float>() : nullptr; }

inline Mask mask_of(const In& t) { return t ? Mask{t.data<char>(), t.dtype() != DType::f32} : Mask{}; }

inline Bounds bounds_of(const In& t, std::int64_t limit) {
  return {t.data<char>(), t.dtype() == DType::i64, t.dim(0) - 1, limit};
}
// On the CPU: from 0, never falling, and to no more than the limit. Otherwise what is wrong.
inline std::string wrong_bounds(const char* op, const char* name, const Bounds& b) {
  const auto wrong = [&](std::int64_t i, const std::string& want) {
    return std::string(op) + ": " + name + "[" + std::to_string(i) + "] is " + std::to_string(b.raw(i)) +
           ", expected " + want;
  };
  if (b.raw(0) != 0) return wrong(0, "0");
  for (std::int64_t i = 1; i <= b.parts; ++i)
    if (b.raw(i) < b.raw(i - 1)) return wrong(i, "at least " + std::to_string(b.raw(i - 1)));
  if (b.raw(b.parts) > b.limit) return wrong(b.parts, "at most " + std::to_string(b.limit));
  return {};
}

// 0 stands for no limit.
inline float limit_of(double attribute) {
  return attribute == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(attribute);
}

}  // namespace rlk::loss32
