// What the chains of lm_head, linear and whoever builds on them are, as plain loops over numbers: one sum of products of
// elements [begin, end), from +0 on, independent of every kernel.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "registry/op.hpp"
#include "registry/reference.hpp"

namespace rlk::registry::chains {

// The two vectors an output is the product of, upcast exactly, and the dtype they came in.
struct Operands {
  std::span<const float> a, b;
  DType type = DType::f32;
};

// One ascending FMA chain in fp64 over all of them, ...
RLK_FUSED static inline double fma64(const Operands& x) {
  double sum = 0;
  for (std::size_t k = 0; k < x.a.size(); ++k) sum = std::fma(double{x.a[k]}, double{x.b[k]}, sum);
  return sum;
}

// ... or in fp32.
RLK_FUSED static inline float fma32(const Operands& x, std::size_t begin, std::size_t end) {
  float sum = 0;
  for (std::size_t k = begin; k < end; ++k) sum = std::fma(x.a[k], x.b[k], sum);
  return sum;
}

// ---- Intel's matrix unit

inline float flush(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}

// A group of 32, filled with zeros from `end` on.
inline float group_of_32(float total, const Operands& x, std::size_t first, std::size_t end) {
  const auto at = [end](std::span<const float> v, std::size_t k) { return k < end ? flush(v[k]) : 0; };
  float even = 0, odd = 0;
  for (std::size_t k = first; k < first + 32; k += 2) {
    even = flush(std::fma(at(x.a, k), at(x.b, k), even));
    odd = flush(std::fma(at(x.a, k + 1), at(x.b, k + 1), odd));
  }
  return flush(flush(total) + flush(even + odd));
}
inline float amx(const Operands& x, std::size_t begin, std::size_t end) {
  float total = 0;
  for (std::size_t first = begin; first < end; first += 32) total = group_of_32(total, x, first, end);
  return total;
}

// ---- AVX512-BF16

// Rounded with 24 bits as if exponents had no end, and zero of its sign where that is below 2^-126: what fp32 alone would round
// up to it from half a subnormal's unit below, this unit does from half a unit of the numbers under it.
inline float fused_or_zero(float a, float b, float c) {
  const float sum = std::fma(a, b, c);
  if (std::fabs(sum) > std::numeric_limits<float>::min() || std::isnan(sum)) return sum;
  const double sign = std::signbit(sum) ? -1 : 1, least = 0x1p-126 - 0x1p-151;
  const bool below = std::fma(sign * double{a}, double{b}, sign * double{c} - least) < 0;
  return below ? std::copysign(0.f, sum) : sum;
}
// Filled with zeros to a multiple of `Fill`; of each pair the odd position first.
template <std::size_t Fill>
inline float pairs(const Operands& x, std::size_t begin, std::size_t end) {
  const auto at = [end](std::span<const float> v, std::size_t k) { return k < end ? flush(v[k]) : 0; };
  float sum = 0;
  for (std::size_t k = begin; k < begin + (end - begin + Fill - 1) / Fill * Fill; k += 2)
    for (const std::size_t i : {k + 1, k}) sum = fused_or_zero(at(x.a, i), at(x.b, i), sum);
  return sum;
}

// ---- a Hopper tensor core

// A finite number as significand * 2^(exponent - bits). Subnormals keep the least exponent, not normalised.
struct Number {
  int64_t significand = 0;
  int exponent = 0;
};
inline Number unpack(float x, int bits, int least) {
  const auto word = std::bit_cast<uint32_t>(x);
  const int field = static_cast<int>(word >> 23 & 0xff), own = std::max(field, 1) - 127;
  const auto digits = static_cast<int64_t>((word & 0x7fffff) | (field != 0 ? 0x800000u : 0u));
  const int exponent = std::max(own, least), below = 23 - bits + exponent - own;
  const int64_t significand = below < 24 ? digits >> below : 0;
  return {word >> 31 != 0 ? -significand : significand, exponent};
}
// 2^n, a normal double.
inline double power(int n) { return std::bit_cast<double>(static_cast<uint64_t>(n + 1023) << 52); }

// Towards zero; a magnitude from 2^128 on is infinite.
inline float truncate(double x) {
  if (std::fabs(x) >= 0x1p128)
    return std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(x));
  const auto nearest = static_cast<float>(x);
  return std::fabs(double{nearest}) > std::fabs(x) ? std::nextafter(nearest, 0.f) : nearest;
}

inline float group_of_16(float sum, const Operands& x, std::size_t begin, std::size_t end) {
  bool plus = std::isinf(sum) && sum > 0, minus = std::isinf(sum) && sum < 0, nan = std::isnan(sum);
  for (std::size_t k = begin; k < end; ++k) {
    const float product = x.a[k] * x.b[k];
    if (!std::isinf(x.a[k]) && !std::isinf(x.b[k]) && !std::isnan(product)) continue;
    nan |= std::isnan(product);
    (product > 0 ? plus : minus) |= std::isinf(product);
  }
  if (nan || (plus && minus)) return canonical(std::numeric_limits<float>::quiet_NaN());
  if (plus || minus) return std::copysign(std::numeric_limits<float>::infinity(), plus ? 1.f : -1.f);
  const int bits = x.type == DType::f16 ? 10 : 7, least = x.type == DType::f16 ? -14 : -126;
  Number terms[17];
  int fraction[17], largest = std::numeric_limits<int>::min(), count = 0;
  const auto join = [&](Number n, int f) {
    if (n.significand == 0) return;  // a zero takes no part in the largest exponent
    terms[count] = n, fraction[count++] = f;
    largest = std::max(largest, n.exponent);
  };
  join(unpack(sum, 23, -126), 23);
  for (std::size_t k = begin; k < end; ++k) {
    const Number a = unpack(x.a[k], bits, least), b = unpack(x.b[k], bits, least);
    join({a.significand * b.significand, a.exponent + b.exponent}, 2 * bits);
  }
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const int below = std::min(largest - terms[i].exponent, 62);
    const int64_t magnitude = std::abs(terms[i].significand) << (25 - fraction[i]) >> below;
    total += terms[i].significand < 0 ? -magnitude : magnitude;
  }
  return total == 0 ? 0.f : truncate(static_cast<double>(total) * power(largest - 25));
}

// Groups of 16, likewise.
inline float sm90(const Operands& x, std::size_t begin, std::size_t end) {
  float sum = 0;
  for (std::size_t k = begin; k < end; k += 16) sum = group_of_16(sum, x, k, std::min(end, k + 16));
  return sum;
}

// ---- sums of chains

using Chain = float (*)(const Operands&, std::size_t begin, std::size_t end);

// Blocks of `length`: the first one's sum is the total, later ones are added in order.
inline float blocks(Chain chain, const Operands& x, std::size_t length) {
  float total = 0;
  for (std::size_t first = 0; first < x.a.size(); first += length) {
    const float sum = chain(x, first, std::min(x.a.size(), first + length));
    total = first == 0 ? sum : total + sum;
  }
  return total;
}

// A pairwise tree over `count` leaves of `width` from number `first` on, cut off at the end of what is there.
inline float tree(Chain chain, const Operands& x, std::size_t width, std::size_t first, std::size_t count) {
  if (count > 1)
    return tree(chain, x, width, first, count / 2) + tree(chain, x, width, first + count / 2, count / 2);
  const std::size_t length = x.a.size();
  return chain(x, std::min(length, first * width), std::min(length, (first + 1) * width));
}

}  // namespace rlk::registry::chains
