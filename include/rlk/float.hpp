// The floating-point types of elements in kernels, as plain data for host and device code alike. DType
// (tensor.hpp) is every type that a tensor may have.
#pragma once

#include <cstdint>

namespace rlk {

enum class Float : std::uint8_t { f32, bf16, f16 };

constexpr std::int64_t bytes_of(Float type) { return type == Float::f32 ? 4 : 2; }
constexpr const char* name_of(Float type) {
  return type == Float::f32 ? "fp32" : type == Float::bf16 ? "bf16" : "fp16";
}

}  // namespace rlk
