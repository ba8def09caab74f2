// labels: conformance fibers
// linear_logp by Hopper's exponential (sm90/t25k16/ex2/lse2048/l8): its replay has the bits of the written rule for drawn calls,
// and the GPU's kernels on fibers, which take panels of logits, those of logp's replay. That the replay is the composition of
// lm_head's, logp's and linear_bwd's is in linear_logp_test.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "cuda/logp/kernels.hpp"
#include "fiber_rows.hpp"
#include "registry/op.hpp"
#include "simt/linear/kernels.hpp"
#include "simt/linear_logp/run.hpp"
#include "simt/logp/kernels.hpp"

namespace {

using namespace fiberrows;
namespace simt = rlk::simt;
using rlk::LinearLogp;
using rlk::LinearLogpBwd;
using rlk::Tensor;

const rlk::Options kReplay{.backend = "native.replay_sm90_ex2"};

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> list) {
  return *(list.begin() + random() % list.size());
}
template <class T>
void put(Owned& to, std::int64_t at, T x) {
  std::memcpy(to.bytes.data() + static_cast<std::size_t>(at) * sizeof x, &x, sizeof x);
}

// A drawn call of all leaves or of some, and its gradients.
struct Drawn {
  std::int64_t rows, vocab, first, count, here;
  DType type, wide;
  bool biased, heated, masked, bends;
  float softcap;
  Owned hidden, weight, bias, target, temperatures, keep, d_logp, d_entropy, weight_before;
  Owned logp, lse, entropy, stats, bad, d_hidden, d_weight, d_bias;

  // Columns of `leaves` leaves from number `from` on.
  static std::int64_t columns(std::int64_t v, std::int64_t from, std::int64_t leaves) {
    const std::int64_t leaf = 16 * ((v + 127) / 128);
    return std::min(v, (from + leaves) * leaf) - std::min(v, from * leaf);
  }

  Drawn(std::int64_t n, std::int64_t k, std::int64_t v, std::int64_t padding, std::int64_t from,
        std::int64_t leaves, DType t, DType logits, std::mt19937& random)
      : rows(n),
        vocab(v),
        first(from),
        count(leaves),
        here(columns(v, from, leaves)),
        type(t),
        wide(logits),
        biased(random() % 2 != 0),
        heated(random() % 2 != 0),
        masked(random() % 3 == 0),
        bends(random() % 2 != 0),
        softcap(random() % 3 == 0 ? 9.0f : 0.0f),
        hidden({n, k}, t, random),
        weight({here + padding, k}, t, random),
        bias({here + padding}, t, random),
        target({n}, DType::i64),
        temperatures({n}, DType::f32),
        keep({n, here / 32 + 1}, DType::i32),
        d_logp({n}, DType::f32, random),
        d_entropy({n}, DType::f32, random),
        weight_before({here + padding, k}, DType::f32, random),
        logp({n}, DType::f32),
        lse({n}, DType::f32),
        entropy({n}, DType::f32),
        stats({n, 4}, DType::f32),
        bad({1}, DType::i32),
        d_hidden({n, k}, leaves == 8 ? t : DType::f32),
        d_weight({here + padding, k}, DType::f32),
        d_bias({here + padding}, t) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto any = static_cast<std::int64_t>(random() % static_cast<unsigned>(v));
      put(target, i, one_of<std::int64_t>(random, {any, any, any, -100, v + 7}));
      put(temperatures, i, one_of(random, {0.7f, 1.0f, 1.3f, 100.0f, 0.01f}));
    }
    for (std::int64_t i = 0; i < n * (here / 32 + 1); ++i) put(keep, i, static_cast<std::uint32_t>(random()));
  }

  template <class Args>
  Args given() const {
    using Round = typename Args::LogitsRound;
    Args a{.hidden = hidden.tensor, .weight = weight.tensor, .target = target.tensor};
    if (biased) a.bias = bias.tensor;
    if (heated) a.temperatures = temperatures.tensor;
    if (masked) a.keep = keep.tensor;
    a.softcap = softcap, a.vocab = vocab;
    a.logits_round = wide == DType::f32 ? Round::fp32 : wide == DType::bf16 ? Round::bf16 : Round::fp16;
    a.leaf_first = first, a.leaf_count = count, a.vocab_start = columns(vocab, 0, first);
    return a;
  }
  LinearLogp forward() const {
    LinearLogp a = given<LinearLogp>();
    a.bad_count = bad.tensor, a.stats = stats.tensor;
    if (count == 8) a.logp = logp.tensor, a.lse = lse.tensor;
    if (count == 8 && bends) a.entropy = entropy.tensor;
    return a;
  }
  // With the stats of the forward, unless a whole call is to make them again.
  LinearLogpBwd backward(bool with_stats) const {
    LinearLogpBwd a = given<LinearLogpBwd>();
    a.d_logp = d_logp.tensor, a.d_hidden = d_hidden.tensor, a.d_weight = d_weight.tensor;
    a.d_weight_before = weight_before.tensor;
    if (biased) a.d_bias = d_bias.tensor;
    if (bends) a.d_entropy = d_entropy.tensor;
    if (with_stats || count != 8) a.stats = stats.tensor;
    return a;
  }
  std::vector<Owned*> results() { return {&logp, &lse, &entropy, &stats, &bad}; }
  std::vector<Owned*> gradients() { return {&d_hidden, &d_weight, &d_bias}; }
};

Drawn drawn(std::mt19937& random, std::int64_t vocab) {
  const DType t = one_of(random, {DType::bf16, DType::f16});
  const auto leaves = one_of<std::int64_t>(random, {8, 8, 4, 2});
  return {one_of<std::int64_t>(random, {1, 5, 19}),
          one_of<std::int64_t>(random, {1, 9, 40}),
          vocab,
          one_of<std::int64_t>(random, {0, 5}),
          leaves == 8 ? 0 : leaves * static_cast<std::int64_t>(random() % static_cast<unsigned>(8 / leaves)),
          leaves,
          t,
          one_of(random, {t, DType::f32}),
          random};
}

template <class Args>
void run_rule(const char* op, const Args& a, const char* arithmetic) {
  REQUIRE(rlk::registry::find(op)->rule({reinterpret_cast<const rlk_slot*>(&a), arithmetic, {}}));
}

}  // namespace

TEST_CASE("linear_logp by Hopper's exponential: the replay has the bits of the written rule") {
  std::mt19937 random(41);
  for (int i = 0; i < 60; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random, one_of<std::int64_t>(random, {1, 7, 130, 1000, 2049, 5000}));
    if (d.here == 0) continue;
    run_rule("linear_logp", d.forward(), "sm90/t25k16/ex2/lse2048/l8");
    const auto want = copies(d.results());
    const rlk::Status ran = rlk::linear_logp(d.forward(), kReplay);
    REQUIRE_MESSAGE(ran, std::string(ran.message()));
    CHECK(copies(d.results()) == want);
    for (const bool with_stats : {true, false}) {
      run_rule("linear_logp_bwd", d.backward(with_stats), "sm90/t25k16/ex2/lse2048/l8/tree8");
      const auto gradients = copies(d.gradients());
      REQUIRE(rlk::linear_logp_bwd(d.backward(with_stats), kReplay));
      CHECK(copies(d.gradients()) == gradients);
    }
  }
}

namespace {

// Products are the portable ones here: what is compared is what becomes of their logits.
struct OnFibers {
  std::int64_t many;  // leaves that have a warp each
  static const char* product(const simt::lm_head::Product& p) {
    if (p.rows > 0 && p.cols > 0) REQUIRE(simt::linear::launch(p, nullptr) == hipSuccess);
    return nullptr;
  }
  static const char* logits(const rlk::LmHead& call) { return product(simt::lm_head::forward_product(call)); }
  const char* fold(const rlk::lse128::Problem& p, const simt::logp::Panel& panel, rlk::lse128::State* states,
                   float* targets) const {
    rlk::cuda::logp::launch_fold(p, panel, 1, states, targets, nullptr, many);
    return nullptr;
  }
  static const char* finish(const rlk::lse128::Problem& p, rlk::lse128::State* states, const float* targets) {
    simt::logp::launch_finish(p, states, targets, nullptr);
    return nullptr;
  }
  static const char* count_bad(const rlk::lse128::Problem& p) {
    simt::logp::launch_count(p, nullptr);
    return nullptr;
  }
  static const char* gradient(const rlk::lse128::Problem& p, const simt::logp::Panel& panel,
                              const rlk::lse128::Matrix& to, std::int64_t columns,
                              const rlk::lse128::State* states) {
    rlk::cuda::logp::launch_gradient(p, panel, to, columns, states, nullptr);
    return nullptr;
  }
};

// Panels of a tile, 16 rows at a time; or what a GPU takes.
constexpr simt::linear_logp::Limits kSmall{.rows = 16, .cached = 1, .held = 1, .columns = 48, .tile = 2048},
    kLarge{.rows = 2048,
           .cached = std::int64_t{64} << 20,
           .held = std::int64_t{128} << 20,
           .columns = 16384,
           .tile = 2048};

// The logits that the call has, by lm_head, and their gradient.
struct Logits {
  Owned z, d;
  Tensor weight, bias;
  explicit Logits(const Drawn& x) : z({x.rows, x.here}, x.wide), d({x.rows, x.here}, x.wide) {
    const std::int64_t depth = x.hidden.tensor.dl().shape[1];
    weight = Tensor(x.weight.tensor.dl().data, {x.here, depth}, x.type);
    bias = Tensor(x.bias.tensor.dl().data, {x.here}, x.type);
    rlk::LmHead head{.hidden = x.hidden.tensor, .weight = weight, .out = z.tensor};
    if (x.biased) head.bias = bias;
    REQUIRE(rlk::lm_head(head, {.backend = "native", .arithmetic = "fma32/kb1024"}));
  }
  template <class To, class From>
  To of(const From& a) const {
    To b{.logits = z.tensor, .target = a.target, .temperatures = a.temperatures, .keep = a.keep};
    b.softcap = a.softcap, b.vocab = a.vocab, b.vocab_start = a.vocab_start;
    b.leaf_first = a.leaf_first, b.leaf_count = a.leaf_count;
    b.logits_round = static_cast<typename To::LogitsRound>(a.logits_round);
    return b;
  }
  void forward(const LinearLogp& a) const {
    rlk::Logp b = of<rlk::Logp>(a);
    b.logp = a.logp, b.lse = a.lse, b.entropy = a.entropy, b.stats = a.stats, b.bad_count = a.bad_count;
    const rlk::Status ran = rlk::logp(b, kReplay);
    REQUIRE_MESSAGE(ran, std::string(ran.message()));
  }
  void backward(const Drawn& x, const LinearLogpBwd& a, Owned& d_weight) const {
    rlk::LogpBwd b = of<rlk::LogpBwd>(a);
    b.stats = a.stats, b.d_logp = a.d_logp, b.d_entropy = a.d_entropy, b.d_logits = d.tensor;
    REQUIRE(rlk::logp_bwd(b, kReplay));
    rlk::LinearBwd c{.d_y = d.tensor, .x = a.hidden, .weight = weight, .d_x = a.d_hidden};
    c.d_weight = d_weight.tensor;
    c.d_x_leaf_first = x.first, c.d_x_leaf_count = x.count, c.n_total = x.vocab;
    REQUIRE(rlk::linear_bwd(c, {.backend = "native", .arithmetic = "fma32/tree8"}));
  }
};

// run(workspace, kernels, limits) leaves what is there, in memory that holds garbage, whatever the panels.
template <class Args, class Run>
void same_by_panels(const std::vector<Owned*>& results, const Args& a, Run run) {
  const auto expected = copies(results);
  int turn = 0;
  for (const auto& limits : {kSmall, kLarge})
    for (const std::int64_t many : {0, 1 << 20}) {
      CAPTURE(limits.rows);
      CAPTURE(many);
      std::vector<std::byte> room(static_cast<std::size_t>(simt::linear_logp::room_of(a, limits)) + 64,
                                  std::byte{0x7f});
      auto* at = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(room.data()) + 63) / 64 * 64);
      for (Owned* r : results) std::fill(r->bytes.begin(), r->bytes.end(), std::byte{0x7f});
      rlk_fiber::wave_size = 32;
      rlk_fiber::order = turn++ % 2 == 0 ? rlk_fiber::Order::shuffled : rlk_fiber::Order::descending;
      CHECK(run(at, OnFibers{many}, limits) == nullptr);
      for (std::size_t i = 0; i < results.size(); ++i) {
        CAPTURE(i);
        CHECK(results[i]->bytes == expected[i]);
      }
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE, rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE(
    "linear_logp by Hopper's exponential: kernels on fibers have logp's replay's bits, panel by panel") {
  std::mt19937 random(42);
  for (int i = 0; i < 24; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random, one_of<std::int64_t>(random, {7, 1000, 1104, 17000, 33024}));
    if (d.here == 0) continue;
    const LinearLogp a = d.forward();
    Logits(d).forward(a);
    same_by_panels(d.results(), a, [&](auto* room, const auto& kernels, const auto& limits) {
      return simt::linear_logp::forward(a, room, kernels, limits);
    });
  }
}

TEST_CASE("linear_logp_bwd by Hopper's exponential: kernels on fibers have logp_bwd's replay's bits") {
  std::mt19937 random(43);
  for (int i = 0; i < 24; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random, one_of<std::int64_t>(random, {7, 1000, 1104, 2000}));
    if (d.here == 0) continue;
    const Logits logits(d);
    logits.forward(d.forward());
    for (const bool with_stats : {true, false}) {
      LinearLogpBwd a = d.backward(with_stats);
      a.d_weight_before = {}, a.d_bias = {}, a.d_weight = {};
      Owned d_weight({d.here, d.hidden.tensor.dl().shape[1]}, d.type);
      LinearLogpBwd b = a;
      logits.backward(d, a, d_weight);
      // Rows beyond the entries are linear_logp's own.
      b.weight = logits.weight, b.d_weight = d_weight.tensor;
      if (d.biased) b.bias = logits.bias;
      same_by_panels({&d.d_hidden, &d_weight}, b, [&](auto* room, const auto& kernels, const auto& limits) {
        return simt::linear_logp::backward(b, room, kernels, limits);
      });
    }
  }
}
