// labels: conformance fibers
// quick: yes
// The portable GPU kernels of logp, on fibers: the bits of the native backend, at both wave sizes and in any thread order.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "arithmetic/logp/bind.hpp"
#include "fiber_rows.hpp"
#include "simt/logp/kernels.hpp"

namespace {

using namespace fiberrows;
using rlk::Logp;
using rlk::LogpBwd;

const rlk::Options kTiles{.backend = "native.tiles"};

// Rows with everything that a row may have; targets of all kinds.
struct Inputs {
  Shape rows;
  Owned logits, target, temperatures, keep;

  Inputs(std::int64_t n, std::int64_t columns, std::int64_t vocab, DType t, std::mt19937& random)
      : rows{n},
        logits({n, columns}, t, random, 4),
        target({n}, DType::i64),
        temperatures({n}, DType::f32),
        keep({n, columns / 32 + 1}, DType::i32) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t id = i == 1   ? -100
                              : i == 2 ? vocab
                                       : static_cast<std::int64_t>(random() % static_cast<unsigned>(vocab));
      std::memcpy(target.bytes.data() + 8 * i, &id, 8);
      const float temperature = 0.5f + 0.25f * static_cast<float>(i);
      std::memcpy(temperatures.bytes.data() + 4 * i, &temperature, 4);
    }
    for (std::size_t i = 0; i + 4 < keep.bytes.size(); i += 4) {
      const auto bits = static_cast<std::uint32_t>(random());
      std::memcpy(keep.bytes.data() + i, &bits, 4);
    }
  }
  template <class Args>
  void give(Args& a, int form) const {
    a.logits = logits.tensor, a.target = target.tensor;
    if (form >= 1) a.temperatures = temperatures.tensor;
    if (form >= 2) a.keep = keep.tensor, a.softcap = 20;
    if (form == 3) a.logits_round = Args::LogitsRound::bf16;
  }
};

template <class Launch>
void on_fibers(const std::vector<Owned*>& results, const rlk::lse128::Problem& p, Launch launch) {
  std::vector<std::byte> states(static_cast<std::size_t>(rlk::simt::logp::states_bytes(p)) + 1);
  same_on_fibers(results, copies(results), [&] {
    std::fill(states.begin(), states.end(), std::byte{0x7f});
    launch(p, states.data(), nullptr);
  });
}

const auto reduce = [](const rlk::lse128::Problem& p, void* states, hipStream_t stream) {
  rlk::simt::logp::launch_reduction(p, states, stream);
};

// What a masked row's gradient may be: -0, which counts as +0.
void nothing_of(Owned& d_logp, std::size_t row) {
  const float zero = -0.0f;
  std::memcpy(d_logp.bytes.data() + 4 * row, &zero, 4);
}

}  // namespace

TEST_CASE("logp on fibers is native's bits, with every option") {
  std::mt19937 random(11);
  for (DType t : kTypes)
    for (std::int64_t vocab : {7, 1100, 2500})
      for (int form = 0; form < 4; ++form) {
        CAPTURE(vocab);
        CAPTURE(form);
        const std::int64_t padding = form == 3 ? 5 : 0;
        const Inputs in(4, vocab + padding, vocab, t, random);
        Owned logp(in.rows, DType::f32), lse(in.rows, DType::f32), entropy(in.rows, DType::f32),
            stats({4, 4}, DType::f32), bad({1}, DType::i32);
        Logp a{.logp = logp.tensor,
               .lse = lse.tensor,
               .entropy = entropy.tensor,
               .stats = stats.tensor,
               .bad_count = bad.tensor};
        in.give(a, form);
        if (padding) a.vocab = vocab;
        REQUIRE(rlk::logp(a, kTiles));
        on_fibers({&logp, &lse, &entropy, &stats, &bad}, rlk::lse128::problem_of(a), reduce);
      }
}

// A leaf of more tiles than a block takes at once, with entries so far apart that exp2_32 gives nothing.
TEST_CASE("logp on fibers is native's bits over wide rows, with nothing in some tiles") {
  std::mt19937 random(14);
  for (const auto& [t, vocab] : std::vector<std::pair<DType, std::int64_t>>{
           {DType::bf16, 33100}, {DType::bf16, 33104}, {DType::f32, 33100}}) {
    CAPTURE(vocab);
    Inputs in(2, vocab, vocab, t, random);
    std::vector<std::byte>& bytes = in.logits.bytes;
    const std::int64_t size = rlk::size_of(t);
    const auto put = [&](std::int64_t at, float x) {
      const std::uint16_t half = rlk::float_to_bf16(x);
      std::memcpy(bytes.data() + at * size, t == DType::f32 ? static_cast<const void*>(&x) : &half,
                  static_cast<std::size_t>(size));
    };
    for (std::int64_t at = 0; at < 4500; ++at) put(at, -INFINITY);
    for (std::int64_t at = 9000; at < 20000; at += 77) put(at, 300);
    Owned logp(in.rows, DType::f32), entropy(in.rows, DType::f32), stats({2, 4}, DType::f32);
    Logp a{.logp = logp.tensor, .entropy = entropy.tensor, .stats = stats.tensor};
    in.give(a, 0);
    REQUIRE(rlk::logp(a, kTiles));
    for (std::int64_t many : {0, 1 << 20})  // a wave a leaf, a block a leaf
      on_fibers({&logp, &entropy, &stats}, rlk::lse128::problem_of(a),
                [&](const auto& p, void* states, auto stream) {
                  rlk::simt::logp::launch_reduction(p, states, stream, many);
                });
  }
}

TEST_CASE("parts of a vocabulary on fibers are native's, and so is what they are merged to") {
  std::mt19937 random(12);
  const std::int64_t vocab = 1000, leaf = 128;
  Owned partials({4, 5, 4}, DType::f32);
  for (std::int64_t part = 0; part < 4; ++part) {
    const std::int64_t begin = 2 * part * leaf, end = std::min(vocab, begin + 2 * leaf);
    const Inputs in(5, end - begin, vocab, DType::bf16, random);
    Owned stats({5, 4}, DType::f32);
    Logp a{
        .stats = stats.tensor, .vocab = vocab, .vocab_start = begin, .leaf_first = 2 * part, .leaf_count = 2};
    in.give(a, 1);
    REQUIRE(rlk::logp(a, kTiles));
    on_fibers({&stats}, rlk::lse128::problem_of(a), reduce);
    std::memcpy(partials.bytes.data() + part * 80, stats.bytes.data(), 80);
  }
  Owned logp({5}, DType::f32), stats({5, 4}, DType::f32);
  const rlk::LogpMerge m{.partials = partials.tensor, .logp = logp.tensor, .stats = stats.tensor};
  REQUIRE(rlk::logp_merge(m, {.backend = "native.rows"}));
  std::vector<Owned*> results{&logp, &stats};
  same_on_fibers(results, copies(results),
                 [&] { rlk::simt::logp::launch_merge(rlk::lse128::merge_of(m), nullptr); });
}

TEST_CASE("logp_bwd on fibers is native's bits, with stats and without") {
  std::mt19937 random(13);
  for (DType t : kTypes)
    for (const auto& [vocab, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {7, 10}, {1100, 1103}, {1104, 1112}})  // the last in whole packs
      for (int form = 0; form < 4; ++form) {
        CAPTURE(vocab);
        CAPTURE(form);
        const Inputs in(4, columns, vocab, t, random);
        Owned d_logp(in.rows, DType::f32, random);
        const Owned d_entropy(in.rows, DType::f32, random);
        nothing_of(d_logp, 3);
        Owned stats({4, 4}, DType::f32), d_logits({4, columns}, t);
        Logp f{.stats = stats.tensor, .vocab = vocab};
        in.give(f, form);
        REQUIRE(rlk::logp(f, kTiles));
        LogpBwd a{.d_logp = d_logp.tensor, .d_logits = d_logits.tensor, .vocab = vocab};
        in.give(a, form);
        if (form % 2) a.d_entropy = d_entropy.tensor;
        for (bool given : {true, false}) {
          a.stats = given ? rlk::In(stats.tensor) : rlk::In();
          REQUIRE(rlk::logp_bwd(a, kTiles));
          on_fibers({&d_logits}, rlk::lse128::problem_of(a), rlk::simt::logp::launch_backward);
        }
      }
}

// From `many` leaves on a wave has a leaf of its own, below that a block.
TEST_CASE("logp on fibers gives a row the same bits among one to 33 rows, few of which are many leaves") {
  std::mt19937 random(15);
  constexpr std::int64_t most = 33, many = 64;
  for (DType t : kTypes)
    for (std::int64_t vocab : {1100, 1104}) {
      CAPTURE(rlk::name_of(t));
      CAPTURE(vocab);
      const Inputs in(most, vocab, vocab, t, random);
      Owned want({most}, DType::f32), want_stats({most, 4}, DType::f32);
      REQUIRE(rlk::logp({.logits = in.logits.tensor,
                         .target = in.target.tensor,
                         .logp = want.tensor,
                         .stats = want_stats.tensor},
                        kTiles));
      for (std::int64_t n : {1, 2, 7, 8, 9, 16, 33}) {
        CAPTURE(n);
        Owned logp({n}, DType::f32), stats({n, 4}, DType::f32);
        const rlk::Tensor logits(const_cast<std::byte*>(in.logits.bytes.data()), {n, vocab}, t),
            target(const_cast<std::byte*>(in.target.bytes.data()), {n}, DType::i64);
        const Logp a{.logits = logits, .target = target, .logp = logp.tensor, .stats = stats.tensor};
        const rlk::lse128::Problem p = rlk::lse128::problem_of(a);
        std::vector<std::byte> states(static_cast<std::size_t>(rlk::simt::logp::states_bytes(p)) + 1);
        rlk::simt::logp::launch_reduction(p, states.data(), nullptr, many);
        CHECK(std::memcmp(logp.bytes.data(), want.bytes.data(), static_cast<std::size_t>(4 * n)) == 0);
        CHECK(std::memcmp(stats.bytes.data(), want_stats.bytes.data(), static_cast<std::size_t>(16 * n)) ==
              0);
      }
    }
}
