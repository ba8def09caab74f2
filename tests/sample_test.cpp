// labels: conformance
// sample: its noise against published vectors and against fp64 probabilities, and the traps that a sampler falls into: a draw
// of exactly 1, sums of fp32 masses, noise by rank.
#include "arithmetic/sample/sample.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
namespace sampling = rlk::sampling;

template <class T>
constexpr DType kType = DType::f32;
template <>
constexpr DType kType<int32_t> = DType::i32;
template <>
constexpr DType kType<int64_t> = DType::i64;

template <class T>
Tensor view(std::vector<T>& x) {
  return {x.data(), {static_cast<int64_t>(x.size())}, kType<T>};
}

// `draws` draws from one row of logits, at positions 0, 1, ..
struct Draws {
  std::vector<float> logits;
  std::vector<int64_t> seed, position, token;
  std::vector<int32_t> stream, top_k, count, keep;
  std::vector<float> temperature, top_p, min_p, logp, logp_raw;

  Draws(std::vector<float> row, std::size_t draws)
      : logits(std::move(row)),
        seed(draws, 42),
        position(draws),
        token(draws, -7),
        stream(draws),
        count(draws),
        keep(draws * ((logits.size() + 31) / 32)),
        logp(draws),
        logp_raw(draws) {
    std::iota(position.begin(), position.end(), 0);
  }
  const std::vector<int64_t>& run(const char* backend = "native.rows") {
    const auto n = static_cast<int64_t>(token.size()), v = static_cast<int64_t>(logits.size());
    const Tensor z(logits.data(), {n, v}, DType::f32, {kDLCPU, 0}, {0, 1}),
        s = view(seed), at = view(position), st = view(stream), t = view(temperature), k = view(top_k),
        p = view(top_p), m = view(min_p), out = view(token), c = view(count), l = view(logp),
        raw = view(logp_raw), bits(keep.data(), {n, (v + 31) / 32}, DType::i32);
    rlk::Sample a{.logits = z, .seed = s, .stream = st, .position = at, .token = out};
    a.count = c, a.logp = l, a.logp_raw = raw, a.keep = bits;
    if (!temperature.empty()) a.temperature = t;
    if (!top_k.empty()) a.top_k = k;
    if (!top_p.empty()) a.top_p = p;
    if (!min_p.empty()) a.min_p = m;
    const rlk::Status status = rlk::sample(a, {.backend = backend});
    REQUIRE_MESSAGE(status, status.message());
    return token;
  }
  bool kept(std::size_t draw, int64_t id) const {
    const std::size_t words = (logits.size() + 31) / 32;
    return static_cast<uint32_t>(keep[draw * words + static_cast<std::size_t>(id) / 32]) >> (id % 32) & 1;
  }
};

std::vector<float> normal_row(std::size_t v, double deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, deviation);
  std::vector<float> row(v);
  for (float& z : row) z = static_cast<float>(normal(random));
  return row;
}

std::vector<double> probabilities(const std::vector<float>& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  for (float z : logits) p.push_back(std::exp(z - most));
  const double all = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= all;
  return p;
}

// How many deviations chi-square lies above its mean; cells that expect less than ten draws are one.
double excess(const std::vector<int64_t>& cells, const std::vector<double>& p, std::size_t draws) {
  std::vector<double> seen(p.size());
  for (int64_t c : cells) seen.at(static_cast<std::size_t>(c)) += 1;
  double chi = 0, rest = 0, rest_expected = 0, freedom = -1;
  const auto add = [&](double n, double expected) {
    chi += (n - expected) * (n - expected) / expected, ++freedom;
  };
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * static_cast<double>(draws);
    if (expected >= 10) add(seen[i], expected);
    if (expected < 10) rest += seen[i], rest_expected += expected;
  }
  if (rest_expected >= 1) add(rest, rest_expected);
  return (chi - freedom) / std::sqrt(2 * freedom);
}

}  // namespace

TEST_CASE("what a part found is written with one NaN, whichever an instruction set computed") {
  sampling::Found found;
  found.kept.sum = std::bit_cast<float>(0x7fc08000u), found.all.sum = std::bit_cast<float>(0xffd82000u);
  std::array<int64_t, 8> out{};
  sampling::put(out.data(), found);
  CHECK(out[5] == std::bit_cast<uint32_t>(rlk::canonical(NAN)));
  CHECK(out[7] == out[5]);
}

TEST_CASE("sample_merge takes a part whose sum is 0 for one without entries, whatever its maximum") {
  // score, id, logit, count, maximum and sum of what stays, of all
  const auto bits = [](float x) { return int64_t{std::bit_cast<uint32_t>(x)}; };
  const std::vector<int64_t> one{bits(1), 3, bits(1), 2, bits(2), bits(1.5f), bits(2), bits(1.5f)};
  const auto merged = [](std::vector<int64_t> partials) {
    std::vector<float> logp(1), raw(1);
    std::vector<int64_t> token(1);
    const Tensor p(partials.data(), {static_cast<int64_t>(partials.size()) / 8, 1, 8}, DType::i64),
        t = view(token), l = view(logp), r = view(raw);
    rlk::SampleMerge a{.partials = p, .token = t, .logp = l, .logp_raw = r};
    a.step = rlk::SampleMerge::Step::token;
    const rlk::Status status = rlk::sample_merge(a, {.backend = "native.rows"});
    REQUIRE_MESSAGE(status, status.message());
    CHECK(token[0] == 3);
    return std::array{logp[0], raw[0]};
  };
  const auto alone = merged(one);
  std::vector<int64_t> two = one;
  two.insert(two.end(), {0, -1, 0, 0, bits(7), 0, bits(7), 0});
  CHECK(merged(two) == alone);
  std::vector<int64_t> nothing = one;
  nothing[5] = nothing[7] = 0;
  CHECK(merged(nothing) == std::array{-INFINITY, -INFINITY});
}

TEST_CASE("Philox4x32-10 gives its authors' vectors") {
  using rlk::philox::Counter;
  const auto words = [](Counter c, uint32_t k0, uint32_t k1) {
    const Counter w = rlk::philox::words(c, k0, k1);
    return std::array<uint32_t, 4>{w.x, w.y, w.z, w.w};
  };
  const uint32_t all = 0xffffffff;
  CHECK(words({0, 0, 0, 0}, 0, 0) == std::array{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  CHECK(words({all, all, all, all}, all, all) ==
        std::array{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  CHECK(words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0) ==
        std::array{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST_CASE("no word gives infinite noise, where -ln(-ln u) of an fp32 u would for 128 of them") {
  int forbidden = 0;
  for (uint64_t word = (uint64_t{1} << 32) - 4096; word < uint64_t{1} << 32; ++word) {
    const float u = static_cast<float>(static_cast<double>(word) + 0.5) * 0x1p-32f;
    forbidden += std::isinf(-std::log(-std::log(u)));
    const float s = sampling::score(0, 0, 1, static_cast<uint32_t>(word));
    CHECK(std::isfinite(s));
    CHECK(s < 0);  // a large word is a large v, and a late arrival
  }
  CHECK(forbidden == 128);
  for (uint32_t word = 0; word < 4096; ++word) {
    const double v = (word + 0.5) * 0x1p-32, exact = -std::log(-std::log1p(-v));
    CHECK(std::fabs(sampling::score(0, 0, 1, word) - exact) < 4e-7 * exact);
  }
}

TEST_CASE("a word is rounded once: the half below the last bit decides") {
  std::mt19937 random(3);
  for (int i = 0; i < 200000; ++i) {
    const auto word = static_cast<uint32_t>(random() >> random() % 32);
    const auto v = std::min(static_cast<float>(static_cast<double>(word) + 0.5) * 0x1p-32f, 1 - 0x1p-24f);
    const float e =
        sampling::exponential<float>(static_cast<float>(word >> 16), static_cast<float>(word & 0xffff));
    CHECK(e == -rlk::simt::log1p<float>(-v));
  }
}

TEST_CASE("draws have the probabilities of fp64") {
  for (const auto& [v, deviation] : {std::pair<std::size_t, double>{8, 1}, {1000, 1.5}, {5000, 2}}) {
    CAPTURE(v);
    constexpr std::size_t kDraws = 20000;
    Draws d(normal_row(v, deviation, 5), kDraws);
    CHECK(excess(d.run(), probabilities(d.logits), kDraws) < 4);
    const double wrong = 1.25;  // such probabilities are seen to be wrong
    std::vector<double> p = probabilities(d.logits);
    for (std::size_t i = 0; i < p.size() / 2; ++i) p[i] *= wrong;
    CHECK(excess(d.token, p, kDraws) > 4);
  }
}

TEST_CASE("neighbouring positions, streams, seeds and ids draw independently") {
  constexpr std::size_t kDraws = 40000;
  Draws d(normal_row(8, 1, 9), kDraws + 1);
  const std::vector<double> p = probabilities(d.logits);
  std::vector<double> pairs;
  for (double a : p)
    for (double b : p) pairs.push_back(a * b);
  const auto independent = [&](const std::vector<int64_t>& a, const std::vector<int64_t>& b,
                               std::size_t apart) {
    std::vector<int64_t> cells;
    for (std::size_t i = 0; i < kDraws; ++i) cells.push_back(a[i] * 8 + b[i + apart]);
    return excess(cells, pairs, kDraws) < 4;
  };
  const std::vector<int64_t> first = d.run();
  CHECK(independent(first, first, 1));
  CHECK_FALSE(independent(first, first, 0));  // it can see
  std::fill(d.stream.begin(), d.stream.end(), 1);
  CHECK(independent(first, d.run(), 0));
  std::fill(d.stream.begin(), d.stream.end(), 0);
  std::fill(d.seed.begin(), d.seed.end(), 43);
  CHECK(independent(first, d.run(), 0));
  std::fill(d.seed.begin(), d.seed.end(), 42);
  for (int64_t& position : d.position) position += int64_t{1} << 32;
  CHECK(independent(first, d.run(), 0));
}

TEST_CASE("a filter cannot change the token that it keeps: noise belongs to the id, not to a rank") {
  constexpr std::size_t kDraws = 300;
  Draws d(normal_row(3000, 2, 11), kDraws);
  const std::vector<int64_t> free = d.run();
  std::size_t same = 0;
  const auto check = [&] {
    d.run();
    for (std::size_t i = 0; i < kDraws; ++i) {
      CHECK(d.kept(i, d.token[i]));
      if (!d.kept(i, free[i])) continue;
      ++same;
      CHECK(d.token[i] == free[i]);
    }
  };
  d.top_k.assign(kDraws, 200), check();
  d.top_k.clear(), d.top_p.assign(kDraws, 0.7f), check();
  d.top_p.clear(), d.min_p.assign(kDraws, 0.02f), check();
  CHECK(same > kDraws);
}

TEST_CASE("entries that are absent, or past the vocabulary, change no token of the others") {
  Draws d(normal_row(500, 1, 13), 100);
  const std::vector<int64_t> before = d.run();
  std::vector<float> longer(d.logits);
  longer.resize(700, -INFINITY);
  Draws e(longer, 100);
  CHECK(e.run() == before);
  CHECK(e.count[0] == 500);
}

TEST_CASE("top_p counts integers: fp32 sums pick other sets, and one set for each way of adding") {
  constexpr std::size_t v = 151936;
  int others = 0, moved = 0;
  for (uint32_t row = 0; row < 4; ++row) {
    const float p = 0.9f + 0.02f * static_cast<float>(row);
    Draws d(normal_row(v, 1, 17 + row), 1);
    d.top_p = {p};
    d.run();
    std::vector<float> sorted(d.logits);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    std::vector<uint64_t> masses;
    std::vector<float> shares;
    uint64_t all = 0;
    float sum = 0;
    for (float z : sorted) {
      shares.push_back(rlk::simt::exp2<float>((z - sorted[0]) * sampling::kLog2e));
      masses.push_back(static_cast<uint64_t>(shares.back() * 0x1p40f));
      all += masses.back(), sum += shares.back();
    }
    const auto target =
        static_cast<uint64_t>(std::ceil(static_cast<long double>(p) * static_cast<long double>(all)));
    std::size_t exact = 0;
    for (uint64_t before = 0; before < target; ++exact) before += masses[exact];
    CHECK(static_cast<std::size_t>(d.count[0]) == exact);
    const auto running = [&](std::size_t block) {  // sums of blocks, then inside the one in which it happens
      float before = 0;
      for (std::size_t i = 0; i < v; i += block) {
        float inside = 0;
        for (std::size_t k = i; k < std::min(v, i + block); ++k) {
          if (before + inside >= p * sum) return k;
          inside += shares[k];
        }
        before += inside;
      }
      return v;
    };
    others += running(1) != exact;
    moved += running(1) != running(1024);
  }
  CHECK(others > 1);
  CHECK(moved > 1);
}

TEST_CASE("temperature 0 takes the largest entry, of equal ones the first") {
  Draws d({1, 3, 3, -1, 3}, 50);
  d.temperature.assign(50, 0);
  for (int64_t token : d.run()) CHECK(token == 1);
  d.temperature.assign(50, 1e-45f);  // its reciprocal is infinite
  for (int64_t token : d.run()) CHECK(token == 1);
  for (float logp : d.logp) CHECK(std::fabs(logp + std::log(3 + std::exp(-2.0) + std::exp(-4.0))) < 1e-6);
}

TEST_CASE(
    "a draw of several positions at once is the draws one by one, so a draft is accepted by comparing") {
  Draws many(normal_row(2000, 2, 19), 8);
  many.run();
  for (std::size_t i = 0; i < 8; ++i) {
    Draws one(many.logits, 1);
    one.position = {static_cast<int64_t>(i)};
    CHECK(one.run()[0] == many.token[i]);
    CHECK(one.logp[0] == many.logp[i]);
    CHECK(one.logp[0] <= 0);
  }
}

TEST_CASE("sample_verify finds what sample gave, and says what else was recorded") {
  Draws d(normal_row(400, 2, 23), 6);
  d.top_k.assign(6, 40);
  d.run();
  const auto out_of_set =
                 static_cast<int64_t>(std::min_element(d.logits.begin(), d.logits.end()) - d.logits.begin()),
             best =
                 static_cast<int64_t>(std::max_element(d.logits.begin(), d.logits.end()) - d.logits.begin());
  std::vector<int64_t> token = d.token;
  std::vector<float> logp = d.logp, raw = d.logp_raw;
  REQUIRE(token[1] != best);
  token[1] = best, logp[2] = std::nextafter(logp[2], 0.0f), token[3] = out_of_set, raw[4] = 0, token[5] = 400;
  std::vector<int32_t> status(6, -1);
  const Tensor z(d.logits.data(), {6, 400}, DType::f32, {kDLCPU, 0}, {0, 1}),
      s = view(d.seed), at = view(d.position), k = view(d.top_k), t = view(token), l = view(logp),
      r = view(raw), out = view(status);
  REQUIRE(rlk::sample_verify({.logits = z,
                              .top_k = k,
                              .seed = s,
                              .position = at,
                              .token = t,
                              .logp = l,
                              .logp_raw = r,
                              .status = out}));
  CHECK(status == std::vector<int32_t>{0, 1, 2, 3, 4, 3});
}

TEST_CASE("what does not fit is refused by name, with both values") {
  Draws d(normal_row(10, 1, 1), 3);
  std::vector<int64_t> two(2);
  const Tensor z(d.logits.data(), {3, 10}, DType::f32, {kDLCPU, 0}, {0, 1}), s = view(two),
                                                                             out = view(d.token);
  const rlk::Status other = rlk::sample({.logits = z, .seed = s, .token = out});
  CHECK(std::string(other.message()).find("seed has N=2, logits has N=3") != std::string::npos);
  const Tensor seed = view(d.seed);
  const rlk::Status vocab = rlk::sample({.logits = z, .seed = seed, .token = out, .vocab = 11});
  CHECK(std::string(vocab.message()).find("vocab is 11, it must be from 0 to V=10") != std::string::npos);
}
