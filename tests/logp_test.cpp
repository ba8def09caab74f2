// labels: conformance
// What logp promises beyond its rule: never above zero, the same bits for any cut of the vocabulary, digits that a difference
// from logsumexp loses, and errors that say what is wrong.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

constexpr float kInfinity = __builtin_inff();

std::vector<float> drawn(std::size_t n, std::mt19937& random, float deviation) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}
bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A call's results of `rows` rows.
struct Results {
  std::vector<float> logp, lse, entropy, stats;
  explicit Results(std::size_t rows) : logp(rows), lse(rows), entropy(rows), stats(4 * rows) {}
  bool operator==(const Results& b) const {
    return equal(logp, b.logp) && equal(lse, b.lse) && equal(entropy, b.entropy) && equal(stats, b.stats);
  }
};

}  // namespace

TEST_CASE("logp is never above zero, however close the target comes to being all there is") {
  std::mt19937 random(1);
  for (std::int64_t vocab : {1, 2, 9, 130, 1025})
    for (float deviation : {1e-4f, 1.0f, 30.0f, 3e4f})
      for (float temperature : {0.3f, 1.0f, 1.7f}) {
        const std::int64_t rows = 64;
        const std::vector<float> z = drawn(static_cast<std::size_t>(rows * vocab), random, deviation);
        std::vector<std::int64_t> target(rows);
        for (std::int64_t n = 0; n < rows; ++n)  // the largest, mostly
          target[static_cast<std::size_t>(n)] =
              n % 4 ? std::max_element(z.begin() + n * vocab, z.begin() + (n + 1) * vocab) - z.begin() -
                          n * vocab
                    : n % vocab;
        std::vector<float> logp(rows);
        REQUIRE(rlk::logp({.logits = Tensor(const_cast<float*>(z.data()), {rows, vocab}, DType::f32),
                           .target = Tensor(target.data(), {rows}, DType::i64),
                           .logp = Tensor(logp.data(), {rows}, DType::f32),
                           .temperature = temperature}));
        for (float x : logp) CHECK(x <= 0);
      }
}

TEST_CASE("a target far from zero keeps its digits, which the difference from logsumexp loses") {
  std::vector<float> z{10000, 9999.5f, 9990}, logp(1), lse(1);
  std::int32_t target = 1;
  REQUIRE(rlk::logp({.logits = Tensor(z.data(), {1, 3}, DType::f32),
                     .target = Tensor(&target, {1}, DType::i32),
                     .logp = Tensor(logp.data(), {1}, DType::f32),
                     .lse = Tensor(lse.data(), {1}, DType::f32)}));
  const double truth = -0.5 - std::log(1 + std::exp(-0.5) + std::exp(-10.0));
  CHECK(std::fabs(double{logp[0]} - truth) < 2e-7);
  CHECK(std::fabs(double{z[1] - lse[0]} - truth) > 1e-5);
}

TEST_CASE(
    "any cut of the vocabulary into 1, 2, 4 or 8 parts gives the bits of one call, and of its gradient") {
  std::mt19937 random(2);
  for (std::int64_t vocab : {5, 100, 1000, 1024, 3001}) {
    CAPTURE(vocab);
    const std::int64_t rows = 7, leaf = 16 * ((vocab + 127) / 128);
    std::vector<float> z = drawn(static_cast<std::size_t>(rows * vocab), random, 5);
    for (std::int64_t c = 0; c < std::min(vocab, leaf); ++c)
      z[static_cast<std::size_t>(c)] = -kInfinity;  // a leaf of nothing
    z[static_cast<std::size_t>(2 * vocab + 3)] = NAN;
    for (std::int64_t c = 0; c < vocab; ++c) z[static_cast<std::size_t>(6 * vocab + c)] = -kInfinity;
    std::vector<std::int64_t> target{0, vocab - 1, 2, -100, vocab, vocab / 2, 1};
    std::vector<float> temperature{1, 0.5f, 1, 2, 1, 1.25f, 3}, g = drawn(7, random, 1),
                                                                h = drawn(7, random, 1);
    const Tensor logits(z.data(), {rows, vocab}, DType::f32), targets(target.data(), {rows}, DType::i64),
        temperatures(temperature.data(), {rows}, DType::f32), d_logp(g.data(), {rows}, DType::f32),
        d_entropy(h.data(), {rows}, DType::f32);
    const auto vector_of = [&](std::vector<float>& x) { return Tensor(x.data(), {rows}, DType::f32); };
    Results whole(7);
    std::vector<float> gradient(z.size());
    REQUIRE(rlk::logp({.logits = logits,
                       .target = targets,
                       .temperatures = temperatures,
                       .logp = vector_of(whole.logp),
                       .lse = vector_of(whole.lse),
                       .entropy = vector_of(whole.entropy),
                       .stats = Tensor(whole.stats.data(), {rows, 4}, DType::f32)}));
    REQUIRE(rlk::logp_bwd({.logits = logits,
                           .target = targets,
                           .temperatures = temperatures,
                           .d_logp = d_logp,
                           .d_entropy = d_entropy,
                           .d_logits = Tensor(gradient.data(), {rows, vocab}, DType::f32)}));
    for (std::int64_t parts : {1, 2, 4, 8}) {
      CAPTURE(parts);
      std::vector<float> partials(static_cast<std::size_t>(parts * rows * 4));
      const std::int64_t count = 8 / parts;
      const auto part_of = [&](std::int64_t p, std::int64_t* start) {
        *start = std::min(vocab, p * count * leaf);
        return std::min(vocab, (p + 1) * count * leaf) - *start;
      };
      for (std::int64_t p = 0; p < parts; ++p) {
        std::int64_t start = 0;
        const std::int64_t here = part_of(p, &start);
        REQUIRE(
            rlk::logp({.logits = Tensor(z.data() + start, {rows, here}, DType::f32, {kDLCPU, 0}, {vocab, 1}),
                       .target = targets,
                       .temperatures = temperatures,
                       .stats = Tensor(partials.data() + p * rows * 4, {rows, 4}, DType::f32),
                       .vocab = vocab,
                       .vocab_start = start,
                       .leaf_first = p * count,
                       .leaf_count = count}));
      }
      Results merged(7);
      REQUIRE(rlk::logp_merge({.partials = Tensor(partials.data(), {parts, rows, 4}, DType::f32),
                               .temperatures = temperatures,
                               .logp = vector_of(merged.logp),
                               .lse = vector_of(merged.lse),
                               .entropy = vector_of(merged.entropy),
                               .stats = Tensor(merged.stats.data(), {rows, 4}, DType::f32)}));
      CHECK(merged == whole);
      std::vector<float> joined(z.size());
      for (std::int64_t p = 0; p < parts; ++p) {
        std::int64_t start = 0;
        const std::int64_t here = part_of(p, &start);
        REQUIRE(rlk::logp_bwd(
            {.logits = Tensor(z.data() + start, {rows, here}, DType::f32, {kDLCPU, 0}, {vocab, 1}),
             .target = targets,
             .temperatures = temperatures,
             .stats = Tensor(merged.stats.data(), {rows, 4}, DType::f32),
             .d_logp = d_logp,
             .d_entropy = d_entropy,
             .d_logits = Tensor(joined.data() + start, {rows, here}, DType::f32, {kDLCPU, 0}, {vocab, 1}),
             .vocab = vocab,
             .vocab_start = start,
             .leaf_first = p * count,
             .leaf_count = count}));
      }
      CHECK(equal(joined, gradient));
    }
  }
}

namespace {

// Rows of `from` with room for more columns behind them, which hold what no entry may.
std::vector<float> padded(const std::vector<float>& from, std::int64_t rows, std::int64_t width,
                          std::int64_t padding) {
  const float nothing[] = {NAN, kInfinity, 3e38f, -kInfinity};
  std::vector<float> all;
  for (std::int64_t n = 0; n < rows; ++n) {
    all.insert(all.end(), from.begin() + n * width, from.begin() + (n + 1) * width);
    for (std::int64_t i = 0; i < padding; ++i) all.push_back(nothing[i % 4]);
  }
  return all;
}

}  // namespace

TEST_CASE("columns behind the vocabulary, NaN and infinite, change no bit: logp, linear_logp and sample") {
  std::mt19937 random(3);
  constexpr std::int64_t rows = 6, depth = 8, vocab = 300;
  std::vector<float> z = drawn(rows * vocab, random, 3), hidden = drawn(rows * depth, random, 1),
                     weight = drawn(vocab * depth, random, 1);
  std::vector<std::int64_t> target{0, 299, 17, 128, 5, 255}, seed{1, 2, 3, 4, 5, 6},
      position{9, 8, 7, 6, 5, 4};
  std::vector<float> top_p(rows, 0.9f);
  const Tensor targets(target.data(), {rows}, DType::i64), seeds(seed.data(), {rows}, DType::i64),
      positions(position.data(), {rows}, DType::i64), p(top_p.data(), {rows}, DType::f32),
      h(hidden.data(), {rows, depth}, DType::f32);
  struct All {
    Results of_logits{rows}, of_hidden{rows};
    std::vector<std::int64_t> token = std::vector<std::int64_t>(rows);
    std::vector<float> logp = std::vector<float>(rows);
    std::vector<std::int32_t> count = std::vector<std::int32_t>(rows);
    bool operator==(const All& b) const {
      return of_logits == b.of_logits && of_hidden == b.of_hidden && token == b.token &&
             equal(logp, b.logp) && count == b.count;
    }
  };
  const auto vector_of = [&](std::vector<float>& x) { return Tensor(x.data(), {rows}, DType::f32); };
  const auto run = [&](std::int64_t padding, const char* tiles, const char* chain, const char* draws) {
    All out;
    std::vector<float> wide = padded(z, rows, vocab, padding), tall = weight;
    tall.resize(static_cast<std::size_t>((vocab + padding) * depth), NAN);
    const Tensor logits(wide.data(), {rows, vocab + padding}, DType::f32),
        w(tall.data(), {vocab + padding, depth}, DType::f32);
    REQUIRE(rlk::logp({.logits = logits,
                       .target = targets,
                       .logp = vector_of(out.of_logits.logp),
                       .lse = vector_of(out.of_logits.lse),
                       .entropy = vector_of(out.of_logits.entropy),
                       .stats = Tensor(out.of_logits.stats.data(), {rows, 4}, DType::f32),
                       .vocab = vocab},
                      {.backend = tiles}));
    REQUIRE(rlk::linear_logp({.hidden = h,
                              .weight = w,
                              .target = targets,
                              .logp = vector_of(out.of_hidden.logp),
                              .lse = vector_of(out.of_hidden.lse),
                              .entropy = vector_of(out.of_hidden.entropy),
                              .stats = Tensor(out.of_hidden.stats.data(), {rows, 4}, DType::f32),
                              .vocab = vocab},
                             {.backend = chain}));
    REQUIRE(rlk::sample({.logits = logits,
                         .top_p = p,
                         .seed = seeds,
                         .position = positions,
                         .token = Tensor(out.token.data(), {rows}, DType::i64),
                         .logp = vector_of(out.logp),
                         .count = Tensor(out.count.data(), {rows}, DType::i32),
                         .vocab = vocab},
                        {.backend = draws}));
    return out;
  };
  for (const auto& [tiles, chain, draws] :
       {std::array{"native.tiles", "native.kb256", "native.rows"},
        std::array{"native.tiles.scalar", "native.scalar", "native.rows.scalar"},
        std::array{"native.golden", "native.golden", "native.golden"}}) {
    CAPTURE(std::string(tiles));
    const All narrow = run(0, tiles, chain, draws);
    for (std::int64_t padding : {1, 4, 100, 725}) {
      CAPTURE(padding);
      CHECK(run(padding, tiles, chain, draws) == narrow);
    }
  }
}

TEST_CASE("what takes no part has a gradient of +0, be it the target") {
  std::vector<float> z{1, -kInfinity, 2, -kInfinity, 0.5f, -kInfinity}, d(6), g{-1, -1}, h{0.5f, 0.5f};
  std::vector<std::int64_t> target{1, 1};
  const Tensor logits(z.data(), {2, 3}, DType::f32), targets(target.data(), {2}, DType::i64),
      d_logits(d.data(), {2, 3}, DType::f32), d_logp(g.data(), {2}, DType::f32),
      d_entropy(h.data(), {2}, DType::f32);
  for (const char* backend : {"native", "native.golden"})
    for (float softcap : {0.0f, 5.0f})
      for (bool entropy : {false, true}) {
        CAPTURE(std::string(backend));
        rlk::LogpBwd call{
            .logits = logits, .target = targets, .d_logp = d_logp, .d_logits = d_logits, .softcap = softcap};
        if (entropy) call.d_entropy = d_entropy;
        d.assign(6, NAN);
        REQUIRE(rlk::logp_bwd(call, {.backend = backend}));
        for (std::size_t absent : {1u, 3u, 5u}) CHECK((d[absent] == 0 && !std::signbit(d[absent])));
        CHECK(d[0] != 0);
      }
}

TEST_CASE("an ignored row is 0 whatever its temperature, whole and joined of parts") {
  std::vector<float> z(2 * 256, 1.0f), temperature{0, 0}, partials(2 * 2 * 4);
  std::vector<std::int64_t> target{-100, 3};
  const Tensor targets(target.data(), {2}, DType::i64), temperatures(temperature.data(), {2}, DType::f32);
  const auto vector_of = [](std::vector<float>& x) { return Tensor(x.data(), {2}, DType::f32); };
  for (const char* backend : {"native", "native.golden"}) {
    CAPTURE(std::string(backend));
    Results whole(2), joined(2);
    REQUIRE(rlk::logp({.logits = Tensor(z.data(), {2, 256}, DType::f32),
                       .target = targets,
                       .temperatures = temperatures,
                       .logp = vector_of(whole.logp),
                       .lse = vector_of(whole.lse),
                       .entropy = vector_of(whole.entropy)},
                      {.backend = backend}));
    for (std::int64_t part : {0, 1})
      REQUIRE(rlk::logp({.logits = Tensor(z.data() + part * 128, {2, 128}, DType::f32, {kDLCPU, 0}, {256, 1}),
                         .target = targets,
                         .temperatures = temperatures,
                         .stats = Tensor(partials.data() + part * 8, {2, 4}, DType::f32),
                         .vocab = 256,
                         .vocab_start = part * 128,
                         .leaf_first = 4 * part,
                         .leaf_count = 4},
                        {.backend = backend}));
    REQUIRE(rlk::logp_merge({.partials = Tensor(partials.data(), {2, 2, 4}, DType::f32),
                             .temperatures = temperatures,
                             .logp = vector_of(joined.logp),
                             .lse = vector_of(joined.lse),
                             .entropy = vector_of(joined.entropy)},
                            {.backend = backend}));
    for (const Results* r : {&whole, &joined}) {
      CHECK((r->logp[0] == 0 && r->lse[0] == 0 && r->entropy[0] == 0));
      CHECK((std::isnan(r->logp[1]) && std::isnan(r->lse[1]) && std::isnan(r->entropy[1])));
    }
  }
}

TEST_CASE("logp's errors name the argument and both values") {
  std::vector<float> z(2000), results(8);
  std::vector<std::int64_t> target(2);
  rlk::Logp a;
  const Tensor logits(z.data(), {2, 1000}, DType::f32), targets(target.data(), {2}, DType::i64),
      logp(results.data(), {2}, DType::f32), stats(results.data(), {2, 4}, DType::f32);
  a.logits = logits, a.target = targets, a.stats = stats;
  const auto says = [](const rlk::Logp& call) { return std::string(rlk::logp(call).message()); };
  rlk::Logp b = a;
  b.vocab = 1000, b.leaf_first = 2, b.leaf_count = 2, b.vocab_start = 250;
  CHECK(says(b) == "logp: vocab_start is 250, leaf 2 of V=1000 starts at 256");
  b = a, b.vocab = 1001;
  CHECK(says(b) == "logp: logits has 1000 columns, leaves 0 to 7 of V=1001 are 1001");
  b = a, b.leaf_first = 1, b.leaf_count = 2;
  CHECK(says(b) == "logp: leaf_first is 1, with leaf_count 2 it must be a multiple of it below 8");
  b = a, b.vocab = 3000, b.leaf_count = 2, b.logp = logp, b.stats = {};
  CHECK(says(b) == "logp: logp is asked for, leaf_count is not 8: a part of the vocabulary has only stats");
  b = a, b.temperature = 0;
  CHECK(says(b) == "logp: temperature is 0, it must be from 2^-100 to 2^100");
}
