// What the op layers here need to know of a tensor.
#pragma once

#include "onednn/rules.hpp"
#include "rlk/backend.hpp"

namespace rlk::onednn {

template <bool W>
std::int64_t rows_of(const View<W>& t) {
  std::int64_t rows = 1;
  for (std::int32_t i = 0; i + 1 < t.rank(); ++i) rows *= t.dim(i);
  return rows;
}

// One stride leads through all rows; that of dimension -2 if there is one.
template <bool W>
bool even_rows(const View<W>& t) {
  for (std::int32_t i = t.rank() - 3; i >= 0; --i)
    if (t.dim(i) != 1 && t.stride(i) != t.stride(i + 1) * t.dim(i + 1)) return false;
  return true;
}

// From one row to the next; a vector is one row.
template <bool W>
std::int64_t row_stride(const View<W>& t) {
  return t.rank() > 1 ? t.stride(-2) : t.dim(-1);
}

}  // namespace rlk::onednn
