// labels: conformance
// Hopper's ex2 in integers: what an H100 gave, and where it is exact.
#include "registry/ex2_sm90.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

using rlk::registry::ex2_of_fraction;
using rlk::registry::ex2_sm90;

namespace {

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

}  // namespace

TEST_CASE("Hopper's ex2 of every fraction is what an H100 gave") {
  // FNV-1a over the 2^23 results for 1 <= x < 2, four bytes each, as read off the GPU.
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::uint32_t f = 0; f < 1u << 23; ++f) {
    const std::uint32_t y = bits(ex2_sm90(std::bit_cast<float>(0x3f800000u | f)));
    for (int byte = 0; byte < 4; ++byte) hash = (hash ^ (y >> (8 * byte) & 0xff)) * 0x100000001b3u;
  }
  CHECK(hash == 0x8a01e7678d283c83u);
}

TEST_CASE("Hopper's ex2 is exact for whole numbers, and within two units of the last place") {
  for (int n = -126; n <= 127; ++n) {
    CAPTURE(n);
    CHECK(ex2_sm90(static_cast<float>(n)) == std::ldexp(1.0f, n));
  }
  double worst = 0;
  for (std::uint32_t f = 0; f < 1u << 23; f += 61)
    worst = std::max(worst, std::fabs(ex2_of_fraction(f) - std::exp2(f * 0x1p-23 + 23)));
  CHECK(worst < 2);
  CHECK(worst > 0.5);
}

TEST_CASE("Hopper's ex2 at the ends of its range") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  CHECK(bits(ex2_sm90(-kInf)) == 0);
  CHECK(ex2_sm90(kInf) == kInf);
  CHECK(bits(ex2_sm90(NAN)) == 0x7fffffff);
  CHECK(ex2_sm90(0) == 1);
  CHECK(ex2_sm90(-0.0f) == 1);
  CHECK(ex2_sm90(0x1p-140f) == 1);
  CHECK(ex2_sm90(-126) == 0x1p-126f);
  CHECK(bits(ex2_sm90(-126.00001f)) == 0);
  CHECK(ex2_sm90(127) == 0x1p127f);
  CHECK(ex2_sm90(128) == kInf);
}
