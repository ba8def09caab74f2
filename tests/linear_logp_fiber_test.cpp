// labels: conformance fibers
// quick: yes
// linear_logp and its gradients by the portable GPU kernels, on fibers: the bits of the native backend, whatever panels the
// logits are cut into.
#include <doctest/doctest.h>

#include "fiber_rows.hpp"
#include "simt/linear/kernels.hpp"
#include "simt/linear_logp/run.hpp"
#include "simt/logp/kernels.hpp"

namespace {

using namespace fiberrows;
namespace simt = rlk::simt;
using rlk::LinearLogp;
using rlk::LinearLogpBwd;

const rlk::Options kNative{.backend = "native", .arithmetic = "fma32/kb1024/lse128/l8"},
    kBackward{.backend = "native", .arithmetic = "fma32/kb1024/lse128/l8/tree8"};

struct OnFibers {
  static const char* product(const simt::lm_head::Product& p) {
    if (p.rows > 0 && p.cols > 0) REQUIRE(simt::linear::launch(p, nullptr) == hipSuccess);
    return nullptr;
  }
  static const char* logits(const rlk::LmHead& call) { return product(simt::lm_head::forward_product(call)); }
  static const char* fold(const rlk::lse128::Problem& p, const simt::logp::Panel& panel,
                          rlk::lse128::State* states, float* targets) {
    simt::logp::launch_fold(p, panel, 1, states, targets, nullptr);
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
    simt::logp::launch_gradient(p, panel, to, columns, states, nullptr);
    return nullptr;
  }
};

// Panels of 128 columns, 16 rows at a time; or what a GPU takes.
constexpr simt::linear_logp::Limits kSmall{.rows = 16, .cached = 1, .held = 1, .columns = 48},
    kLimits[] = {kSmall, simt::linear_logp::kLimits};

struct Inputs {
  Owned hidden, weight, bias, target, d_logp, d_entropy;
  Inputs(std::int64_t n, std::int64_t k, std::int64_t v, DType t, std::mt19937& random)
      : hidden({n, k}, t, random),
        weight({v, k}, t, random),
        bias({v}, t, random),
        target({n}, DType::i64),
        d_logp({n}, DType::f32, random),
        d_entropy({n}, DType::f32, random) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t id = i == 1   ? -100
                              : i == 2 ? v + 7
                                       : static_cast<std::int64_t>(random() % static_cast<unsigned>(v));
      std::memcpy(target.bytes.data() + 8 * i, &id, 8);
    }
  }
};

// forward or backward at both sizes of panels, in memory that holds garbage.
template <class Args, class Run>
void on_fibers(const std::vector<Owned*>& results, const Args& a, Run run) {
  for (const auto& limits : kLimits) {
    CAPTURE(limits.rows);
    std::vector<std::byte> workspace(static_cast<std::size_t>(simt::linear_logp::room_of(a, limits)) + 64);
    auto* room =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
    const auto expected = copies(results);
    for (const auto& [wave, order] :
         {std::pair{32, rlk_fiber::Order::shuffled}, {64, rlk_fiber::Order::descending}}) {
      for (Owned* r : results) std::fill(r->bytes.begin(), r->bytes.end(), std::byte{0x7f});
      std::fill(workspace.begin(), workspace.end(), std::byte{0x7f});
      rlk_fiber::wave_size = wave, rlk_fiber::order = order;
      CHECK(run(a, room, OnFibers{}, limits) == nullptr);
      CAPTURE(wave);
      for (std::size_t i = 0; i < results.size(); ++i) {
        CAPTURE(i);
        CHECK(results[i]->bytes == expected[i]);
      }
    }
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE, rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE("linear_logp on fibers is native's bits, across panels and runs of rows") {
  std::mt19937 random(31);
  for (const DType t : kTypes)
    for (const std::int64_t v : {7, 1100}) {
      CAPTURE(rlk::name_of(t));
      CAPTURE(v);
      const std::int64_t n = 19;
      const Inputs in(n, 9, v + 5, t, random);
      Owned logp({n}, DType::f32), lse({n}, DType::f32), entropy({n}, DType::f32), stats({n, 4}, DType::f32),
          bad({1}, DType::i32);
      LinearLogp a{.hidden = in.hidden.tensor,
                   .weight = in.weight.tensor,
                   .target = in.target.tensor,
                   .logp = logp.tensor,
                   .lse = lse.tensor,
                   .entropy = entropy.tensor,
                   .stats = stats.tensor,
                   .bad_count = bad.tensor,
                   .vocab = v};
      if (t != DType::f16) a.bias = in.bias.tensor, a.softcap = 20;
      if (t == DType::bf16) a.logits_round = LinearLogp::LogitsRound::bf16;
      REQUIRE(rlk::linear_logp(a, kNative));
      on_fibers({&logp, &lse, &entropy, &stats, &bad}, a,
                [](const auto&... args) { return simt::linear_logp::forward(args...); });
    }
}

TEST_CASE("a part of the vocabulary on fibers is native's bits, of targets that lie in other parts, too") {
  std::mt19937 random(33);
  const std::int64_t n = 19, leaf = 144;
  const Inputs in(n, 9, 2 * leaf, DType::bf16, random);
  for (std::int64_t i = 3; i < n; i += 2) {
    const std::int64_t id = 60 * i;
    std::memcpy(const_cast<std::byte*>(in.target.bytes.data()) + 8 * i, &id, 8);
  }
  Owned stats({n, 4}, DType::f32);
  const LinearLogp a{.hidden = in.hidden.tensor,
                     .weight = in.weight.tensor,
                     .target = in.target.tensor,
                     .stats = stats.tensor,
                     .vocab = 1100,
                     .vocab_start = 2 * leaf,
                     .leaf_first = 2,
                     .leaf_count = 2};
  REQUIRE(rlk::linear_logp(a, kNative));
  on_fibers({&stats}, a, [](const auto&... args) { return simt::linear_logp::forward(args...); });
}

TEST_CASE("linear_logp_bwd on fibers is native's bits, with stats and without") {
  std::mt19937 random(32);
  for (const DType t : kTypes)
    for (const bool given : {true, false}) {
      CAPTURE(rlk::name_of(t));
      CAPTURE(given);
      const std::int64_t n = 19, k = 9, v = 300;
      const Inputs in(n, k, v + 5, t, random);
      Owned stats({n, 4}, DType::f32), d_hidden({n, k}, t), d_weight({v + 5, k}, t), d_bias({v + 5}, t);
      LinearLogpBwd a{.hidden = in.hidden.tensor,
                      .weight = in.weight.tensor,
                      .target = in.target.tensor,
                      .d_logp = in.d_logp.tensor,
                      .d_hidden = d_hidden.tensor,
                      .d_weight = d_weight.tensor,
                      .vocab = v};
      if (t != DType::f16)
        a.bias = in.bias.tensor, a.d_bias = d_bias.tensor, a.d_entropy = in.d_entropy.tensor;
      if (given) {
        LinearLogp f{.hidden = a.hidden, .weight = a.weight, .bias = a.bias, .target = a.target};
        f.stats = stats.tensor, f.vocab = v;
        REQUIRE(rlk::linear_logp(f, kNative));
        a.stats = stats.tensor;
      }
      REQUIRE(rlk::linear_logp_bwd(a, kBackward));
      std::vector<Owned*> results{&d_hidden, &d_weight};
      if (a.d_bias) results.push_back(&d_bias);
      on_fibers(results, a, [](const auto&... args) { return simt::linear_logp::backward(args...); });
    }
}

TEST_CASE("gradients so far are added on fibers as native adds them, in place, too") {
  std::mt19937 random(35);
  const std::int64_t n = 19, k = 9, v = 300, rows = v + 5;
  for (const DType t : kTypes) {
    CAPTURE(rlk::name_of(t));
    const Inputs in(n, k, rows, t, random);
    Owned d_hidden({n, k}, t), d_weight({rows, k}, DType::f32), d_bias({rows}, DType::f32),
        weight_before({rows, k}, DType::f32, random), bias_before({rows}, DType::f32, random);
    LinearLogpBwd a{.hidden = in.hidden.tensor,
                    .weight = in.weight.tensor,
                    .bias = in.bias.tensor,
                    .target = in.target.tensor,
                    .d_logp = in.d_logp.tensor,
                    .d_entropy = in.d_entropy.tensor,
                    .d_hidden = d_hidden.tensor,
                    .d_weight = d_weight.tensor,
                    .d_bias = d_bias.tensor,
                    .d_weight_before = weight_before.tensor,
                    .d_bias_before = bias_before.tensor,
                    .vocab = v};
    const auto before = copies({&weight_before, &bias_before});
    REQUIRE(rlk::linear_logp_bwd(a, kBackward));
    const auto wanted = copies({&d_weight, &d_bias});
    on_fibers({&d_hidden, &d_weight, &d_bias}, a,
              [](const auto&... args) { return simt::linear_logp::backward(args...); });
    CHECK(copies({&weight_before, &bias_before}) == before);
    // In place: what they are added to comes back before every launch.
    a.d_weight = weight_before.tensor, a.d_bias = bias_before.tensor;
    const auto put = [&](const std::vector<std::vector<std::byte>>& bytes) {
      std::copy(bytes[0].begin(), bytes[0].end(), weight_before.bytes.begin());
      std::copy(bytes[1].begin(), bytes[1].end(), bias_before.bytes.begin());
    };
    put(wanted);
    on_fibers({&d_hidden, &weight_before, &bias_before}, a, [&](const auto&... args) {
      put(before);
      return simt::linear_logp::backward(args...);
    });
  }
}

TEST_CASE("a part's gradients on fibers are native's bits") {
  std::mt19937 random(34);
  const std::int64_t n = 19, k = 9, leaf = 144, v = 2 * leaf + 3;
  const Inputs in(n, k, v, DType::bf16, random);
  Owned stats({n, 4}, DType::f32, random), d_hidden({n, k}, DType::f32), d_weight({v, k}, DType::bf16);
  const LinearLogpBwd a{.hidden = in.hidden.tensor,
                        .weight = in.weight.tensor,
                        .target = in.target.tensor,
                        .stats = stats.tensor,
                        .d_logp = in.d_logp.tensor,
                        .d_hidden = d_hidden.tensor,
                        .d_weight = d_weight.tensor,
                        .vocab = 1100,
                        .vocab_start = 2 * leaf,
                        .leaf_first = 2,
                        .leaf_count = 2};
  REQUIRE(rlk::linear_logp_bwd(a, kBackward));
  on_fibers({&d_hidden, &d_weight}, a,
            [](const auto&... args) { return simt::linear_logp::backward(args...); });
}

TEST_CASE("linear_logp on fibers gives a row the same bits among one to 70 rows, in panels of any size") {
  std::mt19937 random(36);
  constexpr std::int64_t most = 70, k = 9, v = 1100;
  for (const DType t : kTypes) {
    CAPTURE(rlk::name_of(t));
    const Inputs in(most, k, v, t, random);
    Owned want({most}, DType::f32), want_stats({most, 4}, DType::f32);
    REQUIRE(rlk::linear_logp({.hidden = in.hidden.tensor,
                              .weight = in.weight.tensor,
                              .target = in.target.tensor,
                              .logp = want.tensor,
                              .stats = want_stats.tensor},
                             kNative));
    for (const auto& limits : kLimits)
      for (const std::int64_t n : {1, 2, 15, 16, 17, 33, 70}) {
        CAPTURE(limits.rows);
        CAPTURE(n);
        Owned logp({n}, DType::f32), stats({n, 4}, DType::f32);
        const rlk::Tensor hidden(const_cast<std::byte*>(in.hidden.bytes.data()), {n, k}, t),
            target(const_cast<std::byte*>(in.target.bytes.data()), {n}, DType::i64);
        const LinearLogp a{.hidden = hidden,
                           .weight = in.weight.tensor,
                           .target = target,
                           .logp = logp.tensor,
                           .stats = stats.tensor};
        std::vector<std::byte> room(static_cast<std::size_t>(simt::linear_logp::room_of(a, limits)) + 64);
        auto* at =
            reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(room.data()) + 63) / 64 * 64);
        CHECK(simt::linear_logp::forward(a, at, OnFibers{}, limits) == nullptr);
        CHECK(std::memcmp(logp.bytes.data(), want.bytes.data(), static_cast<std::size_t>(4 * n)) == 0);
        CHECK(std::memcmp(stats.bytes.data(), want_stats.bytes.data(), static_cast<std::size_t>(16 * n)) ==
              0);
      }
  }
}
