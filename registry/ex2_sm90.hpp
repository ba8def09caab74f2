// 2^x as Hopper's special function units have it: ex2.approx.ftz.f32 of compute capability 9.0, in integers. Measured
// on an H100: of all 2^32 inputs none differs (tests/ex2_sm90_test.cpp holds it to that measurement).
//
// |x| becomes a fixed-point number, cut off behind 23 fractional bits; of a negative x that then has a fraction all
// bits are turned, a last place less than its negative. Its whole part is the exponent. Of the fraction, the six upper
// bits choose coefficients c0, c1, c2, the 17 lower ones are t: 2^f = c0 + c1 t + c2 t^2, the square from partial
// products that are each cut off behind its last place. Results below 2^-126 are +0.
#pragma once

#include <bit>
#include <cstdint>

namespace rlk::registry {

struct Ex2Segment {
  std::int32_t c0, c1, c2;
};
inline constexpr Ex2Segment kEx2Segments[64] = {
    {0x2000003, 0x58b9, 0x1ee}, {0x205934a, 0x59b0, 0x1f5}, {0x20b361e, 0x5aaa, 0x1fa},
    {0x210e8a5, 0x5ba7, 0x1ff}, {0x216ab12, 0x5ca6, 0x206}, {0x21c7d89, 0x5da9, 0x209},
    {0x222603c, 0x5eae, 0x20f}, {0x2285359, 0x5fb6, 0x214}, {0x22e570c, 0x60c0, 0x21d},
    {0x2346b81, 0x61ce, 0x222}, {0x23a90e8, 0x62df, 0x227}, {0x240c775, 0x63f2, 0x22f},
    {0x2470f51, 0x6509, 0x234}, {0x24d68b0, 0x6623, 0x238}, {0x253d3c3, 0x673f, 0x241},
    {0x25a50b9, 0x685f, 0x247}, {0x260dfc5, 0x6982, 0x24d}, {0x267811a, 0x6aa8, 0x254},
    {0x26e34e9, 0x6bd2, 0x258}, {0x274fb6a, 0x6cfe, 0x261}, {0x27bd4cc, 0x6e2e, 0x267},
    {0x282c148, 0x6f61, 0x26e}, {0x289c10e, 0x7098, 0x273}, {0x290d459, 0x71d2, 0x279},
    {0x297fb5d, 0x730f, 0x281}, {0x29f3651, 0x7450, 0x287}, {0x2a6856d, 0x7594, 0x28f},
    {0x2ade8ea, 0x76dc, 0x295}, {0x2b560fe, 0x7827, 0x29e}, {0x2bcede5, 0x7976, 0x2a5},
    {0x2c48fda, 0x7ac8, 0x2ae}, {0x2cc4713, 0x7c1f, 0x2b3}, {0x2d413cf, 0x7d79, 0x2bb},
    {0x2dbf64b, 0x7ed7, 0x2c1}, {0x2e3eec1, 0x8038, 0x2cb}, {0x2ebfd6d, 0x819e, 0x2d1},
    {0x2f42291, 0x8307, 0x2da}, {0x2fc5e6a, 0x8474, 0x2e3}, {0x304b137, 0x85e5, 0x2ec},
    {0x30d1b36, 0x875b, 0x2f1}, {0x3159cab, 0x88d4, 0x2fb}, {0x31e35d6, 0x8a51, 0x305},
    {0x326e6fa, 0x8bd3, 0x30b}, {0x32fb057, 0x8d59, 0x313}, {0x3389233, 0x8ee3, 0x31c},
    {0x3418cd2, 0x9071, 0x326}, {0x34aa079, 0x9204, 0x32d}, {0x353cd6d, 0x939b, 0x336},
    {0x35d13f7, 0x9536, 0x341}, {0x366745a, 0x96d6, 0x34a}, {0x36feee1, 0x987b, 0x351},
    {0x37983d6, 0x9a24, 0x35a}, {0x3833380, 0x9bd1, 0x366}, {0x38cfe2a, 0x9d84, 0x36d},
    {0x396e41f, 0x9f3b, 0x377}, {0x3a0e5ad, 0xa0f7, 0x380}, {0x3ab0320, 0xa2b7, 0x38d},
    {0x3b53cc4, 0xa47d, 0x395}, {0x3bf92ea, 0xa648, 0x39d}, {0x3ca05e0, 0xa817, 0x3aa},
    {0x3d495f8, 0xa9ec, 0x3b2}, {0x3df4382, 0xabc5, 0x3bf}, {0x3ea0ecf, 0xada4, 0x3c9},
    {0x3f4f834, 0xaf88, 0x3d4}};

// t^2 / 2^19 of 17 bits, each line of the partial products cut off.
constexpr std::int64_t ex2_square(std::uint32_t t) {
  std::uint32_t sum = 0;
  for (int bit = 0; bit < 17; ++bit)
    if (t >> bit & 1) sum += t >> (18 - bit);
  return sum >> 1;
}

// Of a fraction of 23 bits: 2^f in units of 2^-23, 2^23 to 2^24.
constexpr std::uint32_t ex2_of_fraction(std::uint32_t fraction) {
  const Ex2Segment& c = kEx2Segments[fraction >> 17];
  const std::uint32_t t = fraction & 0x1ffff;
  const std::int64_t sum = std::int64_t{c.c0} * 8192 + std::int64_t{c.c1} * t + c.c2 * ex2_square(t) + 0x17e2;
  return static_cast<std::uint32_t>(sum >> 15);
}

constexpr float ex2_sm90(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const bool negative = bits >> 31;
  const int exponent = static_cast<int>(bits >> 23 & 0xff);
  const std::uint32_t mantissa = bits & 0x7fffff;
  constexpr std::uint32_t kInfinity = 0x7f800000, kNan = 0x7fffffff;
  if (exponent == 255 && mantissa != 0) return std::bit_cast<float>(kNan);
  if (exponent == 0) return 1;
  if (exponent >= 127 + 8) return std::bit_cast<float>(negative ? 0 : kInfinity);
  const std::uint64_t full = mantissa | 0x800000;
  const std::uint64_t fixed =
      exponent >= 127 ? full << (exponent - 127) : full >> (127 - exponent < 63 ? 127 - exponent : 63);
  int whole = static_cast<int>(fixed >> 23);
  auto fraction = static_cast<std::uint32_t>(fixed & 0x7fffff);
  if (negative) {
    whole = fraction != 0 ? -whole - 1 : -whole;
    if (fraction != 0) fraction = ~fraction & 0x7fffff;
  }
  const std::uint32_t power = ex2_of_fraction(fraction);  // 2^24 has the next exponent
  const int e = whole + 127 + static_cast<int>(power >> 24);
  if (e <= 0) return 0;
  if (e >= 255) return std::bit_cast<float>(kInfinity);
  return std::bit_cast<float>(static_cast<std::uint32_t>(e) << 23 | (power & 0x7fffff));
}

}  // namespace rlk::registry
