// labels: unit
// The functions of arithmetic/math.hpp against the C library in the next wider type: over all floats of some binades, and
// where they end. Vectors and device code run the same source.
#include "arithmetic/math.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "registry/exp32.hpp"
#include "rlk/float_guard.hpp"

namespace {

namespace simt = rlk::simt;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The size of the last place of a number of this magnitude.
template <class T>
T last_place(T x) {
  return std::nextafter(std::fabs(x), std::numeric_limits<T>::infinity()) - std::fabs(x);
}

// The largest error in ulps of f over all floats in [from, to), both of one sign.
template <class F, class Truth>
double worst(float from, float to, F f, Truth truth) {
  double most = 0;
  for (auto bits = std::bit_cast<std::uint32_t>(from); bits < std::bit_cast<std::uint32_t>(to); ++bits) {
    const auto x = std::bit_cast<float>(bits);
    const double right = truth(double{x});
    const auto place = double{last_place(static_cast<float>(right))};
    most = std::max(most, std::fabs(double{f(x)} - right) / place);
  }
  return most;
}

float ln(float x) { return simt::ln<float>(x); }
float log1p_of(float x) { return simt::log1p<float>(x); }
float tanh_of(float x) { return simt::tanh<float>(x); }
double true_ln(double x) { return std::log(x); }
double true_log1p(double x) { return std::log1p(x); }
double true_tanh(double x) { return std::tanh(x); }

bool same(float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); }

}  // namespace

TEST_CASE("ln is within an ulp over whole binades, at both ends of the range and through subnormals") {
  CHECK(worst(1, 2, ln, true_ln) < 1);
  CHECK(worst(0.5f, 1, ln, true_ln) < 1);
  CHECK(worst(0x1p17f, 0x1p18f, ln, true_ln) < 1);  // a sum of a vocabulary
  CHECK(worst(0x1p-149f, 0x1p-127f, ln, true_ln) < 1);
  CHECK(worst(0x1p127f, 0x1.01p127f, ln, true_ln) < 1);
}

TEST_CASE("ln ends where the logarithm does, and is +0 at 1 and never below it from there on") {
  CHECK(same(ln(1), 0.0f));
  CHECK(ln(std::nextafter(1.0f, 2.0f)) > 0);
  CHECK(ln(0.0f) == -kInfinity);
  CHECK(ln(-0.0f) == -kInfinity);
  CHECK(ln(kInfinity) == kInfinity);
  for (float x : {-1.0f, -0x1p-149f, -kInfinity, std::nanf("")}) CHECK(std::isnan(ln(x)));
}

TEST_CASE("tanh is within three ulps over whole binades") {
  for (int e = -4; e < 2; ++e)
    CHECK(worst(std::ldexp(1.0f, e), std::ldexp(1.0f, e + 1), tanh_of, true_tanh) < 3);
  CHECK(worst(0x1p-149f, 0x1p-130f, tanh_of, true_tanh) < 3);
}

TEST_CASE("tanh is odd, keeps a zero's sign and ends at one") {
  for (float x : {0.0f, 1e-30f, 0.1f, 0.171875f, 0.2f, 3.0f, 88.0f, kInfinity})
    CHECK(same(tanh_of(-x), -tanh_of(x)));
  CHECK(same(tanh_of(-0.0f), -0.0f));
  CHECK(tanh_of(kInfinity) == 1);
  CHECK(std::isnan(tanh_of(std::nanf(""))));
}

TEST_CASE("ln and tanh of doubles are close to the C library's") {
  for (int i = -3000; i < 3000; ++i) {
    const double x = std::exp(0.2 * i) * 1.0000001, t = 0.003 * i;
    if (x > 0 && x < std::numeric_limits<double>::max())
      CHECK(std::fabs(simt::ln<double>(x) - std::log(x)) <= 2 * last_place(std::log(x)));
    CHECK(std::fabs(simt::tanh<double>(t) - std::tanh(t)) <= 4 * last_place(std::tanh(t)));
  }
  CHECK(simt::ln<double>(1) == 0);
  CHECK(simt::ln<double>(0) == -std::numeric_limits<double>::infinity());
}

TEST_CASE("log1p is within 1.5 ulps, close to 0 and to -1 too") {
  for (float from : {0x1p-149f, 0x1p-64f, 0x1p-25f, 0x1p-12f, 0.25f, 0.5f}) {
    const float to = from < 0x1p-126f ? 0x1p-140f : 2 * from;
    CHECK(worst(-from, -to, log1p_of, true_log1p) < 1.5);
    CHECK(worst(from, to, log1p_of, true_log1p) < 1.5);
  }
  CHECK(worst(1, 4, log1p_of, true_log1p) < 1.5);
  CHECK(worst(0x1p125f, 0x1.01p125f, log1p_of, true_log1p) < 1.5);
  CHECK(log1p_of(0) == 0);
  CHECK(log1p_of(-1) == -kInfinity);
  CHECK(log1p_of(kInfinity) == kInfinity);
  for (float x : {-1.5f, -kInfinity, std::nanf("")}) CHECK(std::isnan(log1p_of(x)));
  for (double x : {-0.9999, -0.5, -1e-3, -1e-20, 1e-20, 0.3, 2.5, 1e20})
    CHECK(std::fabs(simt::log1p<double>(x) - std::log1p(x)) <= 2 * last_place(std::log1p(x)));
}

TEST_CASE("what rules have written out is what kernels compute, bit for bit") {
  namespace rule = rlk::registry;
  const auto equal = [](float a, float b) { return same(a, b) || (std::isnan(a) && std::isnan(b)); };
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 10007) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    CAPTURE(x);
    CHECK(equal(rule::exp32(x), simt::exp<float>(x)));
    CHECK(equal(rule::exp2_32(x), simt::exp2<float>(x)));
    CHECK(equal(rule::expm1_32(x), simt::expm1<float>(x)));
    CHECK(equal(rule::ln32(x), ln(x)));
    if (!(x >= 0x1p126f)) CHECK(equal(rule::log1p32(x), log1p_of(x)));
  }
}

// Through all subnormal results, and to where nothing is left: no product makes those.
TEST_CASE("exponentials too small for a number are what rules have written out") {
  int others = 0;
  for (auto bits = std::bit_cast<std::uint32_t>(-86.0f); bits < std::bit_cast<std::uint32_t>(-160.0f);
       bits += 3) {
    const auto x = std::bit_cast<float>(bits);
    others += same(rlk::registry::exp32(x), simt::exp<float>(x)) ? 0 : 1;
    others += same(rlk::registry::exp2_32(x), simt::exp2<float>(x)) ? 0 : 1;
  }
  CHECK(others == 0);
  for (double x : {-708.5, -744.4, -745.2, -746.0, -1e4})
    CHECK(std::fabs(simt::exp<double>(x) - std::exp(x)) <=
          2 * std::numeric_limits<double>::denorm_min() + std::exp(x) * 0x1p-50);
  for (double x : {-1022.5, -1074.0, -1075.5, -1076.0, -1e4})
    CHECK(std::fabs(simt::exp2<double>(x) - std::exp2(x)) <=
          2 * std::numeric_limits<double>::denorm_min() + std::exp2(x) * 0x1p-50);
}

namespace {
// Exact products and their neighbours, both ends of the range, subnormals and what is no number.
template <class T>
std::vector<T> hard_numbers() {
  using Limits = std::numeric_limits<T>;
  const T one_up = 1 + Limits::epsilon();
  std::vector<T> all;
  for (T x : {T(0), T(1), one_up, T(3), Limits::denorm_min(), 3 * Limits::denorm_min(), Limits::min(),
              Limits::max(), Limits::infinity(), Limits::quiet_NaN(), Limits::epsilon() / 2,
              std::sqrt(Limits::denorm_min()), std::sqrt(Limits::min()) * one_up, std::sqrt(Limits::max())})
    all.insert(all.end(), {x, -x});
  return all;
}
template <class T>
std::int64_t other_bits_than_the_library() {
  std::int64_t wrong = 0;
  const std::vector<T> all = hard_numbers<T>();
  const auto same = [](T x, T y) {
    return std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
  };
  for (T a : all)
    for (T b : all) {
      for (T c : all) wrong += !same(simt::fused(a, b, c), std::fma(a, b, c));
      // The product with every bit, and the two beside its rounded value: ties, and sums that cancel to a rest.
      for (T c : {a * b, std::nextafter(a * b, T(0)), std::nextafter(a * b, std::numeric_limits<T>::max())})
        wrong += !same(simt::fused(a, b, -c), std::fma(a, b, -c));
    }
  return wrong;
}
}  // namespace

TEST_CASE("fused multiply-adds have the bits of the C library's, whichever code computes them") {
  CHECK(other_bits_than_the_library<float>() == 0);
  CHECK(other_bits_than_the_library<double>() == 0);
}
