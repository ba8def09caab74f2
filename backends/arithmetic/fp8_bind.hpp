// From a call's factors of an fp8 cache to fp8.hpp's.
#pragma once

#include "arithmetic/fp8.hpp"
#include "rlk/tensor.hpp"

namespace rlk::rows {

template <class View>
Factors factors_of(const View& v) {
  if (!v) return {};
  return {v.template data<float>(), v.dim(0) == 1 ? 0 : v.stride(0)};
}

}  // namespace rlk::rows
