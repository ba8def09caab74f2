// The arithmetic this backend promises, as plain scalar code, and data to hold primitives against it. oneDNN
// does not promise any order of additions; a primitive is used only after it has reproduced the rule bit for
// bit.
//
//   fma32/kb1024   ascending fp32 FMA chain inside each block of 1024 along K, block sums added in order
//   amx/k32        K is filled with zeros to a multiple of 32. In each block of 32, ascending: one fp32 FMA
//   chain
//                  over the even positions and one over the odd ones, both from +0; then
//                  sum = sum + (even + odd). Subnormal inputs and results count as zero (of their sign).
//                  A K above 4096 is cut into blocks of 4096, whose sums are added in order in plain fp32.
#pragma once

#include <cstdint>

namespace rlk::onednn {

enum class Type : std::uint8_t { f32, bf16, f16 };
constexpr std::int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Dot product by the rule of `type`, inside one depth block; a subnormal-flushing rule needs no mode set by
// the caller.
float rule(Type type, const void* a, const void* b, std::int64_t depth);

// Numbers of either sign, a few binades wide, the same for the same seed.
void fill(Type type, void* data, std::int64_t count, std::uint32_t seed);

// MXCSR at its default for a scope: some of oneDNN's code obeys it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() noexcept;
  ~DefaultFloatMode();
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  unsigned saved_;
};

}  // namespace rlk::onednn
