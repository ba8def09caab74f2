// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): four words of a counter and
// two of a key become four words without any state, so a draw is a function of what it is for.
#pragma once

#include "arithmetic/half.hpp"

namespace rlk::philox {

// Numbers and not arrays, which device code would not see.
inline constexpr std::uint32_t kMultiplier0 = 0xd2511f53u, kMultiplier1 = 0xcd9e8d57u;
inline constexpr std::uint32_t kWeyl0 = 0x9e3779b9u, kWeyl1 = 0xbb67ae85u;
inline constexpr int kRounds = 10;

struct Counter {
  std::uint32_t x, y, z, w;
};

RLK_HD std::uint32_t high(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(a) * b >> 32);
}

RLK_HD Counter round(Counter c, std::uint32_t key0, std::uint32_t key1) {
  return {high(kMultiplier1, c.z) ^ c.y ^ key0, kMultiplier1 * c.z, high(kMultiplier0, c.x) ^ c.w ^ key1,
          kMultiplier0 * c.x};
}

RLK_HD Counter words(Counter c, std::uint32_t key0, std::uint32_t key1) {
  for (int i = 0; i < kRounds; ++i) {
    c = round(c, key0, key1);
    key0 += kWeyl0, key1 += kWeyl1;
  }
  return c;
}

}  // namespace rlk::philox
