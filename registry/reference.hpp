// Helpers for references: element access as fp64, whatever the dtype and strides. Slow and plain on purpose.
#pragma once

#include <cmath>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/tensor.hpp"

// On a function with many fused multiply-adds. Without the instruction each is a call of the C library, which
// rounds the same way. The sanitizers cannot live with how the clone is chosen.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#  define RLK_FUSED __attribute__((target_clones("fma", "default")))
#else
#  define RLK_FUSED
#endif

namespace rlk::registry {

inline double load(DType t, const void* p, int64_t i) {
  switch (t) {
    case DType::f16:
      return f16_to_float(static_cast<const uint16_t*>(p)[i]);
    case DType::bf16:
      return bf16_to_float(static_cast<const uint16_t*>(p)[i]);
    case DType::f32:
      return static_cast<const float*>(p)[i];
    case DType::f64:
      return static_cast<const double*>(p)[i];
    case DType::i32:
      return static_cast<const int32_t*>(p)[i];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(p)[i]);
    case DType::u8:
    case DType::boolean:
      return static_cast<const uint8_t*>(p)[i];
    case DType::f8_e4m3:
      return f8_e4m3_to_float(static_cast<const uint8_t*>(p)[i]);
    default:
      return std::nan("");
  }
}

inline void store(DType t, void* p, int64_t i, double x) {
  switch (t) {
    case DType::f16:
      static_cast<uint16_t*>(p)[i] = double_to_f16(x);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(p)[i] = double_to_bf16(x);
      break;
    case DType::f32:
      static_cast<float*>(p)[i] = static_cast<float>(x);
      break;
    case DType::f64:
      static_cast<double*>(p)[i] = x;
      break;
    case DType::i32:
      static_cast<int32_t*>(p)[i] = static_cast<int32_t>(x);
      break;
    case DType::i64:
      static_cast<int64_t*>(p)[i] = static_cast<int64_t>(x);
      break;
    case DType::u8:
    case DType::boolean:
      static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(x);
      break;
    case DType::f8_e4m3:
      static_cast<uint8_t*>(p)[i] = double_to_f8_e4m3(x);
      break;
    default:
      break;
  }
}

inline double round_to(DType t, double x) {
  alignas(8) unsigned char scratch[8] = {};
  store(t, scratch, 0, x);
  return load(t, scratch, 0);
}

// A tensor as a list of rows: every axis but the last flattened, any strides.
class Rows {
 public:
  template <bool Writable>
  explicit Rows(const View<Writable>& v)
      : t_(v.get()),
        data_(static_cast<char*>(t_->data) + t_->byte_offset),
        dtype_(v.dtype()),
        step_(v.rank() ? v.stride(-1) : 1) {}
  int64_t width() const { return t_->ndim ? t_->shape[t_->ndim - 1] : 1; }
  int64_t count() const {
    int64_t n = 1;
    for (int32_t i = 0; i + 1 < t_->ndim; ++i) n *= t_->shape[i];
    return n;
  }
  double get(int64_t row, int64_t column) const { return load(dtype_, data_, offset(row) + column * step_); }
  void set(int64_t row, int64_t column, double x) const {
    store(dtype_, data_, offset(row) + column * step_, x);
  }

 private:
  int64_t offset(int64_t row) const {
    const In view(t_);
    int64_t at = 0;
    for (int32_t i = t_->ndim - 2; i >= 0; --i) {
      at += row % t_->shape[i] * view.stride(i);
      row /= t_->shape[i];
    }
    return at;
  }
  const DLTensor* t_;
  void* data_;
  DType dtype_;
  int64_t step_;
};

// All of a tensor's elements, once: for loops that meet each of them many times.
struct Dense {
  explicit Dense(const Rows& rows) : count(rows.count()), width(rows.width()) {
    values.reserve(static_cast<std::size_t>(count * width));
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < width; ++c) values.push_back(rows.get(r, c));
  }
  template <bool Writable>
  explicit Dense(const View<Writable>& v) : Dense(Rows(v)) {}
  double get(int64_t row, int64_t column) const {
    return values[static_cast<std::size_t>(row * width + column)];
  }
  int64_t count, width;
  std::vector<double> values;
};

}  // namespace rlk::registry
