// Helpers for writing an op's schema: dtype sets, failures, and shape comparison in words.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "rlk/plugin.h"
#include "rlk/tensor.hpp"

namespace rlk::registry {

inline constexpr uint32_t kFloats = RLK_F16 | RLK_BF16 | RLK_F32;
// Results may also be asked for in fp64, which only the reference serves.

template <class... T>
int32_t fail(const rlk_host* host, fmt::format_string<T...> format, T&&... values) {
  return host->fail(RLK_INVALID_ARGUMENT, fmt::format(format, std::forward<T>(values)...).c_str());
}

inline DType dtype(const DLTensor* t) { return dtype_of(t->dtype); }
inline int64_t dim(const DLTensor* t, int32_t i) { return t->shape[i < 0 ? i + t->ndim : i]; }

// The shape of t with its last dimension replaced.
inline rlk_shape with_last(const DLTensor* t, int64_t last, uint32_t dtypes, DType preferred) {
  rlk_shape s{t->ndim, dtypes, static_cast<uint32_t>(preferred), {}};
  for (int32_t i = 0; i < t->ndim; ++i) s.dim[i] = t->shape[i];
  s.dim[t->ndim - 1] = last;
  return s;
}
inline rlk_shape shape_of(std::initializer_list<int64_t> dims, uint32_t dtypes, DType preferred) {
  rlk_shape s{static_cast<int32_t>(dims.size()), dtypes, static_cast<uint32_t>(preferred), {}};
  int32_t i = 0;
  for (int64_t d : dims) s.dim[i++] = d;
  return s;
}
inline rlk_shape like(const DLTensor* t, uint32_t dtypes, DType preferred) {
  return with_last(t, t->ndim ? t->shape[t->ndim - 1] : 1, dtypes, preferred);
}

}  // namespace rlk::registry
