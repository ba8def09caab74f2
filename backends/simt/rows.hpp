// Rows of tensors as a GPU thread sees them.
#pragma once

#include "arithmetic/rows.hpp"
#include "simt/simt.hpp"

namespace rlk::rows {

// A tensor's row, or one that is absent.
struct RowOf {
  void* data;
  Type type;
  __device__ RowOf(const Axes& axes, const Tensor& t, std::int64_t row)
      : data(t ? t.row(axes, row) : nullptr), type(t.type) {}
  __device__ explicit operator bool() const { return data != nullptr; }
  __device__ float get(std::int64_t i) const { return load(type, data, i); }
  __device__ void set(std::int64_t i, float x) const { store(type, data, i, x); }
};

}  // namespace rlk::rows
