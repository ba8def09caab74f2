// exp_32 and expm1_32, the fp32 exponentials of every arithmetic id that has one, written out for rules: x is held to [-104, 89],
// n = x / ln 2 to nearest, r = x - n ln 2 in two steps, a polynomial in r, and 2^n in two exact factors. All in fp32, each
// operation rounded to nearest.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace rlk::registry {

inline float power_of_two(int n) { return std::bit_cast<float>((n + 127) << 23); }

inline float exp32(float x) {
  if (x < -104.0f) x = -104.0f;
  if (x > 89.0f) x = 89.0f;
  if (x != x) return x;
  const float n = std::nearbyint(std::fma(x, 1.44269504f, 12582912.0f) - 12582912.0f);
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float tail = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    tail = std::fma(tail, r, c);
  const float p = std::fma(tail * r, r, r) + 1;
  const int whole = static_cast<int>(n), half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);
}

// e^x - 1: x is held to [-25, 89], n and r as above, and 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2)) without the polynomial's 1.
inline float expm1_32(float x) {
  if (x < -25.0f) x = -25.0f;
  if (x > 89.0f) x = 89.0f;
  if (x != x) return x;
  const float n = std::nearbyint(std::fma(x, 1.44269504f, 12582912.0f) - 12582912.0f);
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float tail = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    tail = std::fma(tail, r, c);
  const float p = std::fma(tail * r, r, r), half = power_of_two(static_cast<int>(n) - 1);
  return 2 * std::fma(p, half, half - 0.5f);
}

}  // namespace rlk::registry
