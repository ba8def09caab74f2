// labels: conformance fibers
// quick: yes
// The portable GPU kernels of the loss ops, on fibers: the bits of the native backend, at both wave sizes and in any thread
// order.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "arithmetic/group_advantage/bind.hpp"
#include "arithmetic/policy_loss/bind.hpp"
#include "arithmetic/ratio_kl/bind.hpp"
#include "rlk/ops.hpp"
#include "simt/group_advantage/kernels.hpp"
#include "simt/policy_loss/kernels.hpp"
#include "simt/ratio_kl/kernels.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<int64_t>;

// A dense fp32 tensor that owns its numbers: 7f7f7f7f, or drawn.
struct Owned {
  std::vector<float> x;
  Tensor tensor;
  explicit Owned(const Shape& shape) {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    x.resize(static_cast<std::size_t>(n) + 1);
    forget();
    tensor = Tensor(x.data(), std::span(shape), DType::f32);
  }
  Owned(const Shape& shape, std::mt19937& random, float mean = 0, float deviation = 1) : Owned(shape) {
    std::normal_distribution<float> normal(mean, deviation);
    for (float& v : x) v = normal(random);
  }
  Owned(const Owned&) = delete;
  void forget() { std::memset(x.data(), 0x7f, 4 * x.size()); }
  bool is(const std::vector<float>& bits) const {
    return std::memcmp(x.data(), bits.data(), 4 * bits.size()) == 0;
  }
};

// launch() at every wave size and order leaves in `results` what native left there.
template <class Launch>
void same_on_fibers(const std::vector<Owned*>& results, const Launch& launch) {
  std::vector<std::vector<float>> expected;
  for (const Owned* r : results) expected.push_back(r->x);
  for (int wave : {32, 64})
    for (auto order :
         {rlk_fiber::Order::ascending, rlk_fiber::Order::descending, rlk_fiber::Order::shuffled}) {
      for (Owned* r : results) r->forget();
      rlk_fiber::wave_size = wave;
      rlk_fiber::order = order;
      launch();
      CAPTURE(wave);
      for (std::size_t i = 0; i < results.size(); ++i) CHECK(results[i]->is(expected[i]));
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

// 0 or 1 a token, and NaN, Inf where it is 0.
void mask_some(Owned& mask, std::initializer_list<Owned*> masked) {
  for (std::size_t i = 0; i < mask.x.size(); ++i) {
    mask.x[i] = mask.x[i] > -0.5f ? 1.0f : 0.0f;
    for (Owned* t : masked)
      if (mask.x[i] == 0) t->x[i] = i % 2 ? NAN : INFINITY;
  }
}

}  // namespace

TEST_CASE("ratio_kl and its gradient on fibers are native's bits, for every estimator") {
  using rlk::RatioKl;
  using rlk::RatioKlBwd;
  std::mt19937 random(5);
  for (const Shape& shape : {Shape{300}, Shape{3, 40}, Shape{0}})
    for (auto estimator : {RatioKl::Estimator::k1, RatioKl::Estimator::k2, RatioKl::Estimator::k3,
                           RatioKl::Estimator::k3_st}) {
      CAPTURE(static_cast<int>(estimator));
      Owned logp(shape, random, -2, 3), old(shape, random, -2, 3), ref(shape, random, -2, 3),
          mask(shape, random);
      const Owned d_ratio(shape, random), d_kl(shape, random);
      mask_some(mask, {&logp, &old, &ref});
      Owned ratio(shape), kl(shape), d_logp(shape);
      RatioKl a{.logp = logp.tensor,
                .old_logp = old.tensor,
                .ref_logp = ref.tensor,
                .mask = mask.tensor,
                .ratio = ratio.tensor,
                .kl = kl.tensor};
      RatioKlBwd b{.logp = logp.tensor,
                   .old_logp = old.tensor,
                   .ref_logp = ref.tensor,
                   .mask = mask.tensor,
                   .d_ratio = d_ratio.tensor,
                   .d_kl = d_kl.tensor,
                   .d_logp = d_logp.tensor};
      a.estimator = estimator;
      b.estimator = static_cast<RatioKlBwd::Estimator>(estimator);
      a.clamp = b.clamp = 4;
      REQUIRE(rlk::ratio_kl(a, {.backend = "native.tokens"}));
      REQUIRE(rlk::ratio_kl_bwd(b, {.backend = "native.tokens"}));
      same_on_fibers({&ratio, &kl},
                     [&] { rlk::simt::ratio_kl::launch_forward(rlk::loss32::problem_of(a), nullptr); });
      same_on_fibers({&d_logp},
                     [&] { rlk::simt::ratio_kl::launch_backward(rlk::loss32::problem_of(b), nullptr); });
    }
}

TEST_CASE("group_advantage on fibers is native's bits, and offsets that fall stay within the rewards") {
  std::mt19937 random(6);
  const Owned rewards({200}, random);
  Owned advantages({200});
  for (int center = 0; center < 3; ++center)
    for (int scale = 0; scale < 3; ++scale) {
      std::vector<int64_t> offsets{0};
      for (int g = 0; g < 70; ++g) offsets.push_back(std::min<int64_t>(200, offsets.back() + g % 6));
      offsets.push_back(200);
      const Tensor t(offsets.data(), {static_cast<int64_t>(offsets.size())}, DType::i64);
      rlk::GroupAdvantage a{.rewards = rewards.tensor, .group_offsets = t, .advantages = advantages.tensor};
      a.center = static_cast<rlk::GroupAdvantage::Center>(center);
      a.scale = static_cast<rlk::GroupAdvantage::Scale>(scale);
      REQUIRE(rlk::group_advantage(a));
      const auto launch = [&] { rlk::simt::group_advantage::launch(rlk::loss32::problem_of(a), nullptr); };
      same_on_fibers({&advantages}, launch);
      offsets[3] = 1 << 30, offsets[4] = -7;
      launch();
      CHECK(advantages.x.back() == std::bit_cast<float>(0x7f7f7f7f));
    }
}

TEST_CASE("policy_loss and its gradient on fibers are native's bits, for every form, level and weight") {
  using rlk::PolicyLoss;
  std::mt19937 random(9);
  const Shape shape{400};
  std::vector<int32_t> bounds{0, 130, 130, 131, 390};
  const Tensor cu(bounds.data(), {5}, DType::i32);
  for (int form = 0; form < 4; ++form)
    for (int mode = 0; mode < 4; ++mode)
      for (int level = 0; level < 2; ++level) {
        CAPTURE(form);
        CAPTURE(mode);
        CAPTURE(level);
        Owned logp(shape, random, -1, 0.5f), old(shape, random, -1, 0.5f), advantages(shape, random),
            rollout(shape, random, -1, 0.5f), ref(shape, random, -1, 0.5f), entropy(shape, random, 2),
            mask(shape, random);
        const Owned d_loss({1}, random);
        mask_some(mask, {&logp, &old, &advantages, &rollout, &ref, &entropy});
        Owned loss({1}), metrics({7}), totals({4, 5}), factor(shape), entropy_factor(shape), d_logp(shape),
            d_entropy(shape);
        PolicyLoss a{.logp = logp.tensor, .old_logp = old.tensor, .advantages = advantages.tensor};
        a.mask = mask.tensor, a.cu_seqlens = cu, a.rollout_logp = rollout.tensor, a.ref_logp = ref.tensor;
        a.entropy = entropy.tensor;
        a.loss = loss.tensor, a.metrics = metrics.tensor, a.totals = totals.tensor, a.factor = factor.tensor;
        a.entropy_factor = entropy_factor.tensor;
        a.form = static_cast<PolicyLoss::Form>(form), a.is_mode = static_cast<PolicyLoss::IsMode>(mode);
        a.level = static_cast<PolicyLoss::Level>(level),
        a.is_level = static_cast<PolicyLoss::IsLevel>(mode % 3);
        a.agg = static_cast<PolicyLoss::Agg>(form % 3), a.kl = static_cast<PolicyLoss::Kl>(1 + mode);
        a.kl_coef = 0.1, a.entropy_coef = 0.02, a.dual_clip = level ? 1.5 : 0, a.is_low = 0.6;
        REQUIRE(rlk::policy_loss(a, {.backend = "native.sequences"}));
        same_on_fibers({&loss, &metrics, &totals, &factor, &entropy_factor}, [&] {
          const rlk::loss32::PolicyProblem p = rlk::loss32::problem_of(a);
          std::vector<double> workspace(
              static_cast<std::size_t>(rlk::simt::policy_loss::workspace_bytes(p.sequences)) / 8 + 1, NAN);
          rlk::simt::policy_loss::launch_forward(p, workspace.data(), nullptr);
        });
        rlk::PolicyLossBwd b{.d_loss = d_loss.tensor,
                             .factor = factor.tensor,
                             .entropy_factor = entropy_factor.tensor,
                             .d_logp = d_logp.tensor,
                             .d_entropy = d_entropy.tensor};
        REQUIRE(rlk::policy_loss_bwd(b));
        same_on_fibers({&d_logp, &d_entropy},
                       [&] { rlk::simt::policy_loss::launch_backward(rlk::loss32::problem_of(b), nullptr); });
        rlk::LossReduce r{.totals = totals.tensor, .loss = loss.tensor};
        r.agg = static_cast<rlk::LossReduce::Agg>(form % 3), r.kl_coef = 0.1, r.entropy_coef = 0.02;
        const float before = loss.x[0];
        REQUIRE(rlk::loss_reduce(r));
        CHECK(loss.x[0] == before);
        same_on_fibers({&loss}, [&] {
          rlk::simt::policy_loss::launch_reduce(rlk::loss32::weighting_of(r), totals.x.data(), 4,
                                                loss.x.data(), nullptr, nullptr);
        });
      }
}

TEST_CASE(
    "policy_loss on fibers is native's bits, of more tokens and more sequences than a block adds at a time") {
  using rlk::PolicyLoss;
  std::mt19937 random(10);
  for (const Shape& shape : {Shape{2, 700}, Shape{300, 5}})
    for (int agg = 0; agg < 3; ++agg) {
      CAPTURE(shape[0]);
      CAPTURE(agg);
      Owned logp(shape, random, -1, 0.5f), old(shape, random, -1, 0.5f), advantages(shape, random),
          mask(shape, random);
      mask_some(mask, {&logp, &old});
      Owned loss({1}), metrics({7}), totals({shape[0], 5}), factor(shape);
      PolicyLoss a{.logp = logp.tensor, .old_logp = old.tensor, .advantages = advantages.tensor};
      a.mask = mask.tensor, a.agg = static_cast<PolicyLoss::Agg>(agg);
      a.loss = loss.tensor, a.metrics = metrics.tensor, a.totals = totals.tensor, a.factor = factor.tensor;
      REQUIRE(rlk::policy_loss(a, {.backend = "native.sequences"}));
      same_on_fibers({&loss, &metrics, &totals, &factor}, [&] {
        const rlk::loss32::PolicyProblem p = rlk::loss32::problem_of(a);
        std::vector<double> workspace(
            static_cast<std::size_t>(rlk::simt::policy_loss::workspace_bytes(p.sequences)) / 8 + 1, NAN);
        rlk::simt::policy_loss::launch_forward(p, workspace.data(), nullptr);
      });
    }
}
