// Elements by type for lm_head's scalar code, and the end of every product: how a sum becomes an element.
// Vector code must agree bit for bit. Also the guard that makes a kernel immune to a caller's flush-to-zero
// or rounding mode.
#pragma once

#include <bit>
#include <cstdint>

#include "native/lm_head/chain.hpp"
#include "rlk/half.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace rlk::native {

// MXCSR at its default (round to nearest, no flushing, exceptions masked) for a scope. Threads that a caller
// created may carry any mode, and a mode would change bits.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  explicit DefaultFloatMode(bool flush_results = false) : saved_(_mm_getcsr()) {
    _mm_setcsr(flush_results ? 0x9f80u : 0x1f80u);
  }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;

 public:
#else
  explicit DefaultFloatMode(bool = false) {}
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

// fp64 to fp32 rounded to odd: a later rounding to 16 bits then equals rounding the fp64 value once.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  if (back == x || x != x) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool away = (x > 0) == (back > x);
  if (away) bits -= 1;  // the neighbour towards zero
  return std::bit_cast<float>(bits | 1u);
}

inline float load_element(const void* data, Float type, std::int64_t index) {
  switch (type) {
    case Float::f32:
      return static_cast<const float*>(data)[index];
    case Float::bf16:
      return bf16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case Float::f16:
      return f16_to_float(static_cast<const std::uint16_t*>(data)[index]);
  }
  return 0;
}

inline void store_element(void* data, Float type, std::int64_t index, float value) {
  switch (type) {
    case Float::f32:
      static_cast<float*>(data)[index] = canonical(value);
      return;
    case Float::bf16:
      static_cast<std::uint16_t*>(data)[index] = float_to_bf16(value);
      return;
    case Float::f16:
      static_cast<std::uint16_t*>(data)[index] = float_to_f16(value);
      return;
  }
}

// What `value` becomes when it is stored as `type` and read back.
inline float round_as(float value, Float type) {
  switch (type) {
    case Float::f32:
      return value;
    case Float::bf16:
      return bf16_to_float(float_to_bf16(value));
    case Float::f16:
      return f16_to_float(float_to_f16(value));
  }
  return value;
}

// A finished sum, brought to fp32 so that one more rounding to `type` is the only one that counts.
inline float settle(float sum, Float) { return sum; }
inline float settle(double sum, Float type) {
  return type == Float::f32 ? static_cast<float>(sum) : round_to_odd(sum);
}

// The end of every product: round, add the bias, round again, and the residual likewise.
template <class Sum>
inline void finish_element(void* out, Float type, std::int64_t index, Sum sum, const void* bias,
                           Float bias_type, std::int64_t bias_index, const void* residual = nullptr,
                           Float residual_type = Float::f32, std::int64_t residual_index = 0) {
  float value = settle(sum, type);
  if (bias != nullptr) value = round_as(value, type) + load_element(bias, bias_type, bias_index);
  if (residual != nullptr)
    value = round_as(value, type) + load_element(residual, residual_type, residual_index);
  store_element(out, type, index, value);
}

}  // namespace rlk::native
