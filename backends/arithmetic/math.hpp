// exp, exp2, expm1, ln, log1p, tanh, sigmoid, softplus: the project's own, written once for host and device.
//
// The same bits on every machine: only +, -, *, /, sqrt, fma and integer operations, each correctly rounded,
// no library call, no branch. Every function is a template over float, double, or a GCC vector of float (one
// lane, one result), so host code runs the same source on 8 or 16 lanes. Compile with contraction off.
// Accuracy in ulp: exp and exp2 1.1, expm1 1.5, ln 1, log1p 1.5, tanh, sigmoid and softplus 3, subnormal
// results included; NaN stays NaN. (Of double: ln 2, tanh 4.)
#pragma once

#include "arithmetic/half.hpp"

#if !defined(__CUDACC__) && !defined(__HIP__)
#  include "arithmetic/fma.hpp"
#endif

#if defined(__CUDACC__) || defined(__clang__)
#  define RLK_UNROLL(n) _Pragma("unroll")
#else
#  define RLK_UNROLL_TEXT(text) _Pragma(#text)
#  define RLK_UNROLL(n) RLK_UNROLL_TEXT(GCC unroll n)
#endif

namespace rlk::simt {

// The integer type with as many bits as T, lane by lane.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = std::int32_t;
};
template <>
struct Bits<double> {
  using type = std::int64_t;
};

#if defined(__CUDA_ARCH__)
RLK_HD float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
RLK_HD double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
RLK_HD float root(float x) { return __fsqrt_rn(x); }
RLK_HD double root(double x) { return __dsqrt_rn(x); }
#elif defined(__CUDACC__) || defined(__HIP__)
RLK_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
RLK_HD double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
RLK_HD float root(float x) { return __builtin_sqrtf(x); }
RLK_HD double root(double x) { return __builtin_sqrt(x); }
#endif
#if !defined(__CUDACC__) && !defined(__HIP__)
template <>
struct Bits<Float4> {
  typedef int type __attribute__((vector_size(16)));
};
#endif
#if defined(__FMA__) && !defined(__CUDACC__) && !defined(__HIP__)
typedef float Float8 __attribute__((vector_size(32)));
template <>
struct Bits<Float8> {
  typedef int type __attribute__((vector_size(32)));
};
RLK_HD Float8 fused(Float8 a, Float8 b, Float8 c) { return _mm256_fmadd_ps(a, b, c); }
#endif
#if defined(__AVX512F__) && !defined(__CUDACC__) && !defined(__HIP__)
typedef float Float16 __attribute__((vector_size(64)));
template <>
struct Bits<Float16> {
  typedef int type __attribute__((vector_size(64)));
};
RLK_HD Float16 fused(Float16 a, Float16 b, Float16 c) { return _mm512_fmadd_ps(a, b, c); }
#endif

template <class T>
struct ExpConstants {  // float and vectors of float
  static constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLow = -105.0f, kHigh = 89.0f, kLow2 = -151.0f, kHigh2 = 129.0f;  // e^-104 is 0
  static constexpr float kLn2 = 0.693147182f;
  static constexpr int kBias = 127, kMantissa = 23, kNothing = -151;  // 2^kNothing times anything here is 0
};
template <>
struct ExpConstants<double> {
  static constexpr double kLog2e = 0x1.71547652b82fep+0, kLn2High = 0x1.62e42fefa3800p-1,
                          kLn2Low = 0x1.ef35793c76730p-45;
  static constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLow = -746.0, kHigh = 710.0, kLow2 = -1076.0, kHigh2 = 1025.0;
  static constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  static constexpr int kBias = 1023, kMantissa = 52, kNothing = -1076;
};

// A polynomial by Horner's rule, highest power first.
template <class T, class First, class... Rest>
RLK_HD T polynomial(T x, First first, Rest... rest) {
  T p = T{} + first;
  ((p = fused(p, x, T{} + rest)), ...);
  return p;
}

// (e^r - 1 - r) / r^2 on |r| <= ln2 / 2
template <class T>
RLK_HD T exp_tail(T r) {
  if constexpr (sizeof(ExpConstants<T>::kShift) == 8) {
    return polynomial(r, 1.0 / 1307674368000.0, 1.0 / 87178291200.0, 1.0 / 6227020800.0, 1.0 / 479001600.0,
                      1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                      1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5);
  } else {
    return polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                      1.6666665459e-1f, 5.0000001201e-1f);
  }
}

// 2^n e^r with |r| <= ln2 / 2; n as the low bits of `shifted`. Two factors, so that subnormal results round
// once, as the one instruction does where there is one. A processor takes some 200 cycles for a product that
// is too small, so what becomes 0 is made by none there.
template <class T>
RLK_HD T exp_finish(T shifted, T r) {
  using C = ExpConstants<T>;
  using I = typename Bits<T>::type;
  const T p = fused(exp_tail(r) * r, r, r) + 1;
#if defined(__AVX512F__) && !defined(__CUDACC__) && !defined(__HIP__)
  if constexpr (sizeof(T) == sizeof(Float16)) {
    const T n = shifted - C::kShift;
    const __mmask16 some = _mm512_cmp_ps_mask(n, T{} + C::kNothing, _CMP_NLE_UQ);  // or NaN
    return _mm512_maskz_scalef_ps(some, p, n);
  }
#endif
  const I n = __builtin_bit_cast(I, shifted) - __builtin_bit_cast(I, T{} + C::kShift);
  const I half = n >> 1;
  const T a = __builtin_bit_cast(T, (half + C::kBias) << C::kMantissa);
  T b = __builtin_bit_cast(T, (n - half + C::kBias) << C::kMantissa);
#if !defined(__CUDACC__) && !defined(__HIP__)
  b = n <= C::kNothing ? T{} : b;
#endif
  return p * a * b;
}

template <class T>
RLK_HD T exp(T x) {
  using C = ExpConstants<T>;
  const T low = T{} + C::kLow, high = T{} + C::kHigh;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const T shifted = fused(x, T{} + C::kLog2e, T{} + C::kShift);
  const T n = shifted - C::kShift;
  T r = fused(n, T{} - C::kLn2High, x);
  r = fused(n, T{} - C::kLn2Low, r);
  return exp_finish(shifted, r);
}

template <class T>
RLK_HD T exp2(T x) {
  using C = ExpConstants<T>;
  const T low = T{} + C::kLow2, high = T{} + C::kHigh2;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const T shifted = x + C::kShift;
  const T n = shifted - C::kShift;
  return exp_finish(shifted, T((x - n) * C::kLn2));
}

// e^x - 1, 2^n (e^r - 1) + (2^n - 1), by halves so that the largest results are none too large on the way. Below kLow
// nothing but -1 is left.
template <class T>
RLK_HD T expm1(T x) {
  using C = ExpConstants<T>;
  using I = typename Bits<T>::type;
  constexpr decltype(C::kShift) kLow = sizeof(C::kShift) == 8 ? -40 : -25;
  const T low = T{} + kLow, high = T{} + C::kHigh;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const T shifted = fused(x, T{} + C::kLog2e, T{} + C::kShift);
  const T n = shifted - C::kShift;
  T r = fused(n, T{} - C::kLn2High, x);
  r = fused(n, T{} - C::kLn2Low, r);
  const T p = fused(exp_tail(r) * r, r, r);
  const I exponent = __builtin_bit_cast(I, shifted) - __builtin_bit_cast(I, T{} + C::kShift);
  const T half = __builtin_bit_cast(T, (exponent + (C::kBias - 1)) << C::kMantissa);
  return 2 * fused(p, half, half - (decltype(C::kShift))(0.5));
}

template <class T>
struct LnConstants {  // float and vectors of float
  static constexpr float kLeast = 0x1p-126f, kUp = 0x1p23f, kUpBits = 23;
  static constexpr int kMantissa = 23, kRootHalf = 0x3f3504f3;  // the bits of sqrt(1/2)
};
template <>
struct LnConstants<double> {
  static constexpr double kLeast = 0x1p-1022, kUp = 0x1p52, kUpBits = 52;
  static constexpr int kMantissa = 52;
  static constexpr long long kRootHalf = 0x3fe6a09e667f3bcd;
};

// (ln(1 + f) - f + f^2 / 2) / f^3 on sqrt(1/2) - 1 <= f < sqrt(2) - 1
template <class T>
RLK_HD T ln_tail(T f) {
  return polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                    1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f,
                    3.3333331174e-1f);
}

// ln(1 + f) + n ln 2, n a whole number: +0 where f and n are.
template <class T>
RLK_HD T ln_finish(T f, T n) {
  using C = ExpConstants<T>;
  const T square = f * f;
  if constexpr (sizeof(C::kShift) == 8) {
    // 2 atanh(f / (2 + f)) = f - (f^2 / 2 - s (f^2 / 2 + rest))
    const T s = f / (f + 2), z = s * s, half = 0.5 * square;
    const T rest = z * polynomial(z, 2.0 / 23, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11,
                                  2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3);
    const T inner = fused(s, half + rest, n * C::kLn2Low);
    return fused(n, T{} + C::kLn2High, f - (half - inner));
  } else {
    T y = ln_tail(f) * f * square;
    y = fused(n, T{} + C::kLn2Low, y);
    y = fused(square, T{} - 0.5f, y);
    return fused(n, T{} + C::kLn2High, f + y);
  }
}

// The natural logarithm: -inf at 0, NaN below.
template <class T>
RLK_HD T ln(T x) {
  using C = LnConstants<T>;
  using I = typename Bits<T>::type;
  const T zero = T{}, one = T{} + 1, infinity = T{} + __builtin_inff(), least = T{} + C::kLeast;
  const T below = x > zero ? x : one;
  const T normal = below < infinity ? below : one;  // what is none of the special cases
  const T scaled = normal * C::kUp;
  const I bits = __builtin_bit_cast(I, normal < least ? scaled : normal);
  const T up = T{} + C::kUpBits;
  const I whole = (bits - C::kRootHalf) >> C::kMantissa;
  const T f = __builtin_bit_cast(T, bits - (whole << C::kMantissa)) - 1;
  const T shift = T{} + ExpConstants<T>::kShift;
  const T n = __builtin_bit_cast(T, whole + __builtin_bit_cast(I, shift)) - shift;
  const T y = ln_finish<T>(f, normal < least ? n - up : n);
  const T not_below = x < zero ? zero / zero : y;
  const T not_zero = x == zero ? -infinity : not_below;
  const T not_infinite = x == infinity ? infinity : not_zero;
  return x == x ? not_infinite : x;
}

// log(1 + x), also close to 0 and to -1, for x below 2^126 (fp32): -inf at -1, NaN below.
template <class T>
RLK_HD T log1p(T x) {
  using C = LnConstants<T>;
  using E = ExpConstants<T>;
  using I = typename Bits<T>::type;
  const T zero = T{}, one = T{} + 1, infinity = T{} + __builtin_inff();
  const T plus = x + 1;
  const T inside = plus > zero ? x : zero;
  const T held = inside < infinity ? inside : zero;  // what is none of the special cases
  const I whole = (__builtin_bit_cast(I, T(held + 1)) - C::kRootHalf) >> C::kMantissa;
  const T shift = T{} + E::kShift;
  const T n = __builtin_bit_cast(T, whole + __builtin_bit_cast(I, shift)) - shift;
  // 2^-n (1 + x) - 1, rounded once: 2^-n - 1 is exact wherever it is not all that counts.
  const T scale = __builtin_bit_cast(T, (E::kBias - whole) << C::kMantissa);
  const T y = ln_finish<T>(fused(scale, held, T(scale - one)), n);
  const T not_below = plus < zero ? zero / zero : y;
  const T not_one = plus == zero ? -infinity : not_below;
  const T not_infinite = x == infinity ? infinity : not_one;
  return x == x ? not_infinite : x;
}

// e^2a - 1 over e^2a + 1, by the difference itself where a is small.
template <class T>
RLK_HD T tanh(T x) {
  using I = typename Bits<T>::type;
  const T zero = T{}, minus = -x, limit = T{} + 0.171875f;  // half of what exp_tail covers
  const T a = x < zero ? minus : x;
  const T twice = a + a;
  const T held = a < limit ? twice : zero;
  const T less = fused(exp_tail(held) * held, held, held);  // e^2a - 1
  const T e = exp<T>(-twice);
  const T y = a < limit ? less / (less + 2) : (1 - e) / (e + 1);
  const I sign = __builtin_bit_cast(I, x) & __builtin_bit_cast(I, -zero);
  return __builtin_bit_cast(T, __builtin_bit_cast(I, y) | sign);
}

// log(1 + y) for y in [0, 1]: 2 atanh(y / (2 + y)).
template <class T>
RLK_HD T log1p_unit(T y) {
  constexpr int kTerms = sizeof(ExpConstants<T>::kShift) == 8 ? 17 : 8;
  const T s = y / (y + 2);
  const T z = s * s;
  T p = T{} + (decltype(ExpConstants<T>::kShift))(1) / (2 * kTerms + 1);
  RLK_UNROLL(20)
  for (int i = kTerms - 1; i >= 1; --i)
    p = fused(p, z, T{} + (decltype(ExpConstants<T>::kShift))(1) / (2 * i + 1));
  const T twice = s + s;
  return fused(twice * z, p, twice);
}

// 1 / (1 + e^-x), accurate in both tails.
template <class T>
RLK_HD T sigmoid(T x) {
  const T zero = T{};
  const T minus = -x;
  const T e = exp<T>(x < zero ? x : minus);
  const T one = T{} + 1;
  return (x < zero ? e : one) / (e + 1);
}

// log(1 + e^x), accurate in both tails.
template <class T>
RLK_HD T softplus(T x) {
  const T zero = T{};
  const T minus = -x;
  const T e = exp<T>(x < zero ? x : minus);
  return (x > zero ? x : zero) + log1p_unit<T>(e);
}

}  // namespace rlk::simt
