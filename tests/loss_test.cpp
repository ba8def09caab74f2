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
  CHECK(refusal({0, 65}) == "group_advantage: group_offsets[1] is 65, expected at most 64");
}

namespace {

// A packed batch of four sequences, one of them empty and one without an active token, with everything a loss may take.
struct Batch {
  std::vector<int64_t> bounds{0, 9, 9, 40, 45, 70};
  Floats logp, old, advantages, rollout, ref, entropy, mask;
  explicit Batch(std::mt19937& random)
      : logp(70, random, -1, 0.3f),
        old(70, random, -1, 0.3f),
        advantages(70, random, 0.5f, 1),
        rollout(70, random, -1, 0.3f),
        ref(70, random, -1, 0.3f),
        entropy(70, random, 2, 0.3f),
        mask(70, random, 0, 1) {
    for (std::size_t i = 0; i < 70; ++i) mask.x[i] = (i < 40 || i >= 45) && mask.x[i] > -1 ? 1.0f : 0.0f;
  }
};

struct Losses {
  Floats loss{1}, metrics{7}, totals, factor, entropy_factor;
  Losses(std::size_t sequences, std::size_t tokens)
      : totals(5 * sequences), factor(tokens), entropy_factor(tokens) {}
  bool operator==(const Losses& o) const {
    return loss == o.loss && metrics == o.metrics && totals == o.totals && factor == o.factor &&
           entropy_factor == o.entropy_factor;
  }
};

rlk::PolicyLoss with_options(rlk::PolicyLoss a) {
  a.kl = rlk::PolicyLoss::Kl::k3, a.kl_coef = 0.05, a.entropy_coef = 0.01;
  return a;
}

// The loss of sequences [from, to), or what the call was refused with.
rlk::Status loss_of(const Batch& in, std::size_t from, std::size_t to, Losses& out, rlk::PolicyLoss options,
                    const Tensor* denominator = nullptr) {
  std::vector<int64_t> bounds(in.bounds.begin() + static_cast<std::ptrdiff_t>(from),
                              in.bounds.begin() + static_cast<std::ptrdiff_t>(to) + 1);
  const int64_t first = bounds[0], n = static_cast<int64_t>(out.factor.x.size());
  for (int64_t& b : bounds) b -= first;
  const auto part = [&](const Floats& f) {
    return Tensor(const_cast<float*>(f.x.data()) + first, {n}, DType::f32);
  };
  const Tensor logp = part(in.logp), old = part(in.old), advantages = part(in.advantages),
               rollout = part(in.rollout), ref = part(in.ref), entropy = part(in.entropy),
               mask = part(in.mask), cu(bounds.data(), {static_cast<int64_t>(bounds.size())}, DType::i64),
               totals(out.totals.x.data(), {static_cast<int64_t>(to - from), 5}, DType::f32);
  rlk::PolicyLoss a = with_options(options);
  a.logp = logp, a.old_logp = old, a.advantages = advantages, a.rollout_logp = rollout, a.ref_logp = ref;
  a.entropy = entropy, a.mask = mask, a.cu_seqlens = cu;
  if (denominator) a.denominator = *denominator;
  a.loss = out.loss.tensor, a.metrics = out.metrics.tensor, a.totals = totals, a.factor = out.factor.tensor;
  a.entropy_factor = out.entropy_factor.tensor;
  return rlk::policy_loss(a);
}

bool same(const float* a, const float* b, std::size_t n) { return std::memcmp(a, b, 4 * n) == 0; }

}  // namespace

TEST_CASE(
    "with the global denominator, micro-batches have the totals, factors and loss of one call; with their "
    "own, not") {
  using rlk::PolicyLoss;
  std::mt19937 random(11);
  const Batch batch(random);
  for (auto agg : {PolicyLoss::Agg::token_mean, PolicyLoss::Agg::seq_mean_token_mean,
                   PolicyLoss::Agg::seq_mean_token_sum}) {
    CAPTURE(static_cast<int>(agg));
    PolicyLoss options{};
    options.agg = agg;
    Losses all(5, 70), left(3, 40), right(2, 30), own(2, 30);
    REQUIRE(loss_of(batch, 0, 5, all, options));
    const bool tokens = agg == PolicyLoss::Agg::token_mean;
    CHECK(all.metrics.x[5] == 3);
    int64_t count = static_cast<int64_t>(all.metrics.x[tokens ? 3 : 5]);
    const Tensor global(&count, {1}, DType::i64);
    REQUIRE(loss_of(batch, 0, 3, left, options, &global));
    REQUIRE(loss_of(batch, 3, 5, right, options, &global));
    REQUIRE(loss_of(batch, 3, 5, own, options));
    CHECK(same(all.totals.x.data(), left.totals.x.data(), 15));
    CHECK(same(all.totals.x.data() + 15, right.totals.x.data(), 10));
    CHECK(same(all.factor.x.data(), left.factor.x.data(), 40));
    CHECK(same(all.factor.x.data() + 40, right.factor.x.data(), 30));
    CHECK(same(all.entropy_factor.x.data() + 40, right.entropy_factor.x.data(), 30));
    CHECK(same(right.totals.x.data(), own.totals.x.data(), 10));
    CHECK(!same(right.factor.x.data() + 5, own.factor.x.data() + 5, 25));
    CHECK(std::fabs(left.loss.x[0] + right.loss.x[0] - all.loss.x[0]) < 1e-6f);
    CHECK(std::fabs(left.loss.x[0] + own.loss.x[0] - all.loss.x[0]) > 1e-2f);

    std::vector<float> gathered = left.totals.x;
    gathered.insert(gathered.end(), right.totals.x.begin(), right.totals.x.end());
    Floats loss(1), metrics(6);
    rlk::LossReduce r{.totals = {}, .loss = loss.tensor, .metrics = metrics.tensor};
    const Tensor totals(gathered.data(), {5, 5}, DType::f32);
    r.totals = totals, r.agg = static_cast<rlk::LossReduce::Agg>(agg), r.kl_coef = 0.05,
    r.entropy_coef = 0.01;
    REQUIRE(rlk::loss_reduce(r));
    CHECK(loss == all.loss);
    CHECK(same(metrics.x.data(), all.metrics.x.data(), 6));
  }
}

TEST_CASE("masked tokens, sequences of none and tokens of no sequence reach no loss and have no gradient") {
  using rlk::PolicyLoss;
  std::mt19937 random(12);
  for (auto form : {PolicyLoss::Form::clip, PolicyLoss::Form::cispo, PolicyLoss::Form::reinforce,
                    PolicyLoss::Form::soft_gate})
    for (auto mode : {PolicyLoss::IsMode::none, PolicyLoss::IsMode::truncate, PolicyLoss::IsMode::mask,
                      PolicyLoss::IsMode::zero})
      for (auto level : {PolicyLoss::Level::token, PolicyLoss::Level::sequence}) {
        CAPTURE(static_cast<int>(form));
        CAPTURE(static_cast<int>(mode));
        Batch batch(random);
        PolicyLoss options{};
        options.form = form, options.is_mode = mode, options.level = level;
        options.is_level =
            level == PolicyLoss::Level::token ? PolicyLoss::IsLevel::token : PolicyLoss::IsLevel::geometric;
        options.agg = PolicyLoss::Agg::seq_mean_token_mean;
        batch.bounds = {0, 9, 9, 40, 45, 66};  // four tokens belong to nobody
        Losses before(5, 70), after(5, 70);
        REQUIRE(loss_of(batch, 0, 5, before, options));
        for (std::size_t i = 0; i < 70; ++i) {
          if (i < 66 && batch.mask.x[i] != 0) continue;
          for (Floats* f :
               {&batch.logp, &batch.old, &batch.advantages, &batch.rollout, &batch.ref, &batch.entropy})
            f->x[i] = i % 3 == 0 ? kNan : i % 3 == 1 ? kInf : -kInf;
          CHECK(before.factor.x[i] == 0);
          CHECK(before.entropy_factor.x[i] == 0);
        }
        REQUIRE(loss_of(batch, 0, 5, after, options));
        CHECK(before == after);
        CHECK(std::isfinite(after.loss.x[0]));
        CHECK(same(after.totals.x.data() + 5, std::vector<float>(5).data(), 5));   // empty
        CHECK(same(after.totals.x.data() + 15, std::vector<float>(5).data(), 5));  // nobody in
        CHECK(after.metrics.x[5] == 3);
      }
}

TEST_CASE("tokens that leave by their weight leave the denominator, those of weight 0 stay in it") {
  using rlk::PolicyLoss;
  std::mt19937 random(13);
  const Batch batch(random);
  PolicyLoss options{};
  Losses none(5, 70), masked(5, 70), zero(5, 70);
  REQUIRE(loss_of(batch, 0, 5, none, options));
  options.is_low = 0.8, options.is_high = 1.2;
  options.is_mode = PolicyLoss::IsMode::mask;
  REQUIRE(loss_of(batch, 0, 5, masked, options));
  options.is_mode = PolicyLoss::IsMode::zero;
  REQUIRE(loss_of(batch, 0, 5, zero, options));
  CHECK(zero.metrics.x[3] == none.metrics.x[3]);
  CHECK(masked.metrics.x[3] < none.metrics.x[3]);
  for (std::size_t q = 0; q < 25; q += 5) {
    CHECK(masked.totals.x[q] == zero.totals.x[q]);          // policy
    CHECK(masked.totals.x[q + 1] <= zero.totals.x[q + 1]);  // kl of those that stay
  }
}

TEST_CASE("an active -inf is counted and contributes by the clamp") {
  std::mt19937 random(14);
  Batch batch(random);
  batch.logp.x[0] = -kInf, batch.mask.x[0] = 1;
  batch.old.x[50] = -kInf, batch.mask.x[50] = 1;
  batch.logp.x[41] = -kInf;  // nobody is there
  Losses out(5, 70);
  for (auto form : {rlk::PolicyLoss::Form::clip, rlk::PolicyLoss::Form::cispo}) {
    rlk::PolicyLoss options{};
    options.form = form;
    REQUIRE(loss_of(batch, 0, 5, out, options));
    CHECK(out.metrics.x[6] == 2);
    CHECK(std::isfinite(out.loss.x[0]));
    CHECK(out.factor.x[0] == 0);
  }
}

TEST_CASE("a denominator of 0, given or counted, makes loss and gradients 0") {
  std::mt19937 random(15);
  Batch batch(random);
  Losses out(5, 70);
  float zero = 0;
  const Tensor given(&zero, {1}, DType::f32);
  REQUIRE(loss_of(batch, 0, 5, out, {}, &given));
  CHECK(out.loss.x[0] == 0);
  CHECK(out.totals.x[3] > 0);
  CHECK(out.factor == Floats(std::vector<float>(70)));
  for (float& m : batch.mask.x) m = 0;
  REQUIRE(loss_of(batch, 0, 5, out, {}));
  CHECK(out.loss.x[0] == 0);
  CHECK(out.totals == Floats(std::vector<float>(25)));
  CHECK(out.entropy_factor == Floats(std::vector<float>(70)));
}

TEST_CASE("a padded batch has the totals and factors of the packed one") {
  std::mt19937 random(16);
  const Floats logp(60, random, -1, 0.3f), old(60, random, -1, 0.3f), advantages(3, random, 0, 1);
  std::vector<int32_t> bounds{0, 20, 40, 60};
  const Tensor cu(bounds.data(), {4}, DType::i32);
  const auto padded = [](const Floats& f) {
    return Tensor(const_cast<float*>(f.x.data()), {3, 20}, DType::f32);
  };
  Losses a(3, 60), b(3, 60);
  const auto totals = [](Losses& l) { return Tensor(l.totals.x.data(), {3, 5}, DType::f32); };
  const Tensor totals_a = totals(a), totals_b = totals(b), logp_b = padded(logp), old_b = padded(old),
               factor_b = padded(b.factor);
  rlk::PolicyLoss packed{.logp = logp.tensor, .old_logp = old.tensor, .advantages = advantages.tensor};
  packed.advantages_per = rlk::PolicyLoss::AdvantagesPer::sequence;
  rlk::PolicyLoss rows = packed;
  packed.cu_seqlens = cu, packed.loss = a.loss.tensor, packed.totals = totals_a,
  packed.factor = a.factor.tensor;
  rows.logp = logp_b, rows.old_logp = old_b, rows.loss = b.loss.tensor, rows.totals = totals_b,
  rows.factor = factor_b;
  REQUIRE(rlk::policy_loss(packed));
  REQUIRE(rlk::policy_loss(rows));
  CHECK(a.loss == b.loss);
  CHECK(a.totals == b.totals);
  CHECK(a.factor == b.factor);
}

TEST_CASE("what does not fit is refused by name, with both values") {
  std::mt19937 random(17);
  Batch batch(random);
  Losses out(5, 70);
  const auto refusal = [&](const rlk::PolicyLoss& options) {
    return std::string(loss_of(batch, 0, 5, out, options).message());
  };
  rlk::PolicyLoss a{};
  a.dual_clip = 0.5;
  CHECK(refusal(a) == "policy_loss: dual_clip is 0.5, it must be 0 or at least 1");
  a = {}, a.agg = rlk::PolicyLoss::Agg::constant;
  CHECK(refusal(a) == "policy_loss: agg is constant, denominator is absent");
  a = {}, a.is_low = 3;
  CHECK(refusal(a) == "policy_loss: is_low is 3, is_high is 2");
  a = {}, a.advantages_per = rlk::PolicyLoss::AdvantagesPer::sequence;
  CHECK(refusal(a) ==
        "policy_loss: advantages_per is sequence, advantages has rank 1 and size 70, expected [5]");
  batch.bounds[2] = 3;
  CHECK(refusal({}) == "policy_loss: cu_seqlens[2] is 3, expected at least 9");
  batch.bounds = {0, 9, 9, 40, 45, 71};
  CHECK(refusal({}) == "policy_loss: cu_seqlens[5] is 71, expected at most 70");
}
