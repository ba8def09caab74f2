// From arguments of the loss ops to plain data.
#pragma once

#include <limits>

#include "arithmetic/loss.hpp"
#include "rlk/tensor.hpp"

namespace rlk::loss32 {

inline const float* floats(const In& t) { return t ? t.data<float>() : nullptr; }
inline float* floats(const Out& t) { return t ? t.data<float>() : nullptr; }

inline Mask mask_of(const In& t) { return t ? Mask{t.data<char>(), t.dtype() != DType::f32} : Mask{}; }

// 0 stands for no limit.
inline float limit_of(double attribute) {
  return attribute == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(attribute);
}

}  // namespace rlk::loss32
