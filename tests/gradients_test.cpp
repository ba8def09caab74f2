// labels: conformance
// The gradients of linear and of the row ops in fp64, as golden defines them, are the slopes of their forward: differences of the
// forward's fp64 results at points h apart, extrapolated to h = 0.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<int64_t>;

struct Numbers {
  Shape shape;
  std::vector<double> x;
  Tensor f64;
  Numbers(Shape s, std::mt19937& random, double deviation = 1) : shape(std::move(s)) {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    std::normal_distribution<double> normal(0, deviation);
    x.resize(static_cast<std::size_t>(n));
    for (double& v : x) v = normal(random);
    f64 = Tensor(x.data(), std::span(shape), DType::f64);
  }
  Numbers(Shape s, std::vector<double> numbers) : shape(std::move(s)), x(std::move(numbers)) {
    f64 = Tensor(x.data(), std::span(shape), DType::f64);
  }
  Numbers(const Numbers&) = delete;
};

template <class Args>
void reference(const Args& a) {
  REQUIRE(rlk::registry::find(Args::kName)->reference(reinterpret_cast<const rlk_slot*>(&a), nullptr) ==
          RLK_OK);
}

// d (sum of weights * result) / dx, element by element, against `gradient`.
void is_slope(const char* name, Numbers& x, const Numbers& gradient, const std::function<double()>& loss) {
  CAPTURE(name);
  for (std::size_t i = 0; i < x.x.size(); ++i) {
    const double at = x.x[i];
    const auto slope = [&](double h) {
      x.x[i] = at + h;
      const double up = loss();
      x.x[i] = at - h;
      const double down = loss();
      x.x[i] = at;
      return (up - down) / (2 * h);
    };
    const double h = 0x1p-8, slopes[] = {slope(h), slope(h / 2)};
    const double extrapolated = (4 * slopes[1] - slopes[0]) / 3;
    CHECK(std::fabs(extrapolated - gradient.x[i]) < 3e-7 * std::max(1.0, std::fabs(gradient.x[i])));
  }
}

double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.x.size(); ++i) sum += a.x[i] * b.x[i];
  return sum;
}

}  // namespace

TEST_CASE("rms_norm_bwd is the slope of rms_norm, with residual, gate and offset") {
  std::mt19937 random(3);
  const Shape shape{3, 7}, width{7};
  for (int form = 0; form < 4; ++form) {
    CAPTURE(form);
    Numbers x(shape, random), residual(shape, random), weight(width, random), gate(shape, random, 2);
    Numbers y(shape, random), sum(shape, random), d_y(shape, random), d_sum(shape, random);
    Numbers d_x(shape, random), d_residual(shape, random), d_weight(width, random), d_gate(shape, random);
    rlk::RmsNorm f{.x = x.f64, .weight = weight.f64, .residual = residual.f64, .y = y.f64, .sum = sum.f64};
    f.eps = 1e-3;
    rlk::RmsNormBwd b{.d_y = d_y.f64,
                      .x = sum.f64,
                      .weight = weight.f64,
                      .d_sum = d_sum.f64,
                      .d_x = d_x.f64,
                      .d_residual = d_residual.f64,
                      .d_weight = d_weight.f64};
    b.eps = 1e-3;
    if (form == 2) b.x = x.f64, b.residual = residual.f64;
    if (form == 3) b.x = x.f64, b.residual = residual.f64, b.sum = sum.f64;
    if (form == 1) f.weight_offset = true, b.weight_offset = true;
    if (form >= 1) f.gate = gate.f64, b.gate = gate.f64, b.d_gate = d_gate.f64;
    if (form == 2) {
      f.gate_act = rlk::RmsNorm::GateAct::sigmoid;
      b.gate_act = rlk::RmsNormBwd::GateAct::sigmoid;
    }
    const auto loss = [&] {
      reference(f);
      return dot(y, d_y) + dot(sum, d_sum);
    };
    loss();
    reference(b);
    is_slope("x", x, d_x, loss);
    is_slope("residual", residual, d_residual, loss);
    is_slope("weight", weight, d_weight, loss);
    if (form >= 1) is_slope("gate", gate, d_gate, loss);
  }
}

TEST_CASE("swiglu_bwd is the slope of swiglu, for every activation") {
  using rlk::Swiglu;
  std::mt19937 random(4);
  const Shape shape{4, 9};
  for (auto act : {Swiglu::Act::silu, Swiglu::Act::gelu_tanh, Swiglu::Act::silu_clamped}) {
    CAPTURE(static_cast<int>(act));
    Numbers gate(shape, random, 2), up(shape, random, 2), out(shape, random), d_out(shape, random);
    Numbers d_gate(shape, random), d_up(shape, random);
    Swiglu f{.gate = gate.f64, .up = up.f64, .out = out.f64};
    rlk::SwigluBwd b{
        .d_out = d_out.f64, .gate = gate.f64, .up = up.f64, .d_gate = d_gate.f64, .d_up = d_up.f64};
    f.act = b.act = act;
    f.limit = b.limit = 2.5;  // some are held
    const auto loss = [&] {
      reference(f);
      return dot(out, d_out);
    };
    reference(b);
    is_slope("gate", gate, d_gate, loss);
    is_slope("up", up, d_up, loss);
  }
}

TEST_CASE("short_conv_bwd is the slope of short_conv, of its state too") {
  std::mt19937 random(6);
  for (int64_t taps : {2, 3, 4}) {
    CAPTURE(taps);
    const Shape shape{2, 5, 3}, state{2, taps - 1, 3}, filter{3, taps}, width{3};
    Numbers x(shape, random), weight(filter, random), bias(width, random), start(state, random);
    Numbers y(shape, random), end(state, random), d_y(shape, random), d_end(state, random);
    Numbers d_x(shape, random), d_weight(filter, random), d_bias(width, random), d_start(state, random);
    const auto loss = [&] {
      reference(rlk::ShortConv{.x = x.f64,
                               .weight = weight.f64,
                               .bias = bias.f64,
                               .initial_state = start.f64,
                               .y = y.f64,
                               .final_state = end.f64});
      return dot(y, d_y) + dot(end, d_end);
    };
    reference(rlk::ShortConvBwd{.x = x.f64,
                                .weight = weight.f64,
                                .bias = bias.f64,
                                .initial_state = start.f64,
                                .d_y = d_y.f64,
                                .d_final_state = d_end.f64,
                                .d_x = d_x.f64,
                                .d_weight = d_weight.f64,
                                .d_bias = d_bias.f64,
                                .d_initial_state = d_start.f64});
    is_slope("x", x, d_x, loss);
    is_slope("weight", weight, d_weight, loss);
    is_slope("bias", bias, d_bias, loss);
    is_slope("initial_state", start, d_start, loss);
  }
}

TEST_CASE("ratio_kl_bwd is the slope of ratio_kl, for every estimator that has one") {
  using rlk::RatioKl;
  std::mt19937 random(9);  // none lies within h of a limit
  const Shape shape{16};
  for (auto estimator : {RatioKl::Estimator::k1, RatioKl::Estimator::k2, RatioKl::Estimator::k3}) {
    CAPTURE(static_cast<int>(estimator));
    Numbers logp(shape, random), old(shape, random), ref(shape, random), mask(shape, random);
    Numbers ratio(shape, random), kl(shape, random), d_ratio(shape, random), d_kl(shape, random);
    Numbers d_logp(shape, random);
    for (double& m : mask.x) m = m > -0.7;
    RatioKl f{.logp = logp.f64,
              .old_logp = old.f64,
              .ref_logp = ref.f64,
              .mask = mask.f64,
              .ratio = ratio.f64,
              .kl = kl.f64};
    rlk::RatioKlBwd b{.logp = logp.f64,
                      .old_logp = old.f64,
                      .ref_logp = ref.f64,
                      .mask = mask.f64,
                      .d_ratio = d_ratio.f64,
                      .d_kl = d_kl.f64,
                      .d_logp = d_logp.f64};
    f.estimator = estimator, b.estimator = static_cast<rlk::RatioKlBwd::Estimator>(estimator);
    f.clamp = b.clamp = 1.5, f.d_clamp = b.d_clamp = 1.75, f.kl_clamp = b.kl_clamp = 1.25;  // some are held
    reference(b);
    is_slope("logp", logp, d_logp, [&] {
      reference(f);
      return dot(ratio, d_ratio) + dot(kl, d_kl);
    });
  }
}

TEST_CASE("linear_bwd is the slope of linear, with bias and residual") {
  std::mt19937 random(5);
  constexpr int64_t m = 3, k = 7, n = 5;
  Numbers x({m, k}, random), weight({n, k}, random), bias({n}, random), residual({m, n}, random),
      y({m, n}, random);
  Numbers d_y({m, n}, random), d_x({m, k}, random), d_weight({n, k}, random), d_bias({n}, random),
      d_residual({m, n}, random);
  const rlk::Linear f{
      .x = x.f64, .weight = weight.f64, .bias = bias.f64, .residual = residual.f64, .y = y.f64};
  const rlk::LinearBwd b{.d_y = d_y.f64,
                         .x = x.f64,
                         .weight = weight.f64,
                         .d_x = d_x.f64,
                         .d_weight = d_weight.f64,
                         .d_bias = d_bias.f64,
                         .d_residual = d_residual.f64};
  const auto loss = [&] {
    reference(f);
    return dot(y, d_y);
  };
  reference(b);
  is_slope("x", x, d_x, loss);
  is_slope("weight", weight, d_weight, loss);
  is_slope("bias", bias, d_bias, loss);
  is_slope("residual", residual, d_residual, loss);
}

TEST_CASE("embedding_bwd is the slope of embedding, with a scale and ids that repeat") {
  std::mt19937 random(6);
  std::vector<int64_t> ids{2, 0, 2, 5, -1, 2};
  const Tensor t(ids.data(), {6}, DType::i64);
  Numbers weight({4, 3}, random), out({6, 3}, random), d_out({6, 3}, random), d_weight({4, 3}, random);
  rlk::Embedding f{.ids = t, .weight = weight.f64, .out = out.f64};
  rlk::EmbeddingBwd b{.ids = t, .d_out = d_out.f64, .weight = weight.f64, .d_weight = d_weight.f64};
  f.scale = b.scale = 1.5;
  reference(b);
  is_slope("weight", weight, d_weight, [&] {
    reference(f);
    return dot(out, d_out);
  });
}

namespace {

// A packed batch of policy_loss in fp64, and what the reference makes of it.
struct Policy {
  Shape shape{14};
  std::vector<int64_t> bounds{0, 5, 5, 14};
  Tensor cu{bounds.data(), {4}, DType::i64};
  Numbers logp, old, advantages, rollout, ref, entropy, mask, loss, totals, factor, entropy_factor;
  rlk::PolicyLoss a;
  explicit Policy(std::mt19937& random)
      : logp(shape, random, 0.3),
        old(shape, random, 0.3),
        advantages({3}, random),
        rollout(shape, random, 0.3),
        ref(shape, random, 0.3),
        entropy(shape, random),
        mask(shape, random),
        loss({1}, random),
        totals({3, 5}, random),
        factor(shape, random),
        entropy_factor(shape, random) {
    for (double& m : mask.x) m = m > -1;
    a.logp = logp.f64, a.old_logp = old.f64, a.advantages = advantages.f64, a.mask = mask.f64,
    a.cu_seqlens = cu;
    a.rollout_logp = rollout.f64, a.ref_logp = ref.f64, a.entropy = entropy.f64;
    a.loss = loss.f64, a.totals = totals.f64, a.factor = factor.f64, a.entropy_factor = entropy_factor.f64;
    a.advantages_per = rlk::PolicyLoss::AdvantagesPer::sequence;
    a.kl_coef = 0.1, a.entropy_coef = 0.05;
  }
  double value() {
    reference(a);
    return loss.x[0];
  }
};

}  // namespace

TEST_CASE("policy_loss's factors are the slopes of its loss, at both levels and in every aggregation") {
  using rlk::PolicyLoss;
  std::mt19937 random(18);
  for (auto form : {PolicyLoss::Form::clip, PolicyLoss::Form::reinforce, PolicyLoss::Form::soft_gate})
    for (int agg = 0; agg < 3; ++agg)
      for (auto level : {PolicyLoss::Level::token, PolicyLoss::Level::sequence}) {
        CAPTURE(static_cast<int>(form));
        CAPTURE(agg);
        CAPTURE(static_cast<int>(level));
        Policy p(random);
        p.a.form = form, p.a.agg = static_cast<PolicyLoss::Agg>(agg), p.a.level = level;
        p.a.kl = PolicyLoss::Kl::k3, p.a.is_mode = PolicyLoss::IsMode::truncate;
        // A ratio of the sequence moves all its terms alike where they weigh alike.
        if (level == PolicyLoss::Level::sequence) p.a.is_level = PolicyLoss::IsLevel::geometric;
        // Nothing near a border: differences do not see across one.
        p.a.clip_low = 0.9, p.a.clip_high = 9;
        p.value();
        std::vector<double> kept = p.factor.x;
        is_slope("logp", p.logp, Numbers(p.shape, kept), [&] { return p.value(); });
        kept = p.entropy_factor.x;
        is_slope("entropy", p.entropy, Numbers(p.shape, kept), [&] { return p.value(); });
      }
}

TEST_CASE("a term that is clipped has no slope, and cispo's is that of logp alone") {
  using rlk::PolicyLoss;
  std::mt19937 random(19);
  Policy p(random);
  for (std::size_t i = 0; i < p.logp.x.size(); ++i) p.logp.x[i] = p.old.x[i] + (i % 2 ? 0.7 : -0.7);
  p.a.kl_coef = 0;
  p.value();
  for (std::size_t i = 0; i < p.logp.x.size(); ++i) {
    const double advantage = p.advantages.x[i < 5 ? 0 : 2];
    const bool clipped = p.mask.x[i] == 0 || (i % 2 ? advantage > 0 : advantage < 0);
    CHECK((p.factor.x[i] == 0) == clipped);
  }
  // Ratios stay as they are where old_logp moves with logp.
  p.a.form = PolicyLoss::Form::cispo;
  p.value();
  const std::vector<double> kept = p.factor.x, old = p.old.x, logp = p.logp.x;
  is_slope("logp", p.logp, Numbers(p.shape, kept), [&] {
    for (std::size_t i = 0; i < old.size(); ++i) p.old.x[i] = old[i] + (p.logp.x[i] - logp[i]);
    return p.value();
  });
}

TEST_CASE("logp_bwd is the slope of logp and of entropy, with temperatures, softcap and a mask") {
  std::mt19937 random(6);
  const Shape shape{4, 19}, rows{4};
  std::vector<std::int64_t> targets{3, -100, 18, 0};
  std::vector<std::int32_t> bits{0x5ffff, 0x7ffff, 0x6abcd, 0x0ffff};
  const Tensor target(targets.data(), {4}, DType::i64), keep(bits.data(), {4, 1}, DType::i32);
  std::vector<float> degrees{0.5f, 1.0f, 1.5f, 3.0f};
  const Tensor temperatures(degrees.data(), {4}, DType::f32);
  for (int form = 0; form < 3; ++form) {
    CAPTURE(form);
    Numbers logits(shape, random, 2), logp(rows, random), entropy(rows, random), d_logits(shape, random);
    Numbers d_logp(rows, random), d_entropy(rows, random);
    rlk::Logp f{.logits = logits.f64, .target = target, .logp = logp.f64, .entropy = entropy.f64};
    rlk::LogpBwd b{.logits = logits.f64,
                   .target = target,
                   .d_logp = d_logp.f64,
                   .d_entropy = d_entropy.f64,
                   .d_logits = d_logits.f64};
    if (form >= 1) f.temperatures = b.temperatures = temperatures, f.softcap = b.softcap = 3;
    if (form == 2) f.keep = b.keep = keep;
    reference(b);
    is_slope("logits", logits, d_logits, [&] {
      reference(f);
      return dot(logp, d_logp) + dot(entropy, d_entropy);
    });
  }
}

TEST_CASE("linear_logp_bwd is the slope of linear_logp, with bias, temperatures, softcap and a mask") {
  std::mt19937 random(7);
  constexpr int64_t n = 3, k = 6, v = 11;
  std::vector<std::int64_t> targets{3, -100, 10};
  std::vector<std::int32_t> bits{0x5fd, 0x7ff, 0x7bf};
  const Tensor target(targets.data(), {n}, DType::i64), keep(bits.data(), {n, 1}, DType::i32);
  std::vector<float> degrees{0.5f, 1.0f, 1.5f};
  const Tensor temperatures(degrees.data(), {n}, DType::f32);
  for (int form = 0; form < 2; ++form) {
    CAPTURE(form);
    Numbers hidden({n, k}, random), weight({v, k}, random), bias({v}, random), logp({n}, random),
        entropy({n}, random);
    Numbers d_hidden({n, k}, random), d_weight({v, k}, random), d_bias({v}, random), d_logp({n}, random),
        d_entropy({n}, random);
    rlk::LinearLogp f{.hidden = hidden.f64,
                      .weight = weight.f64,
                      .bias = bias.f64,
                      .target = target,
                      .logp = logp.f64,
                      .entropy = entropy.f64};
    rlk::LinearLogpBwd b{.hidden = hidden.f64,
                         .weight = weight.f64,
                         .bias = bias.f64,
                         .target = target,
                         .d_logp = d_logp.f64,
                         .d_entropy = d_entropy.f64,
                         .d_hidden = d_hidden.f64,
                         .d_weight = d_weight.f64,
                         .d_bias = d_bias.f64};
    if (form == 1) {
      f.temperatures = b.temperatures = temperatures, f.keep = b.keep = keep;
      f.softcap = b.softcap = 3;
    }
    const auto loss = [&] {
      reference(f);
      return dot(logp, d_logp) + dot(entropy, d_entropy);
    };
    reference(b);
    is_slope("hidden", hidden, d_hidden, loss);
    is_slope("weight", weight, d_weight, loss);
    is_slope("bias", bias, d_bias, loss);
  }
}

TEST_CASE(
    "attention_bwd is the slope of attention and of its lse, with groups, sinks, windows and a softcap") {
  std::mt19937 random(20);
  constexpr int64_t n = 2, queries = 3, keys = 5, heads = 2, d = 16, dv = 16;
  const Shape rows{n, queries, heads, d}, values{n, queries, heads, dv}, each{n, queries, heads};
  for (int form = 0; form < 4; ++form) {
    CAPTURE(form);
    const int64_t kv_heads = form == 3 ? 2 : 1;
    Numbers q(rows, random), k({n, keys, kv_heads, d}, random), v({n, keys, kv_heads, dv}, random);
    Numbers out(values, random), lse(each, random), d_out(values, random), d_lse(each, random);
    Numbers d_q(rows, random), d_k(k.shape, random), d_v(v.shape, random), d_sinks({heads}, random);
    std::vector<float> single{-0.5f, 1.0f};
    std::vector<int64_t> lengths{keys, 4};
    const Tensor sinks(single.data(), {heads}, DType::f32), kv_len(lengths.data(), {n}, DType::i64);
    rlk::Attention f{.q = q.f64, .k = k.f64, .v = v.f64, .kv_len = kv_len, .out = out.f64, .lse = lse.f64};
    rlk::AttentionBwd b{.q = q.f64, .k = k.f64, .v = v.f64, .kv_len = kv_len};
    b.out = out.f64, b.lse = lse.f64, b.d_out = d_out.f64, b.d_lse = d_lse.f64;
    b.d_q = d_q.f64, b.d_k = d_k.f64, b.d_v = d_v.f64;
    if (form >= 1) f.sinks = b.sinks = sinks, b.d_sinks = d_sinks.f64;
    if (form == 1) f.window = b.window = 2;
    if (form == 2) f.causal = b.causal = false, f.softcap = b.softcap = 1.5, f.scale = b.scale = 0.4;
    const auto loss = [&] {
      reference(f);
      return dot(out, d_out) + dot(lse, d_lse);
    };
    loss();
    reference(b);
    is_slope("q", q, d_q, loss);
    is_slope("k", k, d_k, loss);
    is_slope("v", v, d_v, loss);
    for (std::size_t h = 0; form >= 1 && h < single.size(); ++h) {
      const float at = single[h];
      single[h] = at + 0x1p-6f;
      const double up = loss();
      single[h] = at - 0x1p-6f;
      const double down = loss();
      single[h] = at;
      CHECK(std::fabs((up - down) / 0x1p-5 - d_sinks.x[h]) < 2e-4);
    }
  }
}
