// Conversions between fp64 / fp32 and the 16-bit types for host code: the meaning of "rounded to the output
// type". Widening is exact. Narrowing rounds once, to nearest even, keeps subnormals, and stores every NaN as
// one pattern: x86 carries a NaN's payload on, NVIDIA's conversions do not, so a payload could not be
// promised. Nothing here rounds by the processor, so no rounding or flushing mode of a caller can change a
// bit. Vector code and device code (backends/arithmetic/half.hpp) must agree, and tests/half_test.cpp compares
// them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace rlk {

inline constexpr uint32_t kCanonicalNan32 = 0x7fffffffu;
inline constexpr uint16_t kCanonicalNan16 = 0x7fffu;

// What a finished fp32 result is stored as.
inline float canonical(float x) noexcept { return x == x ? x : std::bit_cast<float>(kCanonicalNan32); }

inline float bf16_to_float(uint16_t h) noexcept { return std::bit_cast<float>(uint32_t{h} << 16); }

inline float f16_to_float(uint16_t h) noexcept {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, exponent = h >> 10 & 31u, fraction = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// e4m3: exponents from -6 to 8, no infinities; all ones are its NaN.
inline float f8_e4m3_to_float(uint8_t b) noexcept {
  const uint32_t sign = uint32_t{b & 0x80u} << 24, exponent = b >> 3 & 15u, fraction = b & 7u;
  if ((b & 0x7fu) == 0x7f) return std::bit_cast<float>(sign | kCanonicalNan32);
  if (exponent) return std::bit_cast<float>(sign | (exponent + 120) << 23 | fraction << 20);
  const float magnitude = static_cast<float>(fraction) * 0x1p-9f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Rounds to nearest even into a binary format with `fraction_bits` and exponents from min_exponent to
// max_exponent. One rounding from fp64, subnormals included: going through fp32 would round twice.
inline uint16_t round_to_16(double x, int fraction_bits, int min_exponent, int max_exponent) noexcept {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const auto sign = static_cast<uint16_t>(bits >> 48 & 0x8000u);
  const auto infinity = static_cast<uint16_t>(sign | ((max_exponent - min_exponent + 2) << fraction_bits));
  if (x != x) return kCanonicalNan16;
  if (std::isinf(x)) return infinity;
  const double magnitude = std::fabs(x);
  if (magnitude == 0) return sign;
  int exponent = static_cast<int>(std::bit_cast<uint64_t>(magnitude) >> 52) - 1023;
  if (exponent < min_exponent) exponent = min_exponent;
  // magnitude / 2^(exponent - fraction_bits) is exact; rounding it to an integer is the one rounding.
  const double scaled = std::ldexp(magnitude, fraction_bits - exponent);
  double whole = std::floor(scaled);
  const double rest = scaled - whole;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)) whole += 1;
  const auto significand = static_cast<uint32_t>(whole);
  // A significand that reaches 2^(fraction_bits+1) carries into the exponent by itself.
  const bool subnormal = significand < (1u << fraction_bits);
  const uint32_t biased = static_cast<uint32_t>(exponent - min_exponent + 1);
  const uint32_t body = subnormal ? significand : ((biased - 1) << fraction_bits) + significand;
  return body >= static_cast<uint32_t>(infinity & 0x7fffu) ? infinity : static_cast<uint16_t>(sign | body);
}

// What is beyond its largest number becomes that.
inline uint8_t double_to_f8_e4m3(double x) noexcept {
  constexpr double kMost = 448;
  if (x != x) return 0x7f;
  const uint16_t bits = round_to_16(x > kMost ? kMost : x < -kMost ? -kMost : x, 3, -6, 8);
  return static_cast<uint8_t>((bits >> 8 & 0x80u) | (bits & 0x7fu));
}

inline uint16_t double_to_bf16(double x) noexcept { return round_to_16(x, 7, -126, 127); }
inline uint16_t double_to_f16(double x) noexcept { return round_to_16(x, 10, -14, 15); }

inline uint16_t float_to_bf16(float x) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? kCanonicalNan16 : rounded);
}

inline uint16_t float_to_f16(float x) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 16 & 0x8000u, exponent = magnitude >> 23;
  if (magnitude > 0x7f800000u) return kCanonicalNan16;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (exponent < 102) return static_cast<uint16_t>(sign);                      // below half of 2^-24
  if (exponent < 113) {                                                        // a multiple of 2^-24
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u, shift = 126 - exponent;
    const uint32_t half = 1u << (shift - 1), odd = significand >> shift & 1u;
    return static_cast<uint16_t>(sign | (significand + half - 1 + odd) >> shift);
  }
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

}  // namespace rlk
