// labels: conformance
// linear_logp is logp(lm_head(..)), and its gradients are linear_bwd(logp_bwd(..)), to the bit, with every chain that lm_head has
// here; parts of the vocabulary join to the bits of the whole; and no tensor of logits comes into being.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

// A dense tensor that owns its bytes.
struct Owned {
  std::vector<std::byte> bytes;
  Tensor tensor;
  Owned(std::initializer_list<std::int64_t> shape, DType t) {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    bytes.assign(static_cast<std::size_t>(n * rlk::size_of(t)), std::byte{0x7f});
    tensor = Tensor(bytes.data(), shape, t);
  }
  Owned(std::initializer_list<std::int64_t> shape, DType t, std::mt19937& random, float deviation)
      : Owned(shape, t) {
    std::normal_distribution<float> normal(0, deviation);
    for (std::size_t i = 0; i < bytes.size(); i += static_cast<std::size_t>(rlk::size_of(t))) {
      const float x = normal(random);
      const std::uint16_t half = t == DType::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
      if (t == DType::f32)
        std::memcpy(bytes.data() + i, &x, 4);
      else
        std::memcpy(bytes.data() + i, &half, 2);
    }
  }
  Owned(const Owned&) = delete;
  bool operator==(const Owned& b) const { return bytes == b.bytes; }
};

// Operands of one size, and targets with rows that are left out.
struct Inputs {
  Owned hidden, weight, bias, target, d_logp, d_entropy;
  Inputs(std::int64_t n, std::int64_t k, std::int64_t v, DType t, std::mt19937& random)
      : hidden({n, k}, t, random, 1),
        weight({v, k}, t, random, 0.5f),
        bias({v}, t, random, 1),
        target({n}, DType::i64),
        d_logp({n}, DType::f32, random, 1),
        d_entropy({n}, DType::f32, random, 1) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t id = i == 1 ? -100 : static_cast<std::int64_t>(random() % static_cast<unsigned>(v));
      std::memcpy(target.bytes.data() + 8 * i, &id, 8);
    }
  }
};

struct Size {
  std::int64_t n, k, v;
};

// A fused call by this name is compared with lm_head and logp by these.
bool by_unit(const std::string& backend) { return backend.ends_with("_ex2"); }
rlk::Options head_of(const char* backend) {
  return {.backend = by_unit(backend) ? "native.replay_sm90" : backend};
}
rlk::Options rows_of(const char* backend) {
  return {.backend = by_unit(backend) ? "native.replay_sm90_ex2" : "native.tiles"};
}
bool is_slow(const std::string& backend) { return backend == "native.replay_sm90" || by_unit(backend); }

}  // namespace

TEST_CASE("linear_logp is logp of lm_head's logits, with every chain, across panels and runs of rows") {
  std::mt19937 random(21);
  int tried = 0, tried_by_unit = 0;
  for (const char* backend : {"native.scalar", "native.avx2", "native.avx512", "native.kb256", "native.amx",
                              "native.replay_amx", "native.replay_sm90", "native.replay_sm90_ex2"})
    for (DType t : {DType::f32, DType::bf16, DType::f16})
      for (Size s : {Size{5, 70, 300}, Size{520, 5, 8300}, Size{514, 5, 16500}})
        for (bool narrow : {false, true}) {
          // The last is of more than one panel where those are of tiles of 2048.
          if (s.v > 16384 ? !by_unit(backend) || t == DType::f16 || narrow : s.n > 5 && is_slow(backend))
            continue;
          CAPTURE(backend);
          CAPTURE(rlk::name_of(t));
          CAPTURE(s.n);
          const Inputs in(s.n, s.k, s.v, t, random);
          using Round = rlk::LinearLogp::LogitsRound;
          const DType wide = narrow ? t : DType::f32;
          Owned logits({s.n, s.v}, wide), logp({s.n}, DType::f32), fused({s.n}, DType::f32),
              stats({s.n, 4}, DType::f32), fused_stats({s.n, 4}, DType::f32);
          const rlk::Options with{.backend = backend};
          if (!rlk::lm_head({.hidden = in.hidden.tensor,
                             .weight = in.weight.tensor,
                             .bias = in.bias.tensor,
                             .out = logits.tensor},
                            head_of(backend)))
            continue;
          REQUIRE(rlk::logp({.logits = logits.tensor,
                             .target = in.target.tensor,
                             .logp = logp.tensor,
                             .stats = stats.tensor},
                            rows_of(backend)));
          rlk::LinearLogp a{.hidden = in.hidden.tensor,
                            .weight = in.weight.tensor,
                            .bias = in.bias.tensor,
                            .target = in.target.tensor,
                            .logp = fused.tensor,
                            .stats = fused_stats.tensor};
          a.logits_round = wide == DType::f32 ? Round::fp32 : wide == DType::bf16 ? Round::bf16 : Round::fp16;
          REQUIRE(rlk::linear_logp(a, with));
          CHECK(fused == logp);
          CHECK(fused_stats == stats);
          ++tried, tried_by_unit += by_unit(backend);
        }
  CHECK(tried >= 12);
  CHECK(tried_by_unit == 5);
}

namespace {

// What the gradients' products are by, beside lm_head's of this name. A processor with AMX would take its own for bf16.
const char* linear_of(const std::string& backend) {
  return backend.ends_with("amx")          ? "amx/k32/tree8"
         : is_slow(backend)                ? "sm90/t25k16/tree8"
         : backend.ends_with("avx512bf16") ? "avx512bf16/tree8"
                                           : "fma32/tree8";
}

// The gradients as they come one after another, of logits whose gradient is of type `slope`.
struct Composed {
  Owned stats, d_hidden, d_weight, d_bias;
  Composed(const Inputs& in, Size s, DType t, DType wide, DType slope, const char* backend)
      : stats({s.n, 4}, DType::f32), d_hidden({s.n, s.k}, t), d_weight({s.v, s.k}, t), d_bias({s.v}, t) {
    Owned logits({s.n, s.v}, wide), d_logits({s.n, s.v}, wide), narrow({s.n, s.v}, DType::bf16);
    REQUIRE(rlk::lm_head({.hidden = in.hidden.tensor,
                          .weight = in.weight.tensor,
                          .bias = in.bias.tensor,
                          .out = logits.tensor},
                         head_of(backend)));
    REQUIRE(rlk::logp({.logits = logits.tensor, .target = in.target.tensor, .stats = stats.tensor},
                      rows_of(backend)));
    REQUIRE(rlk::logp_bwd({.logits = logits.tensor,
                           .target = in.target.tensor,
                           .d_logp = in.d_logp.tensor,
                           .d_entropy = in.d_entropy.tensor,
                           .d_logits = d_logits.tensor},
                          rows_of(backend)));
    for (std::int64_t i = 0; slope != wide && i < s.n * s.v; ++i) {
      float x = 0;
      std::memcpy(&x, d_logits.bytes.data() + 4 * i, 4);
      const std::uint16_t half = rlk::float_to_bf16(x);
      std::memcpy(narrow.bytes.data() + 2 * i, &half, 2);
    }
    REQUIRE(rlk::linear_bwd({.d_y = slope == wide ? d_logits.tensor : narrow.tensor,
                             .x = in.hidden.tensor,
                             .weight = in.weight.tensor,
                             .d_x = d_hidden.tensor,
                             .d_weight = d_weight.tensor,
                             .d_bias = d_bias.tensor},
                            {.backend = "native", .arithmetic = linear_of(backend)}));
  }
};

}  // namespace

TEST_CASE("linear_logp_bwd is linear_bwd of logp_bwd, with every chain, across runs of rows and columns") {
  std::mt19937 random(22);
  int tried = 0, tried_by_unit = 0;
  for (const char* backend : {"native.scalar", "native.avx2", "native.avx512", "native.kb256", "native.amx",
                              "native.replay_amx", "native.replay_sm90", "native.replay_sm90_ex2"})
    for (DType t : {DType::f32, DType::bf16})
      for (DType wide : t == DType::f32 ? std::vector{t} : std::vector{DType::f32, t})
        for (Size s : {Size{5, 70, 300}, Size{1040, 5, 2300}, Size{514, 5, 16500}})
          for (bool given : {false, true}) {
            const std::string by = backend;
            if (s.v > 16384 ? !by_unit(by) || given || wide == t
                            : s.n > 5 && (given || wide != t || is_slow(by)))
              continue;
            CAPTURE(backend);
            CAPTURE(rlk::name_of(t));
            CAPTURE(rlk::name_of(wide));
            CAPTURE(s.n);
            const Inputs in(s.n, s.k, s.v, t, random);
            Owned fused_hidden({s.n, s.k}, t), fused_weight({s.v, s.k}, t), fused_bias({s.v}, t);
            rlk::LinearLogpBwd a{.hidden = in.hidden.tensor,
                                 .weight = in.weight.tensor,
                                 .bias = in.bias.tensor,
                                 .target = in.target.tensor,
                                 .d_logp = in.d_logp.tensor,
                                 .d_entropy = in.d_entropy.tensor,
                                 .d_hidden = fused_hidden.tensor,
                                 .d_weight = fused_weight.tensor,
                                 .d_bias = fused_bias.tensor};
            if (wide == DType::bf16) a.logits_round = rlk::LinearLogpBwd::LogitsRound::bf16;
            const rlk::Options with{.backend = backend};
            if (!rlk::resolve(a, with)) continue;
            // A matrix unit takes two operands of one 16-bit type.
            const DType slope = by.ends_with("amx") || is_slow(by) ? t : wide;
            const Composed expected(in, s, t, wide, slope, backend);
            if (given) a.stats = expected.stats.tensor;
            REQUIRE(rlk::linear_logp_bwd(a, with));
            CHECK(fused_hidden == expected.d_hidden);
            CHECK(fused_weight == expected.d_weight);
            CHECK(fused_bias == expected.d_bias);
            ++tried, tried_by_unit += by_unit(backend);
          }
  CHECK(tried >= 8);
  CHECK(tried_by_unit == 5);
}

namespace {

// A part's gradients, of its rows of the weight.
struct Part {
  Owned d_hidden, d_weight;
  Part(std::int64_t n, std::int64_t k, std::int64_t rows, DType t)
      : d_hidden({n, k}, DType::f32), d_weight({rows, k}, t) {}
};

}  // namespace

TEST_CASE("parts of the vocabulary have one device's gradients to the bit, joined by tp_sum") {
  std::mt19937 random(23);
  constexpr Size s{7, 40, 1100};
  for (const DType t : {DType::f32, DType::bf16}) {
    const Inputs in(s.n, s.k, s.v, t, random);
    Owned stats({s.n, 4}, DType::f32), d_hidden({s.n, s.k}, t), d_weight({s.v, s.k}, t),
        joined({s.n, s.k}, t);
    REQUIRE(rlk::linear_logp({.hidden = in.hidden.tensor,
                              .weight = in.weight.tensor,
                              .target = in.target.tensor,
                              .stats = stats.tensor}));
    rlk::LinearLogpBwd a{.hidden = in.hidden.tensor,
                         .weight = in.weight.tensor,
                         .target = in.target.tensor,
                         .stats = stats.tensor,
                         .d_logp = in.d_logp.tensor,
                         .d_entropy = in.d_entropy.tensor,
                         .d_hidden = d_hidden.tensor,
                         .d_weight = d_weight.tensor};
    REQUIRE(rlk::linear_logp_bwd(a));
    for (const std::int64_t ranks : {2, 4, 8}) {
      CAPTURE(ranks);
      Owned partials({ranks, s.n, s.k}, DType::f32);
      const std::int64_t leaf = 144, each = 8 / ranks;
      for (std::int64_t r = 0; r < ranks; ++r) {
        const std::int64_t begin = std::min(s.v, r * each * leaf),
                           rows = std::min(s.v, (r + 1) * each * leaf) - begin;
        Part p(s.n, s.k, rows, t);
        rlk::LinearLogpBwd b = a;
        const Tensor weight(const_cast<std::byte*>(in.weight.bytes.data()) + begin * s.k * rlk::size_of(t),
                            {rows, s.k}, t);
        b.weight = weight, b.d_hidden = p.d_hidden.tensor, b.d_weight = p.d_weight.tensor;
        b.vocab = s.v, b.vocab_start = begin, b.leaf_first = r * each, b.leaf_count = each;
        REQUIRE(rlk::linear_logp_bwd(b));
        std::memcpy(partials.bytes.data() + r * s.n * s.k * 4, p.d_hidden.bytes.data(),
                    p.d_hidden.bytes.size());
        CHECK(std::memcmp(p.d_weight.bytes.data(), d_weight.bytes.data() + begin * s.k * rlk::size_of(t),
                          p.d_weight.bytes.size()) == 0);
      }
      REQUIRE(rlk::tp_sum({.partials = partials.tensor, .y = joined.tensor}));
      CHECK(joined == d_hidden);
    }
  }
}

namespace {

struct Chain {
  const char *backend, *arithmetic;
};
constexpr Chain kChains[] = {{"native.scalar", "fma32/kb1024/lse128/l8/tree8"},
                             {"native.avx2", "fma32/kb1024/lse128/l8/tree8"},
                             {"native.avx512", "fma32/kb1024/lse128/l8/tree8"},
                             {"native.kb256", "fma32/kb256/lse128/l8/tree8"},
                             {"native.replay_sm90", "sm90/t25k16/lse128/l8/tree8"},
                             {"native.replay_sm90_ex2", "sm90/t25k16/ex2/lse2048/l8/tree8"},
                             {"native.golden", "fma64"}};

float number(const Owned& t, std::int64_t i) {
  float x = 0;
  std::memcpy(&x, t.bytes.data() + 4 * i, 4);
  return x;
}
void put(Owned& t, std::int64_t i, float x) { std::memcpy(t.bytes.data() + 4 * i, &x, 4); }
void fill_with_nan(Owned& t) { std::fill(t.bytes.begin(), t.bytes.end(), std::byte{0xff}); }

// sum + before in fp32, one by one; a NaN is the canonical one.
void add(Owned& sum, const Owned& before) {
  for (std::int64_t i = 0; 4 * i < static_cast<std::int64_t>(sum.bytes.size()); ++i) {
    const float x = number(sum, i) + number(before, i);
    constexpr std::uint32_t kCanonical = 0x7fffffff;
    put(sum, i, x);
    if (std::isnan(x)) std::memcpy(sum.bytes.data() + 4 * i, &kCanonical, 4);
  }
}

// Gradients of a weight with three rows more than the vocabulary has entries, in memory full of NaN.
struct Sums {
  Owned d_hidden, d_weight, d_bias;
  Sums(Size s, DType t)
      : d_hidden({s.n, s.k}, t), d_weight({s.v, s.k}, DType::f32), d_bias({s.v}, DType::f32) {
    for (Owned* o : {&d_hidden, &d_weight, &d_bias}) fill_with_nan(*o);
  }
  rlk::LinearLogpBwd call(const Inputs& in, const Inputs& shared) const {
    rlk::LinearLogpBwd a{.hidden = in.hidden.tensor,
                         .weight = shared.weight.tensor,
                         .bias = shared.bias.tensor,
                         .target = in.target.tensor,
                         .d_logp = in.d_logp.tensor,
                         .d_entropy = in.d_entropy.tensor,
                         .d_hidden = d_hidden.tensor,
                         .d_weight = d_weight.tensor,
                         .d_bias = d_bias.tensor};
    a.vocab = shared.weight.tensor.dl().shape[0] - 3;
    return a;
  }
};

std::vector<std::vector<std::byte>> bytes_of(const Inputs& in) {
  return {in.hidden.bytes, in.weight.bytes, in.bias.bytes,
          in.target.bytes, in.d_logp.bytes, in.d_entropy.bytes};
}

}  // namespace

TEST_CASE("gradients so far are added in fp32 to the rounded sums, in place, too, with every chain") {
  std::mt19937 random(24);
  int tried = 0;
  for (const auto& [backend, arithmetic] : kChains)
    for (const DType t : {DType::f32, DType::bf16, DType::f16})
      for (const Size s : {Size{5, 70, 303}, Size{20, 3, 2303}}) {  // a panel of columns, and two
        CAPTURE(backend);
        CAPTURE(rlk::name_of(t));
        CAPTURE(s.v);
        const Inputs in(s.n, s.k, s.v, t, random);
        Sums wanted(s, t), added(s, t);
        Owned weight_before({s.v, s.k}, DType::f32, random, 0.5f), bias_before({s.v}, DType::f32, random, 1);
        // In rows that are no entry, to whose sum of +0 they are added.
        put(weight_before, s.v * s.k - 1, -0.0f), put(bias_before, s.v - 1, -0.0f);
        put(weight_before, s.v * s.k - 2, -std::nanf("7")), put(bias_before, s.v - 2, -std::nanf("7"));
        const rlk::Options with{.backend = backend, .arithmetic = arithmetic};
        if (!rlk::resolve(wanted.call(in, in), with)) continue;
        const auto given = bytes_of(in);
        const auto before = std::vector{weight_before.bytes, bias_before.bytes};
        REQUIRE(rlk::linear_logp_bwd(wanted.call(in, in), with));
        add(wanted.d_weight, weight_before), add(wanted.d_bias, bias_before);

        rlk::LinearLogpBwd a = added.call(in, in);
        a.d_weight_before = weight_before.tensor, a.d_bias_before = bias_before.tensor;
        REQUIRE(rlk::linear_logp_bwd(a, with));
        CHECK(added.d_weight == wanted.d_weight);
        CHECK(added.d_bias == wanted.d_bias);
        CHECK(added.d_hidden == wanted.d_hidden);
        CHECK(bytes_of(in) == given);
        CHECK(std::vector{weight_before.bytes, bias_before.bytes} == before);

        a.d_weight = weight_before.tensor, a.d_bias = bias_before.tensor;
        REQUIRE(rlk::linear_logp_bwd(a, with));
        CHECK(weight_before == wanted.d_weight);
        CHECK(bias_before == wanted.d_bias);
        ++tried;
      }
  CHECK(tried >= 20);
}

TEST_CASE("two micro-batches that add up are what the written rule says") {
  std::mt19937 random(25);
  const rlk::registry::Op& op = *rlk::registry::find("linear_logp_bwd");
  int tried = 0;
  for (const auto& [backend, arithmetic] : kChains)
    for (const DType t : {DType::f32, DType::bf16}) {
      CAPTURE(backend);
      CAPTURE(rlk::name_of(t));
      const Size first{6, 40, 303}, second{9, 40, 303};
      const Inputs one(first.n, first.k, first.v, t, random), two(second.n, second.k, second.v, t, random);
      Sums a(first, t), b(second, t), rule_a(first, t), rule_b(second, t);
      rlk::LinearLogpBwd on = b.call(two, one), ruled = rule_b.call(two, one);
      on.d_weight_before = a.d_weight.tensor, on.d_weight = a.d_weight.tensor;
      on.d_bias_before = a.d_bias.tensor, on.d_bias = a.d_bias.tensor;
      ruled.d_weight_before = rule_a.d_weight.tensor, ruled.d_bias_before = rule_a.d_bias.tensor;
      const auto by_rule = [&, by = arithmetic](const rlk::LinearLogpBwd& call) {
        return op.rule({reinterpret_cast<const rlk_slot*>(&call), by, {}});
      };
      const rlk::Options with{.backend = backend, .arithmetic = arithmetic};
      if (!rlk::resolve(on, with) || !by_rule(rule_a.call(one, one))) continue;
      REQUIRE(by_rule(ruled));
      REQUIRE(rlk::linear_logp_bwd(a.call(one, one), with));
      REQUIRE(rlk::linear_logp_bwd(on, with));
      CHECK(a.d_weight == rule_b.d_weight);
      CHECK(a.d_bias == rule_b.d_bias);
      ++tried;
    }
  CHECK(tried >= 5);
}

TEST_CASE("gradients so far that do not fit are refused with both values") {
  std::mt19937 random(26);
  const Size s{3, 8, 19};
  const Inputs in(s.n, s.k, s.v, DType::bf16, random);
  const Sums sums(s, DType::bf16);
  Owned short_of_rows({s.v - 3, s.k}, DType::f32), weight_before({s.v, s.k}, DType::f32),
      bias_before({s.v}, DType::f32), narrow({s.v, s.k}, DType::bf16), narrow_bias({s.v}, DType::bf16);
  const auto refused = [&](auto change, const char* why, const rlk::Options& options = {}) {
    rlk::LinearLogpBwd a = sums.call(in, in);
    a.d_weight_before = weight_before.tensor, a.d_bias_before = bias_before.tensor;
    change(a);
    const rlk::Status status = rlk::linear_logp_bwd(a, options);
    CHECK(!status);
    CHECK_MESSAGE(std::string(status.message()).find(why) != std::string::npos, status.message());
  };
  refused([&](auto& a) { a.d_weight_before = short_of_rows.tensor; },
          "d_weight_before has size 16 in dimension 0, weight gives 19");
  refused([&](auto& a) { a.d_weight = narrow.tensor; }, "d_weight is bf16, expected fp32");
  refused([&](auto& a) { a.d_bias = narrow_bias.tensor; }, "d_bias is bf16, expected fp32");
  refused([&](auto& a) { a.d_weight_before = narrow.tensor; }, "d_weight_before is bf16");
}
