// labels: conformance
// What is special about the loss ops: estimates that are never negative, masked tokens, denominators, sequences without
// tokens, and sums that do not know how a batch was cut.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "arithmetic/math.hpp"
#include "registry/exp32.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Floats {
  std::vector<float> x;
  Tensor tensor;
  explicit Floats(std::vector<float> values) : x(std::move(values)) {
    tensor = Tensor(x.data(), {static_cast<int64_t>(x.size())}, DType::f32);
  }
  Floats(std::size_t n, std::mt19937& random, float mean, float deviation) : Floats(std::vector<float>(n)) {
    std::normal_distribution<float> normal(mean, deviation);
    for (float& v : x) v = normal(random);
  }
  explicit Floats(std::size_t n) : Floats(std::vector<float>(n, kNan)) {}
  Floats(const Floats&) = delete;
  bool operator==(const Floats& other) const {
    return x.size() == other.x.size() && std::memcmp(x.data(), other.x.data(), 4 * x.size()) == 0;
  }
};

}  // namespace

TEST_CASE("expm1_32 is within 1.5 ulp of e^x - 1, and the bits of its written rule") {
  double worst = 0;
  for (std::uint64_t bits = 0; bits < 0x100000000u; bits += 4099) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    const float got = rlk::simt::expm1(x), rule = rlk::registry::expm1_32(x);
    CHECK((std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(rule) ||
           (got != got && rule != rule)));
    const double truth = std::expm1(double{x});
    if (!(std::fabs(truth) > 1e-37 && std::fabs(truth) < 3e38)) continue;
    worst = std::max(worst, std::fabs(double{got} - truth) / std::ldexp(1, std::ilogb(truth) - 23));
  }
  CHECK(worst < 1.5);
  CHECK(rlk::simt::expm1(-kInf) == -1);
  CHECK(rlk::simt::expm1(kInf) == kInf);
}

TEST_CASE(
    "k3 is never negative, where the literal formula is for many tokens of a policy that has hardly moved") {
  std::mt19937 random(1);
  const std::size_t n = 20000;
  const Floats logp(n, random, -0.01f, 5e-5f), ref(n, random, -0.01f, 5e-5f);
  Floats ratio(n), kl(n);
  for (const char* backend : {"native.tokens", "native.tokens.scalar", "native.golden"}) {
    REQUIRE(rlk::ratio_kl({.logp = logp.tensor,
                           .old_logp = logp.tensor,
                           .ref_logp = ref.tensor,
                           .ratio = ratio.tensor,
                           .kl = kl.tensor},
                          {.backend = backend}));
    int literal_is_negative = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const float d = ref.x[i] - logp.x[i];
      literal_is_negative += std::exp(d) - d - 1 < 0;
      CHECK(ratio.x[i] == 1);
      CHECK(kl.x[i] >= 0);
      CHECK((kl.x[i] > 0) == (d != 0));
      const double truth = double{d} * d * (0.5 + d * (1.0 / 6 + d / 24.0));
      CHECK(std::fabs(kl.x[i] - truth) <= 3e-7 * truth);
    }
    CHECK(literal_is_negative > 2000);
  }
}

TEST_CASE("k3 is within 3e-7 of e^d - 1 - d, from 1e-6 to 20 on either side") {
  std::vector<float> ds;
  for (float d = 1e-6f; d < 20; d *= 1.0007f) ds.push_back(d), ds.push_back(-d);
  const Floats ref(ds), logp(std::vector<float>(ds.size(), 0.0f));
  Floats ratio(ds.size()), kl(ds.size());
  rlk::RatioKl a{.logp = logp.tensor,
                 .old_logp = logp.tensor,
                 .ref_logp = ref.tensor,
                 .ratio = ratio.tensor,
                 .kl = kl.tensor};
  a.kl_clamp = 0;
  REQUIRE(rlk::ratio_kl(a, {.backend = "native.tokens"}));
  for (std::size_t i = 0; i < ds.size(); ++i) {
    const double d = double{ds[i]};
    double truth = std::expm1(d) - d;
    if (std::fabs(d) < 1e-2)
      truth = d * d * (0.5 + d * (1.0 / 6 + d * (1.0 / 24 + d * (1.0 / 120 + d / 720))));
    CHECK(std::fabs(kl.x[i] - truth) <= 3e-7 * truth);
  }
}

TEST_CASE("what a masked token holds reaches neither ratio, estimate nor gradient") {
  std::mt19937 random(2);
  const std::size_t n = 70;
  const Floats d_ratio(n, random, 0, 1), d_kl(n, random, 0, 1);
  Floats logp(n, random, -1, 1), old(n, random, -1, 1), ref(n, random, -1, 1), mask(n, random, 0, 1);
  for (std::size_t i = 0; i < n; ++i) mask.x[i] = i % 3 ? 1.0f : 0.0f;
  const auto run = [&](Floats& ratio, Floats& kl, Floats& d_logp) {
    REQUIRE(rlk::ratio_kl({.logp = logp.tensor,
                           .old_logp = old.tensor,
                           .ref_logp = ref.tensor,
                           .mask = mask.tensor,
                           .ratio = ratio.tensor,
                           .kl = kl.tensor}));
    REQUIRE(rlk::ratio_kl_bwd({.logp = logp.tensor,
                               .old_logp = old.tensor,
                               .ref_logp = ref.tensor,
                               .mask = mask.tensor,
                               .d_ratio = d_ratio.tensor,
                               .d_kl = d_kl.tensor,
                               .d_logp = d_logp.tensor}));
  };
  Floats ratio(n), kl(n), d_logp(n), ratio2(n), kl2(n), d_logp2(n);
  run(ratio, kl, d_logp);
  for (std::size_t i = 0; i < n; i += 3) logp.x[i] = kNan, old.x[i] = kInf, ref.x[i] = -kInf;
  run(ratio2, kl2, d_logp2);
  CHECK(ratio == ratio2);
  CHECK(kl == kl2);
  CHECK(d_logp == d_logp2);
  CHECK(ratio.x[0] == 1);
  CHECK(kl.x[3] == 0);
  CHECK(d_logp.x[6] == 0);
}

TEST_CASE("a group's advantages do not know the other groups, and bad offsets are refused") {
  std::mt19937 random(3);
  const Floats rewards(64, random, 0, 1);
  Floats all(64), one(16);
  std::vector<int32_t> offsets{0, 8, 24, 24, 64}, alone{0, 16};
  const auto of = [](std::vector<int32_t>& x) {
    return Tensor(x.data(), {static_cast<int64_t>(x.size())}, DType::i32);
  };
  const Tensor part(const_cast<float*>(rewards.x.data() + 8), {16}, DType::f32);
  REQUIRE(rlk::group_advantage(
      {.rewards = rewards.tensor, .group_offsets = of(offsets), .advantages = all.tensor}));
  REQUIRE(rlk::group_advantage({.rewards = part, .group_offsets = of(alone), .advantages = one.tensor}));
  CHECK(std::memcmp(all.x.data() + 8, one.x.data(), 16 * sizeof(float)) == 0);
  const auto refusal = [&](std::vector<int32_t> bad) {
    return std::string(
        rlk::group_advantage({.rewards = rewards.tensor, .group_offsets = of(bad), .advantages = all.tensor})
            .message());
  };
  CHECK(refusal({0, 9, 8, 64}) == "group_advantage: group_offsets[2] is 8, expected at least 9");
  CHECK(refusal({1, 64}) == "group_advantage: group_offsets[0] is 1, expected 0");
  CHECK(refusal({0, 65}) == "group_advantage: group_offsets[1] is 65, expected 64");
}
