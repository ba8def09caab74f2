// labels: plugins gpu
// links: registry
// sample on Hopper with log-probabilities by the special function units' exponential: the tokens, sets and bits of the CPU replay,
// and of logp by the same exponential.
#include <doctest/doctest.h>

#include <cmath>
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
using rlk::Sample;
using rlk::SampleVerify;
using rlk::Tensor;

constexpr std::size_t kWorkspace = std::size_t{256} << 20;
const Memory& workspace() {
  static const Memory memory(kWorkspace);
  return memory;
}
rlk::Options on_gpu() {
  return {.backend = "cuda.sm90_ex2", .workspace = workspace().data(), .workspace_bytes = kWorkspace};
}
const rlk::Options kReplay{.backend = "native.replay_sm90_ex2"};

// The tensors of a call; those that are absent have no shape.
struct Held {
  int64_t rows, vocab;
  Array logits, temperature, top_k, top_p, min_p, seed, position;
  Array token, logp, raw, count, keep, bad, status;
  double softcap;
  bool raw_temperature, min_p_first;

  Held(int64_t n, int64_t v, int64_t padding, DType t, std::mt19937& random)
      : rows(n),
        vocab(v),
        logits({n, v + padding}, t),
        token({n}, DType::i32),
        logp({n}, DType::f32),
        raw({n}, DType::f32),
        count({n}, DType::i32),
        bad({1}, DType::i32),
        status({n}, DType::i32),
        softcap(random() % 6 == 0 ? 20 : 0),
        raw_temperature(random() % 2 != 0),
        min_p_first(random() % 2 != 0) {
    logits.draw(random, 0, n, v + padding, one_of(random, {0.1, 3.0, 20.0}));
    const auto drawn = [&](auto next) {
      std::vector<int32_t> values;
      for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<int32_t>(next()));
      return Array(values);
    };
    const auto numbers = [&](std::initializer_list<double> list) {
      Array a({n}, DType::f32);
      for (int64_t i = 0; i < n; ++i) a.set(i, one_of(random, list));
      return a;
    };
    seed = drawn([&] { return random() >> 1; }), position = drawn([&] { return random() >> 1; });
    for (int64_t i = 0; i < n; ++i) {
      if (random() % 8 == 0) logits.set(i * (v + padding) + static_cast<int64_t>(random() % v), NAN);
      if (random() % 4 == 0)
        for (int64_t c = 0; c < v; ++c)
          if (random() % 2) logits.set(i * (v + padding) + c, -INFINITY);
    }
    if (random() % 2) temperature = numbers({0.7, 1, 1.3, 0, 3});
    if (random() % 3 == 0) top_k = drawn([&] { return one_of(random, {0, 1, 5, 40, 2000}); });
    if (random() % 3 == 0) top_p = numbers({1, 0.9, 0.4, 0});
    if (random() % 3 == 0) min_p = numbers({0, 0.01, 0.2});
    if (random() % 2) keep = Array({n, (v + 31) / 32}, DType::i32);
  }

  template <class Args, class View>
  Args given(View view) {
    Args a{.logits = view(logits), .seed = view(seed), .position = view(position)};
    if (!temperature.shape.empty()) a.temperature = view(temperature);
    if (!top_k.shape.empty()) a.top_k = view(top_k);
    if (!top_p.shape.empty()) a.top_p = view(top_p);
    if (!min_p.shape.empty()) a.min_p = view(min_p);
    a.softcap = softcap, a.vocab = vocab, a.raw_temperature = raw_temperature;
    if (min_p_first) a.filter_order = Args::FilterOrder::min_p_first;
    return a;
  }
  template <class View>
  Sample draw(View view) {
    Sample a = given<Sample>(view);
    a.token = view(token), a.logp = view(logp), a.logp_raw = view(raw), a.count = view(count);
    a.bad_count = view(bad);
    if (!keep.shape.empty()) a.keep = view(keep);
    return a;
  }
  template <class View>
  SampleVerify verify(View view) {
    SampleVerify a = given<SampleVerify>(view);
    a.token = view(token), a.logp = view(logp), a.logp_raw = view(raw), a.status = view(status);
    return a;
  }
};

struct Views {
  std::deque<Tensor> held;
  auto here() {
    return [this](Array& a) -> const Tensor& { return held.emplace_back(a.on_cpu()); };
  }
  auto there() {
    return [this](Array& a) -> const Tensor& { return held.emplace_back(a.on_gpu()); };
  }
};

void same_as_replay(Held& h) {
  Views views;
  workspace().clear();
  ran(rlk::sample(h.draw(views.there()), on_gpu()));
  ran(rlk::sample(h.draw(views.here()), kReplay));
  check(cudaDeviceSynchronize());
  for (const Array* a : {&h.token, &h.logp, &h.raw, &h.count, &h.keep, &h.bad}) CHECK(a->same());
  workspace().clear();
  ran(rlk::sample_verify(h.verify(views.there()), on_gpu()));
  check(cudaDeviceSynchronize());
  for (int64_t i = 0; i < h.rows; ++i) {
    const std::vector<std::byte> got = h.status.brought();
    int32_t status = -1;
    std::memcpy(&status, got.data() + 4 * i, 4);
    CHECK(status == 0);
  }
}

}  // namespace

TEST_CASE("sample on Hopper by its units' exponential has the bits of its replay, for any shape and option") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 150; ++seed) {
    std::mt19937 random(seed);
    INFO("seed " << seed);
    Held h(one_of<int64_t>(random, {1, 2, 9, 60}),
           one_of<int64_t>(random, {7, 130, 1000, 1104, 2049, 16384, 33104, 50257}),
           one_of<int64_t>(random, {0, 0, 8, 5}),
           one_of(random, {DType::bf16, DType::bf16, DType::f32, DType::f16}), random);
    same_as_replay(h);
  }
}

TEST_CASE("sample on Hopper by its units' exponential has the bits of its replay over whole vocabularies") {
  if (!hopper()) return;
  for (const int64_t rows : {3, 64})
    for (unsigned seed = 1; seed <= 4; ++seed) {
      std::mt19937 random(seed);
      INFO("seed " << seed);
      Held h(rows, 151936, 0, DType::bf16, random);
      same_as_replay(h);
    }
}
