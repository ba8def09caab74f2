// sources: rope_engines.cpp
// bf16, fp16 and fp8 mean one thing: what host code (rlk/half.hpp), device code on fibers (arithmetic/half.hpp) and the
// native vector kernels make of a float is the same, NaN payloads and subnormals included.
#include "rlk/half.hpp"

#include <bit>
#include <cfenv>

#include "arithmetic/fp8.hpp"
#include "rlk/rlk.hpp"
#include "rope_support.hpp"
#include "simt/simt.hpp"

using namespace ropetest;
using rlk::simt::bf16;
using rlk::simt::fp16;
using rlk::simt::fp8;

namespace {

float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

// Every sign, exponent and high fraction, with low bits on, beside and far from where bf16 and fp16 round:
// half of them, a tie, its neighbours, and a tie with a bit far below it. NaN payloads of every kind are
// among them.
std::vector<float> floats() {
  std::vector<float> all;
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (std::uint32_t low : {0x0u, 0x1u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u, 0x7fffu,
                              0x8000u, 0x8001u, 0xf000u, 0xffffu})
      all.push_back(float_of(high << 16 | low));
  return all;
}

__global__ void narrow(const float* in, std::int64_t count, std::uint16_t* as_bf16, std::uint16_t* as_fp16) {
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    as_bf16[i] = rlk::simt::from_float<bf16>(in[i]).bits;
    as_fp16[i] = rlk::simt::from_float<fp16>(in[i]).bits;
  }
}
__global__ void narrow_fp8(const float* in, std::int64_t count, std::uint8_t* as_fp8, std::uint32_t* pairs) {
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    as_fp8[i] = rlk::simt::from_float<fp8>(in[i]).bits;
    pairs[i] = rlk::simt::fp8_pair(in[i], in[count - 1 - i]);
  }
}
__global__ void widen(std::uint32_t* from_bf16, std::uint32_t* from_fp16) {
  for (unsigned p = threadIdx.x; p < 0x10000; p += blockDim.x) {
    from_bf16[p] = rlk::simt::float_bits(rlk::simt::to_float(bf16{std::uint16_t(p)}));
    from_fp16[p] = rlk::simt::float_bits(rlk::simt::to_float(fp16{std::uint16_t(p)}));
  }
}

std::uint16_t narrowed(Float type, float x) {
  return type == Float::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
}

}  // namespace

TEST_CASE("16-bit types: host and device code widen every pattern to the same float, and back") {
  std::vector<std::uint32_t> b(0x10000), h(0x10000);
  hipLaunchKernelGGL(widen, 1, 64, 0, nullptr, b.data(), h.data());
  int differ = 0, lost = 0;
  for (unsigned p = 0; p < 0x10000; ++p) {
    const float x = rlk::bf16_to_float(std::uint16_t(p)), y = rlk::f16_to_float(std::uint16_t(p));
    differ += (bits_of(x) != b[p]) + (bits_of(y) != h[p]);
    lost += rlk::float_to_bf16(x) != (x == x ? p : 0x7fffu);
    lost += rlk::float_to_f16(y) != (y == y ? p : 0x7fffu);
  }
  CHECK(differ == 0);
  CHECK(lost == 0);
  CHECK(rlk::f16_to_float(0x0001) == 0x1p-24f);
  CHECK(rlk::f16_to_float(0x7bff) == 65504.0f);
  CHECK(rlk::f16_to_float(0xfc00) == -INFINITY);
  CHECK(rlk::bf16_to_float(0x3f81) == 1.0078125f);
}

TEST_CASE("16-bit types: host and device code, from fp32 and from fp64, round to the same pattern") {
  const auto all = floats();
  std::vector<std::uint16_t> b(all.size()), h(all.size());
  hipLaunchKernelGGL(narrow, 1, 64, 0, nullptr, all.data(), std::int64_t(all.size()), b.data(), h.data());
  int differ = 0, nans = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const float x = all[i];
    differ += rlk::float_to_bf16(x) != b[i] || rlk::double_to_bf16(x) != b[i];
    differ += rlk::float_to_f16(x) != h[i] || rlk::double_to_f16(x) != h[i];
    if (x == x) continue;
    ++nans;
    differ += b[i] != 0x7fff || h[i] != 0x7fff || bits_of(rlk::canonical(x)) != 0x7fffffffu;
  }
  CHECK(differ == 0);
  CHECK(nans > 3000);
  // Where they round, in numbers.
  CHECK(rlk::float_to_f16(65519.99f) == 0x7bff);
  CHECK(rlk::float_to_f16(65520.0f) == 0x7c00);
  CHECK(rlk::float_to_f16(0x1p-25f) == 0);
  CHECK(rlk::float_to_f16(std::nextafterf(0x1p-25f, 1)) == 1);
  CHECK(rlk::float_to_f16(-0x3p-25f) == 0x8002);
  CHECK(rlk::float_to_bf16(float_of(0x3f808000u)) == 0x3f80);
  CHECK(rlk::float_to_bf16(float_of(0x3f818000u)) == 0x3f82);
  // Rounding twice would give 0x3c00: the fp64 value is just above a tie of fp16, its fp32 neighbour is the
  // tie.
  CHECK(rlk::double_to_f16(1 + 0x1p-11 + 0x1p-40) == 0x3c01);
}

// Of floats() every other pattern of bits 16 to 19 is a tie of fp8 where the low bits are 0, and beside one where they are not;
// 2^17 drawn ones lie where fp8 has subnormals.
TEST_CASE("fp8: host and device code round to the same pattern, which widens to a number that keeps it") {
  auto all = floats();
  for (unsigned p = 0; p < 0x10000; ++p) all.push_back(rlk::f16_to_float(std::uint16_t(p)));
  std::uint32_t drawn = 1;
  for (int i = 0; i < 1 << 17; ++i) {
    drawn = drawn * 1664525u + 1013904223u;
    all.push_back(float_of((drawn & 0x80000000u) | (0x3a000000u + (drawn >> 4 & 0x3ffffffu))));
  }
  const auto count = std::int64_t(all.size());
  std::vector<std::uint8_t> bytes(all.size());
  std::vector<std::uint32_t> pairs(all.size());
  hipLaunchKernelGGL(narrow_fp8, 1, 64, 0, nullptr, all.data(), count, bytes.data(), pairs.data());
  int differ = 0, lost = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::uint8_t want = rlk::double_to_f8_e4m3(all[i]);
    differ += bytes[i] != want;
    differ += pairs[i] != (want | std::uint32_t{rlk::double_to_f8_e4m3(all[all.size() - 1 - i])} << 8);
  }
  for (unsigned p = 0; p < 0x100; ++p)
    lost +=
        rlk::simt::from_float<fp8>(rlk::simt::to_float(fp8{std::uint8_t(p)})).bits != (p == 0xff ? 0x7f : p);
  CHECK(differ == 0);
  CHECK(lost == 0);
  CHECK(rlk::simt::from_float<fp8>(464.0f).bits == 0x7e);
  CHECK(rlk::simt::from_float<fp8>(-INFINITY).bits == 0xfe);
  CHECK(rlk::simt::from_float<fp8>(float_of(0xffffffffu)).bits == 0x7f);
  CHECK(rlk::simt::from_float<fp8>(0x1.1p0f).bits == 0x38);
  CHECK(rlk::simt::from_float<fp8>(0x3p-10f).bits == 0x02);
}

TEST_CASE("16-bit types: no rounding mode of the caller's changes what host code rounds to") {
  const auto all = floats();
  std::vector<std::uint16_t> want;
  for (float x : all) want.push_back(rlk::float_to_f16(x)), want.push_back(rlk::float_to_bf16(x));
  for (int mode : {FE_UPWARD, FE_TOWARDZERO}) {
    REQUIRE(std::fesetround(mode) == 0);
    int differ = 0;
    for (std::size_t i = 0; i < all.size(); ++i)
      differ += rlk::float_to_f16(all[i]) != want[2 * i] || rlk::float_to_bf16(all[i]) != want[2 * i + 1];
    std::fesetround(FE_TONEAREST);
    CHECK(differ == 0);
  }
}

// Turning the pair (1, 0) by the factors (c, 0) gives (c, 0 * c): every engine's own rounding of any float.
TEST_CASE("16-bit types: rope's kernels round and store as host code does, in every pairing") {
  const auto all = floats();
  const std::int64_t pairs = 64, tokens = std::int64_t(all.size()) / pairs;
  Setting s;
  s.cos = Tensor(type_of(Float::f32), {tokens, pairs}), s.sin = s.cos;
  std::memcpy(s.cos.memory.data(), all.data(), all.size() * sizeof(float));
  std::fill(s.sin.memory.begin(), s.sin.memory.end(), std::uint8_t{0});
  using rlk::rotary::Pairing;
  for (Float type : {Float::bf16, Float::f16, Float::f32})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent, Pairing::adjacent_to_half}) {
      const auto member = [&](std::int64_t p, bool adjacent) { return adjacent ? 2 * p : p; };
      s.attributes.pairing = pairing;
      Tensor x(type_of(type), {1, 1, tokens, 2 * pairs}), y = x;
      for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, 0);
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t p = 0; p < pairs; ++p)
          x.set(t * 2 * pairs + member(p, pairing != Pairing::half), 1);
      Tensors in = s.tensors();
      in.x = x.dl();
      REQUIRE(run_all(s.attributes, in, y) == "");
      int differ = 0;
      for (std::int64_t i = 0; i < std::int64_t(all.size()); ++i) {
        const float c = all[std::size_t(i)];
        const auto got = y.bits(i / pairs * 2 * pairs + member(i % pairs, pairing == Pairing::adjacent));
        differ += got != (type == Float::f32 ? bits_of(rlk::canonical(c)) : narrowed(type, c));
      }
      CHECK(differ == 0);
    }
}

// Products of one factor: all pairs of 256 patterns, NaN, infinities, subnormals and zeros of both signs
// among them.
TEST_CASE("16-bit types: lm_head's native kernels widen, round and store as host code does") {
  const std::int64_t n = 256;
  for (Float type : {Float::bf16, Float::f16}) {
    Tensor a(type_of(type), {n, 1}), b = a, out(type_of(type), {n, n}), wide(type_of(Float::f32), {n, n});
    for (std::int64_t i = 0; i < n; ++i) {
      const auto p = std::uint16_t(i * 0x0101 + 7), q = std::uint16_t(i << 8 | (i * 37 & 0xff));
      std::memcpy(a.at(i), &p, 2), std::memcpy(b.at(i), &q, 2);
    }
    int ran = 0;
    for (const char* id : {"native.scalar", "native.avx2", "native.avx512"}) {
      CAPTURE(id);
      const rlk::Options with{.backend = id};
      if (!rlk::lm_head({.hidden = a.dl(), .weight = b.dl(), .out = out.dl()}, with)) continue;
      REQUIRE(rlk::lm_head({.hidden = a.dl(), .weight = b.dl(), .out = wide.dl()}, with));
      ++ran;
      int differ = 0;
      for (std::int64_t i = 0; i < n * n; ++i) {
        const float sum = std::fma(float(a.get(i / n)), float(b.get(i % n)), 0.0f);
        differ += out.bits(i) != narrowed(type, sum) || wide.bits(i) != bits_of(rlk::canonical(sum));
      }
      CHECK(differ == 0);
    }
    CHECK(ran >= 1);
  }
}
