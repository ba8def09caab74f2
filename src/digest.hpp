// 64 bits of a run of bytes, for finding out that two runs differ; no defence against who wants a collision.
//
// Every byte's place counts: words of 8 bytes go to four lanes in turn, and a lane becomes the two halves of its
// 128-bit product with an odd number, one upon the other. A product's low half alone would not do: the sign bits
// of two numbers could cancel in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rlk {

inline uint64_t digest(const void* data, std::size_t bytes, uint64_t seed = 0) noexcept {
  __extension__ using Wide = unsigned __int128;
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  const auto mixed = [](uint64_t lane, uint64_t word) noexcept {
    const Wide product = static_cast<Wide>(lane ^ word) * kOdd;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  uint64_t lanes[4] = {seed + 1, seed + 2, seed + 3, seed + 4};
  const auto* at = static_cast<const unsigned char*>(data);
  std::size_t left = bytes;
  for (; left >= 32; at += 32, left -= 32)
    for (int i = 0; i < 4; ++i) {
      uint64_t word;
      std::memcpy(&word, at + 8 * i, sizeof word);
      lanes[i] = mixed(lanes[i], word);
    }
  for (int i = 0; left > 0; ++i) {
    uint64_t word = 0;
    const std::size_t n = left < 8 ? left : 8;
    std::memcpy(&word, at, n);
    lanes[i] = mixed(lanes[i], word);
    at += n, left -= n;
  }
  uint64_t all = bytes;
  for (const uint64_t lane : lanes) all = mixed(all, lane);
  return all;
}

}  // namespace rlk
