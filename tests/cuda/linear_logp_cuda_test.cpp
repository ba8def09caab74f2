// labels: plugins gpu
// links: registry
// linear_logp on Hopper by the special function units' exponential: the bits of the CPU replay for drawn shapes and options, and
// of the ops that it is made of for whole vocabularies.
#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <string>

#include "array.hpp"

namespace {

using cuda_test::Array;
using cuda_test::check;
using cuda_test::hopper;
using cuda_test::Memory;
using cuda_test::one_of;
using cuda_test::ran;
using rlk::DType;
using rlk::LinearLogp;
using rlk::LinearLogpBwd;
using rlk::Tensor;

constexpr std::size_t kWorkspace = std::size_t{1} << 30;
const Memory& workspace() {
  static const Memory memory(kWorkspace);
  return memory;
}
rlk::Options on_gpu(const char* arithmetic) {
  return {.backend = "cuda",
          .arithmetic = arithmetic,
          .workspace = workspace().data(),
          .workspace_bytes = kWorkspace};
}
constexpr const char *kForward = "sm90/t25k16/ex2/lse2048/l8",
                     *kBackward = "sm90/t25k16/ex2/lse2048/l8/tree8";
const rlk::Options kReplay{.backend = "native.replay_sm90_ex2"};

// The tensors of a call and of its gradients; those that are absent have no shape.
struct Held {
  int64_t rows, vocab;
  DType wide;
  Array hidden, weight, bias, target, temperatures, keep, d_logp, d_entropy;
  Array logp, lse, entropy, stats, bad, d_hidden, d_weight, d_bias;
  double softcap;

  Held(int64_t n, int64_t k, int64_t v, int64_t padding, DType t, DType logits, std::mt19937& random)
      : rows(n),
        vocab(v),
        wide(logits),
        hidden({n, k}, t),
        weight({v + padding, k}, t),
        d_logp({n}, DType::f32),
        logp({n}, DType::f32),
        lse({n}, DType::f32),
        stats({n, 4}, DType::f32),
        bad({1}, DType::i32),
        d_hidden({n, k}, t),
        d_weight({v + padding, k}, t),
        softcap(random() % 4 == 0 ? 20 : 0) {
    for (Array* a : {&hidden, &weight, &d_logp}) a->draw(random);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; ++i) {
      const auto any = static_cast<int32_t>(random() % static_cast<unsigned>(v));
      ids.push_back(one_of<int32_t>(random, {any, any, any, any, -100, static_cast<int32_t>(v)}));
    }
    target = Array(ids);
    if (random() % 2) {
      entropy = Array({n}, DType::f32), d_entropy = Array({n}, DType::f32);
      d_entropy.draw(random);
    }
    if (random() % 2) {
      bias = Array({v + padding}, t), d_bias = Array({v + padding}, t);
      bias.draw(random);
    }
    if (random() % 3 == 0) {
      temperatures = Array({n}, DType::f32);
      for (int64_t i = 0; i < n; ++i) temperatures.set(i, one_of<double>(random, {0.7, 1, 1.3, 100, 0.01}));
    }
    if (random() % 4 == 0) {
      std::vector<int32_t> words(static_cast<std::size_t>(n * (v / 32 + 1)));
      for (int32_t& w : words) w = static_cast<int32_t>(random());
      keep = Array(words, {n, v / 32 + 1});
    }
  }

  template <class Args, class View>
  Args given(View view) {
    using Round = typename Args::LogitsRound;
    Args a{.hidden = view(hidden), .weight = view(weight), .target = view(target)};
    if (!bias.shape.empty()) a.bias = view(bias);
    if (!temperatures.shape.empty()) a.temperatures = view(temperatures);
    if (!keep.shape.empty()) a.keep = view(keep);
    a.softcap = softcap, a.vocab = vocab;
    a.logits_round = wide == DType::f32 ? Round::fp32 : wide == DType::bf16 ? Round::bf16 : Round::fp16;
    return a;
  }
  template <class View>
  LinearLogp forward(View view) {
    LinearLogp a = given<LinearLogp>(view);
    a.logp = view(logp), a.lse = view(lse), a.stats = view(stats), a.bad_count = view(bad);
    if (!entropy.shape.empty()) a.entropy = view(entropy);
    return a;
  }
  template <class View>
  LinearLogpBwd backward(View view, bool with_stats) {
    LinearLogpBwd a = given<LinearLogpBwd>(view);
    a.d_logp = view(d_logp), a.d_hidden = view(d_hidden), a.d_weight = view(d_weight);
    if (!d_bias.shape.empty()) a.d_bias = view(d_bias);
    if (!d_entropy.shape.empty()) a.d_entropy = view(d_entropy);
    if (with_stats) a.stats = view(stats);
    return a;
  }
};

// Views of a call's tensors, which its arguments refer to.
struct Views {
  std::deque<Tensor> held;
  auto here() {
    return [this](Array& a) -> const Tensor& { return held.emplace_back(a.on_cpu()); };
  }
  auto there() {
    return [this](Array& a) -> const Tensor& { return held.emplace_back(a.on_gpu()); };
  }
};

bool same(const Array& a, const Array& b) { return a.brought() == b.brought(); }

}  // namespace

TEST_CASE(
    "linear_logp on Hopper by its units' exponential has the bits of its replay, for any shape and option") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 120; ++seed) {
    std::mt19937 random(seed);
    INFO("seed " << seed);
    const auto vocab = one_of<int64_t>(random, {7, 130, 1000, 1104, 2049, 16384, 17000, 33104});
    const DType t = one_of(random, {DType::bf16, DType::bf16, DType::f16});
    Held h(one_of<int64_t>(random, {1, 2, 5, 19}), one_of<int64_t>(random, {8, 40, 64}), vocab,
           one_of<int64_t>(random, {0, 0, 8, 5}), t, one_of(random, {t, DType::f32}), random);
    Views views;
    ran(rlk::linear_logp(h.forward(views.there()), on_gpu(kForward)));
    ran(rlk::linear_logp(h.forward(views.here()), kReplay));
    check(cudaDeviceSynchronize());
    for (const Array* a : {&h.logp, &h.lse, &h.entropy, &h.stats, &h.bad}) CHECK(a->same());
    for (const bool with_stats : {true, false}) {
      workspace().clear();
      ran(rlk::linear_logp_bwd(h.backward(views.there(), with_stats), on_gpu(kBackward)));
      ran(rlk::linear_logp_bwd(h.backward(views.here(), with_stats), kReplay));
      check(cudaDeviceSynchronize());
      for (const Array* a : {&h.d_hidden, &h.d_weight, &h.d_bias}) CHECK(a->same());
    }
  }
}

namespace {

struct Size {
  int64_t n, k, v;
  DType wide;
};
// lm_head's logits, and results of logp and its gradient.
struct Composed {
  Array logits, logp, stats, d_logits, d_hidden, d_weight;
  explicit Composed(Size s)
      : logits({s.n, s.v}, s.wide),
        logp({s.n}, DType::f32),
        stats({s.n, 4}, DType::f32),
        d_logits(s.wide == DType::f32 ? Array() : Array({s.n, s.v}, s.wide)),
        d_hidden({s.n, s.k}, DType::bf16),
        d_weight({s.v, s.k}, DType::bf16) {}

  template <class Args>
  static Args rows(const auto& a, const Tensor& logits) {
    Args b{.logits = logits, .target = a.target, .temperatures = a.temperatures, .keep = a.keep};
    b.softcap = a.softcap, b.logits_round = static_cast<typename Args::LogitsRound>(a.logits_round);
    return b;
  }
  void forward(const LinearLogp& a, auto there) {
    ran(rlk::lm_head({.hidden = a.hidden, .weight = a.weight, .out = there(logits)}, on_gpu("sm90/t25k16")));
    rlk::Logp b = rows<rlk::Logp>(a, there(logits));
    b.logp = there(logp), b.stats = there(stats);
    ran(rlk::logp(b, on_gpu("sm90/ex2/lse2048/l8")));
  }
  void backward(const LinearLogpBwd& a, auto there) {
    rlk::LogpBwd b = rows<rlk::LogpBwd>(a, there(logits));
    b.stats = there(stats), b.d_logp = a.d_logp, b.d_entropy = a.d_entropy, b.d_logits = there(d_logits);
    ran(rlk::logp_bwd(b, on_gpu("sm90/ex2/lse2048/l8")));
    ran(rlk::linear_bwd({.d_y = there(d_logits),
                         .x = a.hidden,
                         .weight = a.weight,
                         .d_x = there(d_hidden),
                         .d_weight = there(d_weight)},
                        on_gpu("sm90/t25k16/tree8")));
  }
};

}  // namespace

// A leaf of the last is more than a panel of 2048 rows.
TEST_CASE(
    "linear_logp on Hopper by its units' exponential is logp of lm_head's logits, and its gradients "
    "likewise") {
  if (!hopper()) return;
  for (const Size s : {Size{1, 64, 151936, DType::f32},
                       {700, 64, 50264, DType::bf16},
                       {2100, 64, 151936, DType::bf16},
                       {2048, 64, 262144, DType::f32}}) {
    CAPTURE(s.n);
    CAPTURE(s.v);
    std::mt19937 random(static_cast<unsigned>(s.n));
    Held h(s.n, s.k, s.v, 0, DType::bf16, s.wide, random);
    h.bias = h.d_bias = {};
    Composed expected(s);
    Views views;
    const LinearLogp a = h.forward(views.there());
    ran(rlk::linear_logp(a, on_gpu(kForward)));
    expected.forward(a, views.there());
    check(cudaDeviceSynchronize());
    CHECK(same(h.logp, expected.logp));
    CHECK(same(h.stats, expected.stats));
    if (s.wide == DType::f32) continue;  // whose gradient is bf16, which logp_bwd does not give
    for (const bool with_stats : {true, false}) {
      const LinearLogpBwd b = h.backward(views.there(), with_stats);
      ran(rlk::linear_logp_bwd(b, on_gpu(kBackward)));
      expected.backward(b, views.there());
      check(cudaDeviceSynchronize());
      CHECK(same(h.d_hidden, expected.d_hidden));
      CHECK(same(h.d_weight, expected.d_weight));
    }
  }
}
