// labels: conformance fibers
// What the GPU kernels of sample leave out because it cannot change a result: bounds of noise and weights beside the exact ones,
// and the largest of bf16 two at a time.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "simt/sample/draws.hpp"

namespace {

using namespace rlk::sampling;
using namespace rlk::simt::sample;

// Every word below 2^16 and above 2^32 - 2^16, those beside powers of two, and 2^20 evenly between, descending.
std::vector<uint32_t> words() {
  std::vector<uint32_t> all;
  for (uint32_t i = 0; i < 1u << 16; ++i) all.push_back(i), all.push_back(~i);
  for (int bit = 0; bit < 32; ++bit)
    for (uint32_t i = 0; i < 64; ++i) all.push_back((1u << bit) + i), all.push_back((1u << bit) - i);
  for (uint32_t i = 0; i < 1u << 20; ++i) all.push_back(i * 4096 + 2048);
  std::sort(all.rbegin(), all.rend());
  return all;
}

// What the device's logarithm may be off by, a few units of 2^-20 of up to 32.
constexpr float kRough = 0.0005f;

}  // namespace

TEST_CASE("no word's noise is above the bound of a word that is not larger") {
  float most = -INFINITY;  // of all words from here up
  for (uint32_t word : words()) {
    most = std::max(most, score(0.0f, 0.0f, 1.0f, word));
    CAPTURE(word);
    REQUIRE(most <= most_noise(word) - kRough);
  }
  CHECK(most > 22);
}

TEST_CASE("the bound of noise is close, so that few words ask for the exact one") {
  for (uint32_t word : words())
    if (word < 1u << 20)
      REQUIRE(most_noise(word) - score(0.0f, 0.0f, 1.0f, word) < (word == 0 ? 0.8f : 0.5f));
  CHECK(most_noise(1u << 20) - score(0.0f, 0.0f, 1.0f, 1u << 20) < 0.02f);
}

TEST_CASE("whether an entry weighs enough for min_p is what its exact weight says") {
  std::mt19937 random(9);
  std::uniform_real_distribution<float> unit(0, 1);
  int near = 0;
  for (int i = 0; i < 20000; ++i) {
    Problem p;
    Parameters r;
    r.c = std::exp2(8 * unit(random) - 4);
    r.least = whole(std::max(1.0f, std::exp2(40 * unit(random)))) / kOne;
    if (i % 50 == 0) r.least = 1;
    const float most = i % 3 == 0 ? 0.0f : 20 * unit(random) - 10;
    Reader<rlk::rows::Any> row{p, r, nullptr};
    row.most = most;
    // The edge and its neighbours, then both sides of the margin.
    float at = most + std::log2(r.least) / r.c;
    for (int k = 0; k < 6; ++k) at = std::nextafter(at, -INFINITY);
    std::vector<float> entries{most, -INFINITY, most - 200 / r.c};
    for (int k = 0; k < 12; ++k, at = std::nextafter(at, INFINITY)) entries.push_back(at);
    for (float off : {-0.01f, -0.00101f, -0.0009f, 0.0009f, 0.00101f, 0.01f})
      entries.push_back(at + off / r.c);
    int enough = 0;
    for (float x : entries) {
      if (x > most) continue;
      const bool exact = weight(x, most, r.c) >= r.least;
      enough += exact ? 1 : 0;
      CAPTURE(x);
      CAPTURE(r.least);
      CAPTURE(r.c);
      REQUIRE(row.weighs(x) == exact);
    }
    near += enough > 1 && enough < static_cast<int>(entries.size()) - 1 ? 1 : 0;
  }
  CHECK(near > 15000);
}

TEST_CASE("the larger of two pairs of bf16 is that of their numbers, and NaN stays") {
  const auto number = [](uint32_t half) { return std::bit_cast<float>(half << 16); };
  const std::vector<uint32_t> halves = {0x0000, 0x8000, 0x0001, 0x8001, 0x3f80, 0xbf80, 0x4110, 0xc110,
                                        0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81};
  for (uint32_t a : halves)
    for (uint32_t b : halves) {
      const uint32_t pair = rlk::rows::larger_pair(a | b << 16, b | 0xff800000u);
      const float x = number(a), y = number(b), low = number(pair & 0xffffu), high = number(pair >> 16);
      CAPTURE(a);
      CAPTURE(b);
      if (std::isnan(x) || std::isnan(y))
        CHECK(std::isnan(low));
      else
        CHECK(low == std::max(x, y));
      CHECK((std::isnan(y) ? std::isnan(high) : high == y));
    }
}
