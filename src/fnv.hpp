// FNV-1a of text and numbers, for fingerprints: short inputs, the same value on every machine.
#pragma once

#include <cstdint>
#include <string_view>

namespace rlk {

inline constexpr uint64_t kFnvStart = 14695981039346656037ull;

inline uint64_t hashed(uint64_t seed, std::string_view text) noexcept {
  for (char c : text) seed = (seed ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return (seed ^ 0xffu) * 1099511628211ull;
}
inline uint64_t hashed(uint64_t seed, uint64_t value) noexcept {
  for (int i = 0; i < 8; ++i) seed = (seed ^ (value >> (8 * i) & 0xffu)) * 1099511628211ull;
  return seed;
}

}  // namespace rlk
