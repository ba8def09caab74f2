// exp_32, exp2_32 and expm1_32, the fp32 exponentials of every arithmetic id that has one, written out for rules: x is held to
// [-104, 89], n = x / ln 2 to nearest, r = x - n ln 2 in two steps, a polynomial in r, and 2^n in two exact factors. All in
// fp32, each operation rounded to nearest. exp2_32 differs in n and r alone.
//
// ln_32 and log1p_32: the number is 2^n (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); a polynomial in f, and n ln 2 in two
// steps.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace rlk::registry {

inline float power_of_two(int n) { return std::bit_cast<float>((n + 127) << 23); }

// 2^n e^r
inline float exp32_of(float n, float r) {
  float tail = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    tail = std::fma(tail, r, c);
  const float p = std::fma(tail * r, r, r) + 1;
  const int whole = static_cast<int>(n), half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);
}

inline float exp32(float x) {
  if (x < -104.0f) x = -104.0f;
  if (x > 89.0f) x = 89.0f;
  if (x != x) return x;
  const float n = std::nearbyint(std::fma(x, 1.44269504f, 12582912.0f) - 12582912.0f);
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  return exp32_of(n, r);
}

inline float exp2_32(float x) {
  if (x < -151.0f) x = -151.0f;
  if (x > 129.0f) x = 129.0f;
  if (x != x) return x;
  const float n = std::nearbyint(x);
  return exp32_of(n, (x - n) * 0.693147182f);
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

// ln(2^n (1 + f))
inline float ln32_of(int n, float f) {
  float tail = 7.0376836292e-2f;
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    tail = std::fma(tail, f, c);
  const float square = f * f;
  const auto count = static_cast<float>(n);
  float y = std::fma(count, -2.12194440e-4f, tail * f * square);
  y = std::fma(square, -0.5f, y);
  return std::fma(count, 0.693359375f, f + y);
}
// n of a positive number.
inline int ln32_exponent(float x) {
  int n = 0;
  const float m = std::frexp(x, &n);  // from 1/2 to 1
  return m < 0.707106769f ? n - 1 : n;
}

inline float ln32(float x) {
  if (x == 0) return -INFINITY;
  if (x < 0) return NAN;
  if (x != x || x == INFINITY) return x;
  const int n = ln32_exponent(x);
  return ln32_of(n, std::ldexp(x, -n) - 1);
}

// Of 1 + x, for x below 2^126.
inline float log1p32(float x) {
  if (x == -1) return -INFINITY;
  if (x < -1) return NAN;
  if (x != x || x == INFINITY) return x;
  const int n = ln32_exponent(1 + x);
  const float scale = power_of_two(-n);
  return ln32_of(n, std::fma(scale, x, scale - 1));
}

// With a = |x|: (e^2a - 1) / (e^2a - 1 + 2) by exp_32's polynomial below 11/64, (1 - e^-2a) / (1 + e^-2a) from there on.
inline float tanh32(float x) {
  const float a = std::fabs(x), r = a + a;
  if (!(a < 0.171875f)) return std::copysign((1 - exp32(-r)) / (exp32(-r) + 1), x);
  float tail = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    tail = std::fma(tail, r, c);
  const float less = std::fma(tail * r, r, r);
  return std::copysign(less / (less + 2), x);
}

}  // namespace rlk::registry
