// labels: conformance fibers
// An fp8 cache: the bits of the same keys and values in q's dtype, which are its numbers' products with a factor in fp32,
// rounded once.
#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "arithmetic/attention/bind.hpp"
#include "attention_owned.hpp"
#include "simt/attention/kernels.hpp"

namespace {

using attention_test::Owned;
using attention_test::says;
using attention_test::Shape;
using rlk::Attention;
using rlk::AttentionPart;
using rlk::DType;
using rlk::In;
using rlk::Tensor;

struct Way {
  DType type;
  const char* arithmetic;
};
constexpr Way kWays[] = {{DType::f32, "fma32/attn128/s512"},
                         {DType::bf16, "fma32/attn128/s512"},
                         {DType::f16, "fma32/attn128/s512"},
                         {DType::bf16, "amx/k32/attn128/s512"},
                         {DType::bf16, "sm90/t25k16/ex2/h8/attn128/s512"},
                         {DType::f16, "sm90/t25k16/ex2/h8/attn128/s512"},
                         {DType::bf16, "fma64"}};

constexpr int64_t kHeads = 4, kKvHeads = 2;

Tensor whole(const Owned& x) { return x.view(0, {x.shape[0]}); }
Tensor integers(const std::vector<int32_t>& x, const Shape& shape) {
  return Tensor(const_cast<int32_t*>(x.data()), std::span(shape), DType::i32);
}
float rounded(DType t, float x) {
  if (t == DType::bf16) return rlk::bf16_to_float(rlk::float_to_bf16(x));
  return t == DType::f16 ? rlk::f16_to_float(rlk::float_to_f16(x)) : x;
}

// Every byte that there is, in an order that no row repeats.
Owned cache(const Shape& shape, std::mt19937& random) {
  Owned x(shape, DType::f8_e4m3, 0.0);
  for (std::byte& b : x.bytes) {
    b = static_cast<std::byte>(random());
    if ((b & std::byte{0x7f}) == std::byte{0x7f}) b &= std::byte{0xfe};  // no NaN
  }
  return x;
}
// The same in another dtype; a factor for each head, or one for all.
Owned widened(const Owned& x, DType t, const std::vector<float>& factors) {
  Owned to(x.shape, t, 0.0);
  const int64_t width = x.shape.back();
  for (int64_t i = 0; i < x.count(); ++i) {
    const auto head = static_cast<std::size_t>(i / width % kKvHeads);
    const float number = rlk::f8_e4m3_to_float(static_cast<uint8_t>(x.bytes[static_cast<std::size_t>(i)]));
    to.set(i, rounded(t, number * factors[factors.size() == 1 ? 0 : head]));
  }
  return to;
}

struct Cached {
  Owned k, v, wide_k, wide_v;
  std::vector<float> k_factors, v_factors;

  Cached(const Shape& rows, int64_t d, int64_t dv, DType t, int64_t factors, std::mt19937& random)
      : k(cache(with(rows, d), random)), v(cache(with(rows, dv), random)), wide_k(k), wide_v(v) {
    std::uniform_real_distribution<float> any(0.001F, 0.02F);
    for (int64_t i = 0; i < factors; ++i) k_factors.push_back(any(random)), v_factors.push_back(-any(random));
    const std::vector<float> one{1};
    wide_k = widened(k, t, factors == 0 ? one : k_factors);
    wide_v = widened(v, t, factors == 0 ? one : v_factors);
  }
  static Shape with(Shape rows, int64_t width) {
    rows.insert(rows.end(), {kKvHeads, width});
    return rows;
  }
  static Tensor factors(const std::vector<float>& x) {
    return Tensor(const_cast<float*>(x.data()), {static_cast<int64_t>(x.size())}, DType::f32);
  }
};

// run(k, v, k_scale, v_scale) into `result`: the same bytes of fp8 and of what it stands for.
template <class Run>
void same(const Cached& c, Owned& result, Run run) {
  const Tensor k = whole(c.k), v = whole(c.v), wk = whole(c.wide_k), wv = whole(c.wide_v),
               fk = Cached::factors(c.k_factors), fv = Cached::factors(c.v_factors);
  const auto k_before = c.k.bytes, v_before = c.v.bytes;
  result.bytes.assign(result.bytes.size(), std::byte{0x7f});
  REQUIRE(run(In(wk), In(wv), In(), In()));
  const auto expected = result.bytes;
  result.bytes.assign(result.bytes.size(), std::byte{0x7f});
  const bool factors = !c.k_factors.empty();
  REQUIRE(run(In(k), In(v), factors ? In(fk) : In(), factors ? In(fv) : In()));
  CHECK(result.bytes == expected);
  CHECK(c.k.bytes == k_before);
  CHECK(c.v.bytes == v_before);
}

}  // namespace

TEST_CASE("fp8: host and kernels read every byte as the same number, and numbers are rounded to it once") {
  for (int b = 0; b < 256; ++b) {
    CAPTURE(b);
    const auto byte = static_cast<uint8_t>(b);
    const float x = rlk::f8_e4m3_to_float(byte), y = rlk::simt::to_float(rlk::simt::fp8{byte});
    CHECK(std::memcmp(&x, &y, sizeof x) == 0);
    if ((b & 0x7f) == 0x7f) {
      CHECK(std::isnan(x));
      continue;
    }
    const int exponent = b >> 3 & 15, fraction = b & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    CHECK(double{x} == (b & 0x80 ? -magnitude : magnitude));
    CHECK(rlk::double_to_f8_e4m3(x) == byte);
    if ((b & 0x7f) >= 0x7e) continue;
    const double next = rlk::f8_e4m3_to_float(static_cast<uint8_t>(b + 1)), tie = (x + next) / 2;
    CHECK(rlk::double_to_f8_e4m3(tie) == (b % 2 == 0 ? b : b + 1));
    CHECK(rlk::double_to_f8_e4m3(std::nextafter(tie, double{x})) == b);
    CHECK(rlk::double_to_f8_e4m3(std::nextafter(tie, next)) == b + 1);
  }
  CHECK(rlk::double_to_f8_e4m3(1e9) == 0x7e);
  CHECK(rlk::double_to_f8_e4m3(-INFINITY) == 0xfe);
  CHECK(rlk::double_to_f8_e4m3(NAN) == 0x7f);
}

TEST_CASE("attention over an fp8 cache is attention over its numbers, to the bit") {
  std::mt19937 random(1);
  for (const Way& way : kWays)
    for (int64_t factors : {0, 1, 2})
      for (int32_t threads : {1, 3}) {
        CAPTURE(way.arithmetic);
        CAPTURE(factors);
        const Owned q({2, 5, kHeads, 32}, way.type, random);
        Owned out({2, 5, kHeads, 48}, way.type, NAN);
        const Tensor tq = whole(q), to = whole(out);
        const rlk::Options options{.arithmetic = way.arithmetic, .threads = threads};
        // Three splits.
        same(Cached({2, 1300}, 32, 48, way.type, factors, random), out,
             [&](In k, In v, In k_scale, In v_scale) {
               return rlk::attention(
                   {.q = tq, .k = k, .v = v, .k_scale = k_scale, .v_scale = v_scale, .out = to, .split = 512},
                   options);
             });
      }
}

TEST_CASE("attention over pages of fp8, and over a prefix, is attention over their numbers, to the bit") {
  std::mt19937 random(2);
  for (const Way& way : kWays)
    for (int64_t factors : {1, 2}) {
      CAPTURE(way.arithmetic);
      const rlk::Options options{.arithmetic = way.arithmetic};
      const Owned q({10, kHeads, 16}, way.type, random);
      Owned out({10, kHeads, 32}, way.type, NAN);
      const std::vector<int32_t> cu{0, 3, 10}, lengths{70, 33}, table{4, 1, 0, 1, 5, 2}, of{-1, 0},
          cu_keys{0, 60, 90};
      const Tensor tq = whole(q), to = whole(out), cu_q = integers(cu, {3}), kv_len = integers(lengths, {2}),
                   pages = integers(table, {2, 3}), cu_k = integers(cu_keys, {3}), prefix = integers(of, {2});
      same(Cached({6, 24}, 16, 32, way.type, factors, random), out, [&](In k, In v, In k_scale, In v_scale) {
        Attention a{.q = tq, .k = k, .v = v, .cu_q = cu_q, .kv_len = kv_len, .block_table = pages};
        a.k_scale = k_scale, a.v_scale = v_scale, a.out = to, a.window = 40, a.split = 512;
        return rlk::attention(a, options);
      });
      same(Cached({90}, 16, 32, way.type, factors, random), out, [&](In k, In v, In k_scale, In v_scale) {
        Attention a{.q = tq, .k = k, .v = v, .cu_q = cu_q, .cu_k = cu_k, .prefix_of = prefix};
        a.k_scale = k_scale, a.v_scale = v_scale, a.out = to, a.split = 512;
        return rlk::attention(a, options);
      });
    }
}

TEST_CASE("attention_part over an fp8 cache is attention_part over its numbers, to the bit") {
  std::mt19937 random(3);
  for (const Way& way : kWays) {
    CAPTURE(way.arithmetic);
    const rlk::Options options{.arithmetic = way.arithmetic};
    const Owned q({2, 3, kHeads, 16}, way.type, random);
    Owned partials({2, 3, kHeads, 2, 18}, DType::f32, NAN);
    const std::vector<int32_t> lengths{1500, 520}, firsts{512, 0};
    const Tensor tq = whole(q), to = whole(partials), kv_len = integers(lengths, {2}),
                 k_first = integers(firsts, {2});
    same(Cached({2, 1000}, 16, 16, way.type, 2, random), partials, [&](In k, In v, In k_scale, In v_scale) {
      AttentionPart a{.q = tq, .k = k, .v = v, .kv_len = kv_len, .k_first = k_first};
      a.k_scale = k_scale, a.v_scale = v_scale, a.partials = to, a.split = 512;
      return rlk::attention_part(a, options);
    });
  }
}

TEST_CASE("the portable kernels on fibers have native's bits of an fp8 cache") {
  std::mt19937 random(4);
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (int64_t factors : {0, 2}) {
      const Owned q({2, 2, kHeads, 16}, t, random);
      Owned out({2, 2, kHeads, 32}, t, NAN);
      const Cached c({2, 700}, 16, 32, t, factors, random);
      const Tensor tq = whole(q), to = whole(out), k = whole(c.k), v = whole(c.v),
                   fk = Cached::factors(c.k_factors), fv = Cached::factors(c.v_factors);
      for (int64_t split : {0, 512}) {
        Attention a{.q = tq, .k = k, .v = v, .out = to, .split = split};
        if (factors != 0) a.k_scale = fk, a.v_scale = fv;
        REQUIRE(rlk::attention(a, {.backend = "native",
                                   .arithmetic = split == 0 ? "fma32/attn128/snone" : "fma32/attn128/s512"}));
        const auto expected = out.bytes;
        out.bytes.assign(out.bytes.size(), std::byte{0x7f});
        const rlk::attn128::Problem p = rlk::attn128::problem_of(a);
        std::vector<std::byte> workspace(
            static_cast<std::size_t>(rlk::simt::attention::workspace_bytes_of(p)), std::byte{0x7f});
        rlk::simt::attention::launch_forward(p, workspace.data(), nullptr);
        CHECK(out.bytes == expected);
      }
    }
}

TEST_CASE("attention refuses an fp8 cache and factors that do not go together, with both values") {
  std::mt19937 random(5);
  const Owned q({1, 2, kHeads, 16}, DType::bf16, random), d_out({1, 2, kHeads, 16}, DType::bf16, random),
      lse({1, 2, kHeads}, DType::f32, random), out({1, 2, kHeads, 16}, DType::bf16, NAN);
  const Cached c({1, 9}, 16, 16, DType::bf16, 2, random);
  const std::vector<float> three{1, 2, 3};
  const Tensor tq = whole(q), to = whole(out), tl = whole(lse), go = whole(d_out), k = whole(c.k),
               v = whole(c.v), wide_k = whole(c.wide_k), wide_v = whole(c.wide_v),
               factors = Cached::factors(c.k_factors), many = Cached::factors(three);
  says(rlk::attention({.q = tq, .k = k, .v = wide_v, .out = to}), "attention: v is bf16, k is fp8_e4m3");
  says(rlk::attention({.q = tq, .k = wide_k, .v = v, .out = to}), "attention: v is fp8_e4m3, k is bf16");
  says(rlk::attention({.q = tq, .k = wide_k, .v = wide_v, .k_scale = factors, .out = to}),
       "attention: k_scale is given, k is bf16, not fp8_e4m3");
  says(rlk::attention({.q = tq, .k = wide_k, .v = wide_v, .v_scale = factors, .out = to}),
       "attention: v_scale is given, k is bf16, not fp8_e4m3");
  says(rlk::attention({.q = tq, .k = k, .v = v, .v_scale = many, .out = to}),
       "attention: v_scale has size 3, it takes 1 or Hkv=2");
  says(rlk::attention({.q = k, .k = k, .v = v, .out = to}), "attention: q is fp8_e4m3");
  rlk::AttentionBwd b{.q = tq, .k = k, .v = v, .out = to, .lse = tl, .d_out = go, .d_q = to};
  says(rlk::attention_bwd(b), "attention_bwd: k is fp8_e4m3");
}
