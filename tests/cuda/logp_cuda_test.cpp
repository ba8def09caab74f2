// labels: plugins gpu
// links: registry
// logp on Hopper by the special function units' exponential: the bits of the CPU replay for drawn shapes, numbers and options.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <string>

#include "array.hpp"

namespace {

using cuda_test::Array;
using cuda_test::check;
using cuda_test::hopper;
using cuda_test::Memory;
using cuda_test::one_of;
using cuda_test::Shape;
using rlk::DType;
using rlk::Logp;
using rlk::LogpBwd;
using rlk::Tensor;

// What a row may hold beside normal numbers.
void make_special(Array& logits, int64_t row, int64_t columns, std::mt19937& random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto at = [&] { return row * columns + static_cast<int64_t>(random() % columns); };
  switch (random() % 12) {
    case 0:
      for (int64_t c = 0; c < columns; ++c) logits.set(row * columns + c, -kInfinity);
      break;
    case 1:
      for (int64_t c = 0; c < columns; ++c)
        if (random() % 2) logits.set(row * columns + c, -kInfinity);
      break;
    case 2:  // beside what is absent
      logits.set(at(), -kInfinity);
      logits.set(at(), NAN);
      break;
    case 3:
      logits.set(at(), kInfinity);
      break;
    case 4:
      for (int64_t c = 0; c < columns; ++c)
        logits.set(row * columns + c, 9900 + static_cast<double>(random() % 128));
      for (int i = 0; i < 9; ++i) logits.set(at(), -9900);
      break;
    case 5:
      for (int64_t c = 0; c < columns; ++c) logits.set(row * columns + c, c % 2 ? -0.0 : 0.0);
      break;
    default:
      break;
  }
}

// The tensors of a call and of its gradient; those that are absent have no shape.
struct Held {
  int64_t rows, vocab;
  Array logits, target, temperatures, keep, d_logp, d_entropy;
  Array logp, lse, entropy, stats, bad, d_logits;
  double softcap, temperature;
  int round;

  Held(int64_t n, int64_t v, int64_t padding, DType t, DType to, std::mt19937& random)
      : rows(n),
        vocab(v),
        logits({n, v + padding}, t),
        d_logp({n}, DType::f32),
        logp({n}, DType::f32),
        lse({n}, DType::f32),
        bad({1}, DType::i32),
        d_logits({n, v + padding}, to),
        softcap(random() % 6 == 0 ? 20 : 0),
        temperature(one_of(random, {1.0, 1.0, 0.7})),
        round(static_cast<int>(random() % 8)) {
    const int64_t columns = v + padding;
    logits.draw(random, 0, n, columns, one_of(random, {0.1, 4.0, 60.0}));
    d_logp.draw(random);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; ++i) {
      make_special(logits, i, columns, random);
      if (random() % 4 == 0) d_logp.set(i, one_of<double>(random, {-0.0, INFINITY, NAN}));
      const auto any = static_cast<int32_t>(random() % static_cast<unsigned>(v));
      ids.push_back(one_of<int32_t>(random, {any, any, any, any, any, -100, static_cast<int32_t>(v)}));
    }
    target = Array(ids);
    if (random() % 2) {
      entropy = Array({n}, DType::f32), stats = Array({n, 4}, DType::f32);
      d_entropy = Array({n}, DType::f32), d_entropy.draw(random);
    }
    if (random() % 3 == 0) {
      temperatures = Array({n}, DType::f32), temperature = 1;
      for (int64_t i = 0; i < n; ++i)
        temperatures.set(i, one_of<double>(random, {0.7, 1, 1.3, 100, 0.01, NAN}));
    }
    if (random() % 5 == 0) {
      std::vector<int32_t> words(static_cast<std::size_t>(n * (columns / 32 + 1)));
      for (int32_t& w : words) w = static_cast<int32_t>(random());
      keep = Array(words, {n, columns / 32 + 1});
    }
  }

  template <class Args, class View>
  Args given(View view) {
    Args a{.logits = view(logits), .target = view(target)};
    if (!temperatures.shape.empty()) a.temperatures = view(temperatures);
    if (!keep.shape.empty()) a.keep = view(keep);
    a.softcap = softcap, a.temperature = temperature, a.vocab = vocab;
    if (round == 0) a.logits_round = Args::LogitsRound::bf16;
    if (round == 1) a.logits_round = Args::LogitsRound::fp16;
    return a;
  }
  template <class View>
  rlk::Status forward(View view, const rlk::Options& how) {
    Logp a = given<Logp>(view);
    a.logp = view(logp), a.lse = view(lse), a.bad_count = view(bad);
    if (!stats.shape.empty()) a.entropy = view(entropy), a.stats = view(stats);
    return rlk::logp(a, how);
  }
  template <class View>
  rlk::Status backward(View view, bool with_stats, const rlk::Options& how) {
    LogpBwd a = given<LogpBwd>(view);
    a.d_logp = view(d_logp), a.d_logits = view(d_logits);
    if (!d_entropy.shape.empty()) a.d_entropy = view(d_entropy);
    if (with_stats && !stats.shape.empty()) a.stats = view(stats);
    return rlk::logp_bwd(a, how);
  }
};

constexpr std::size_t kWorkspace = std::size_t{64} << 20;
const Memory& workspace() {
  static const Memory memory(kWorkspace);
  return memory;
}
rlk::Options on_gpu() {
  return {.backend = "cuda.sm90_ex2", .workspace = workspace().data(), .workspace_bytes = kWorkspace};
}

// The kernels' bits are their replay's, of a call and of its gradient.
void same_as_replay(Held& h) {
  const rlk::Options gpu = on_gpu(), replay{.backend = "native.replay_sm90_ex2"};
  std::deque<Tensor> views;  // a call's arguments refer to them
  const auto here = [&](Array& a) -> const Tensor& { return views.emplace_back(a.on_cpu()); };
  const auto there = [&](Array& a) -> const Tensor& { return views.emplace_back(a.on_gpu()); };
  const auto ran = [](const rlk::Status& s) { REQUIRE_MESSAGE(s, std::string(s.message())); };
  ran(h.forward(there, gpu));
  ran(h.forward(here, replay));
  check(cudaDeviceSynchronize());
  for (const Array* a : {&h.logp, &h.lse, &h.entropy, &h.stats, &h.bad}) CHECK(a->same());
  for (const bool with_stats : {false, true}) {
    workspace().clear();
    ran(h.backward(there, with_stats, gpu));
    ran(h.backward(here, with_stats, replay));
    check(cudaDeviceSynchronize());
    CHECK(h.d_logits.same());
  }
}

}  // namespace

TEST_CASE("logp on Hopper by its units' exponential has the bits of its replay, for any shape and option") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    INFO("seed " << seed);
    const auto vocab =
        one_of<int64_t>(random, {1, 7, 130, 1000, 1104, 2049, 16384, 32000, 33104, 40001, 50257});
    const DType t = one_of(random, {DType::bf16, DType::bf16, DType::f32, DType::f16});
    Held h(one_of<int64_t>(random, {1, 2, 5, 9}), vocab, one_of<int64_t>(random, {0, 0, 8, 5}), t,
           one_of(random, {t, DType::f32}), random);
    same_as_replay(h);
  }
}

TEST_CASE("logp on Hopper by its units' exponential has the bits of its replay where a warp has a leaf") {
  if (!hopper()) return;
  for (const DType t : {DType::bf16, DType::f32})
    for (unsigned seed = 1; seed <= 6; ++seed) {
      std::mt19937 random(seed);
      INFO("seed " << seed);
      Held h(600, one_of<int64_t>(random, {1104, 16384, 33104}), 0, t, t, random);
      same_as_replay(h);
    }
}

TEST_CASE("logp on Hopper by its units' exponential has the bits of its replay over whole vocabularies") {
  if (!hopper()) return;
  for (const int64_t vocab : {128256, 151936, 262144}) {
    std::mt19937 random(static_cast<unsigned>(vocab));
    Held h(5, vocab, 0, DType::bf16, DType::bf16, random);
    same_as_replay(h);
  }
}

TEST_CASE("logp on Hopper by its units' exponential gives a row the same bits among 1 to 1000 rows") {
  if (!hopper()) return;
  std::mt19937 random(7);
  constexpr int64_t most = 1000, vocab = 9904;
  Array logits({most, vocab}, DType::bf16), target(std::vector<int32_t>(most, 77));
  logits.draw(random, 0, most, vocab, 4);
  std::vector<std::byte> first;
  for (const int64_t n : {1, 2, 7, 64, 511, 512, 513, 1000}) {
    CAPTURE(n);
    Array logp({n}, DType::f32);
    const Tensor part(logits.on_gpu().dl().data, {n, vocab}, DType::bf16, {kDLCUDA, 0}),
        ids(target.on_gpu().dl().data, {n}, DType::i32, {kDLCUDA, 0});
    const rlk::Status status = rlk::logp({.logits = part, .target = ids, .logp = logp.on_gpu()}, on_gpu());
    REQUIRE_MESSAGE(status, std::string(status.message()));
    check(cudaDeviceSynchronize());
    const std::vector<std::byte> got = logp.brought();
    if (first.size() < got.size()) {
      CHECK(std::memcmp(got.data(), first.data(), first.size()) == 0);
      first = got;
    } else {
      CHECK(std::memcmp(got.data(), first.data(), got.size()) == 0);
    }
  }
}
