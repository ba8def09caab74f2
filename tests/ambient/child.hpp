// What an ambient variable does to a library called directly, and to the same product through rlk. A child
// prints "direct <hash>" and "rlk <hash or refusal>" and is run once without and once with the variable.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/rlk.hpp"

namespace rlk::ambient {

constexpr int64_t kM = 48, kK = 3000, kN = 96;

// Full mantissas: whoever rounds an input or adds in another order shows it.
inline std::vector<float> numbers(int64_t n, uint32_t state) {
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& x : out) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  return out;
}
inline std::vector<uint16_t> halved(const std::vector<float>& from) {
  std::vector<uint16_t> out;
  for (float x : from) out.push_back(float_to_bf16(x));
  return out;
}

inline void print(const char* who, const char* what, const std::vector<float>& result) {
  uint64_t hash = 14695981039346656037ull;
  for (float x : result) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    hash = (hash ^ bits) * 1099511628211ull;
  }
  std::printf("%s %s %016llx\n", who, what, static_cast<unsigned long long>(hash));
}
inline void print(const char* who, const char* what, std::string_view refusal) {
  std::printf("%s %s refused: %.*s\n", who, what, static_cast<int>(refusal.size()), refusal.data());
}

}  // namespace rlk::ambient
