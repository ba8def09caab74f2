// labels: conformance fibers
// quick: yes
// logp by Hopper's exponential (sm90/ex2/lse2048/l8): the written rule, its replay and the GPU's kernels on fibers have the same
// bits for drawn calls, and those are close to golden's.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "arithmetic/logp/bind.hpp"
#include "cuda/logp/kernels.hpp"
#include "fiber_rows.hpp"
#include "registry/op.hpp"
#include "simt/logp/kernels.hpp"

namespace {

using namespace fiberrows;
using rlk::Logp;
using rlk::LogpBwd;
using rlk::lse128::Problem;
using rlk::lse128::State;

constexpr const char* kArithmetic = "sm90/ex2/lse2048/l8";
const rlk::Options kReplay{.backend = "native.replay_sm90_ex2"};

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> list) {
  return *(list.begin() + random() % list.size());
}

void put(Owned& to, std::int64_t at, float x) {
  const DType t = rlk::In(to.tensor).dtype();
  const std::uint16_t half = t == DType::bf16 ? rlk::float_to_bf16(x) : rlk::double_to_f16(x);
  const auto size = static_cast<std::size_t>(rlk::size_of(t));
  std::memcpy(to.bytes.data() + static_cast<std::size_t>(at) * size,
              t == DType::f32 ? static_cast<const void*>(&x) : &half, size);
}

// What a row may hold beside normal numbers.
void make_special(Owned& logits, std::int64_t row, std::int64_t columns, std::mt19937& random) {
  const auto at = [&] { return row * columns + static_cast<std::int64_t>(random() % columns); };
  switch (random() % 7) {
    case 0:  // nothing
      for (std::int64_t c = 0; c < columns; ++c) put(logits, row * columns + c, -INFINITY);
      break;
    case 1:  // holes
      for (std::int64_t c = 0; c < columns; ++c)
        if (random() % 2) put(logits, row * columns + c, -INFINITY);
      break;
    case 2:  // beside what is absent
      put(logits, at(), -INFINITY);
      put(logits, at(), NAN);
      break;
    case 3:
      put(logits, at(), INFINITY);
      break;
    case 4:  // far from zero, far apart
      for (std::int64_t c = 0; c < columns; ++c)
        put(logits, row * columns + c, 9900 + static_cast<float>(random() % 128));
      for (int i = 0; i < 9; ++i) put(logits, at(), -9900);
      break;
    case 5:
      for (std::int64_t c = 0; c < columns; ++c) put(logits, row * columns + c, c % 2 ? -0.0f : 0.0f);
      break;
    default:
      break;
  }
}

// A drawn call and its gradient.
struct Drawn {
  std::int64_t rows, vocab, columns;
  bool bends;
  Owned logits, target, temperatures, keep, d_logp, d_entropy;
  Owned logp, lse, entropy, stats, bad, d_logits;
  bool heated, masked;
  float softcap;
  int round;

  Drawn(std::int64_t n, std::int64_t v, std::int64_t padding, DType t, DType to, std::mt19937& random)
      : rows(n),
        vocab(v),
        columns(v + padding),
        bends(random() % 2 != 0),
        logits({n, columns}, t, random, one_of(random, {0.1, 4.0, 60.0})),
        target({n}, DType::i64),
        temperatures({n}, DType::f32),
        keep({n, columns / 32 + 1}, DType::i32),
        d_logp({n}, DType::f32, random),
        d_entropy({n}, DType::f32, random),
        logp({n}, DType::f32),
        lse({n}, DType::f32),
        entropy({n}, DType::f32),
        stats({n, 4}, DType::f32),
        bad({1}, DType::i32),
        d_logits({n, columns}, to),
        heated(random() % 3 == 0),
        masked(random() % 4 == 0),
        softcap(random() % 4 == 0 ? 20.0f : 0.0f),
        round(static_cast<int>(random() % 6)) {
    for (std::int64_t i = 0; i < n; ++i) {
      make_special(logits, i, columns, random);
      const auto any = static_cast<std::int64_t>(random() % static_cast<unsigned>(v));
      const std::int64_t id = one_of<std::int64_t>(random, {any, any, any, any, -100, v});
      std::memcpy(target.bytes.data() + 8 * i, &id, 8);
      put(temperatures, i, one_of(random, {0.7f, 1.0f, 1.3f, 100.0f, 0.01f, NAN}));
      if (random() % 3 == 0) put(d_logp, i, one_of(random, {-0.0f, INFINITY, NAN}));
    }
    for (std::size_t i = 0; i + 4 < keep.bytes.size(); i += 4) {
      const auto bits = static_cast<std::uint32_t>(random());
      std::memcpy(keep.bytes.data() + i, &bits, 4);
    }
  }

  template <class Args>
  Args given() const {
    Args a{.logits = logits.tensor, .target = target.tensor};
    if (heated) a.temperatures = temperatures.tensor;
    if (masked) a.keep = keep.tensor;
    a.softcap = softcap, a.vocab = vocab;
    if (round == 0) a.logits_round = Args::LogitsRound::bf16;
    if (round == 1) a.logits_round = Args::LogitsRound::fp16;
    return a;
  }
  Logp forward() const {
    Logp a = given<Logp>();
    a.logp = logp.tensor, a.lse = lse.tensor, a.bad_count = bad.tensor;
    if (bends) a.entropy = entropy.tensor, a.stats = stats.tensor;
    return a;
  }
  LogpBwd backward(bool with_stats) const {
    LogpBwd a = given<LogpBwd>();
    a.d_logp = d_logp.tensor, a.d_logits = d_logits.tensor;
    if (bends) a.d_entropy = d_entropy.tensor;
    if (bends && with_stats) a.stats = stats.tensor;
    return a;
  }
  std::vector<Owned*> results() { return {&logp, &lse, &entropy, &stats, &bad}; }
};

template <class Args>
void run_rule(const char* op, Args& a) {
  REQUIRE(rlk::registry::find(op)->rule({reinterpret_cast<const rlk_slot*>(&a), kArithmetic, {}}));
}

// launch() in every order of threads leaves in `results` what is there; a warp is 32 lanes.
template <class Launch>
void same_on_warps(const std::vector<Owned*>& results, const Launch& launch) {
  const auto expected = copies(results);
  for (auto order : {rlk_fiber::Order::ascending, rlk_fiber::Order::descending, rlk_fiber::Order::shuffled}) {
    for (Owned* r : results) std::fill(r->bytes.begin(), r->bytes.end() - 1, std::byte{0x7f});
    rlk_fiber::wave_size = 32;
    rlk_fiber::order = order;
    launch();
    for (std::size_t i = 0; i < results.size(); ++i) CHECK(results[i]->bytes == expected[i]);
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

State* states_in(std::vector<std::byte>& room) { return reinterpret_cast<State*>(room.data()); }
void sum(const Problem& p, std::vector<std::byte>& room, std::int64_t many) {
  State* const states = states_in(room);
  rlk::cuda::logp::launch_fold(p, rlk::simt::logp::whole(p), p.count, states, nullptr, nullptr, many);
  rlk::simt::logp::launch_finish(p, states, nullptr, nullptr);
}
std::vector<std::byte> room(const Problem& p) {
  return std::vector<std::byte>(static_cast<std::size_t>(rlk::simt::logp::states_bytes(p)) + 1,
                                std::byte{0x7f});
}

Drawn drawn(std::mt19937& random) {
  const auto vocab = one_of<std::int64_t>(random, {1, 7, 130, 1000, 1104, 2049, 4096, 16640, 33104, 40001});
  const DType t = one_of(random, {DType::f32, DType::bf16, DType::f16});
  return {vocab > 5000 ? 2 : 5,
          vocab,
          one_of<std::int64_t>(random, {0, 0, 8, 5}),
          t,
          one_of(random, {t, DType::f32}),
          random};
}

}  // namespace

TEST_CASE("logp by Hopper's exponential: the replay has the bits of the written rule") {
  std::mt19937 random(21);
  for (int i = 0; i < 300; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random);
    Logp a = d.forward();
    run_rule("logp", a);
    const auto want = copies(d.results());
    REQUIRE(rlk::logp(a, kReplay));
    CHECK(copies(d.results()) == want);
    for (bool with_stats : {false, true}) {
      LogpBwd b = d.backward(with_stats);
      run_rule("logp_bwd", b);
      const auto gradient = d.d_logits.bytes;
      REQUIRE(rlk::logp_bwd(b, kReplay));
      CHECK(d.d_logits.bytes == gradient);
    }
  }
}

TEST_CASE("logp by Hopper's exponential: kernels on fibers have the replay's bits") {
  std::mt19937 random(22);
  for (int i = 0; i < 60; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random);
    const Logp a = d.forward();
    REQUIRE(rlk::logp(a, kReplay));
    const Problem p = rlk::lse128::problem_of(a);
    auto states = room(p);
    for (std::int64_t many : {0, 1 << 20})  // a warp a leaf, a block a leaf
      same_on_warps(d.results(), [&] { sum(p, states, many); });
    for (bool with_stats : {false, true}) {
      const LogpBwd b = d.backward(with_stats);
      REQUIRE(rlk::logp_bwd(b, kReplay));
      const Problem q = rlk::lse128::problem_of(b);
      same_on_warps({&d.d_logits}, [&] {
        if (!q.given) sum(q, states, 0);
        rlk::cuda::logp::launch_gradient(q, rlk::simt::logp::whole(q), q.d_logits, q.columns,
                                         states_in(states), nullptr);
      });
    }
  }
}

// Of which warps take several in turn.
TEST_CASE("logp by Hopper's exponential: kernels on fibers have the replay's bits in leaves of many tiles") {
  std::mt19937 random(25);
  for (DType t : {DType::bf16, DType::f32}) {
    constexpr std::int64_t vocab = 300008;
    const Owned logits({1, vocab}, t, random, 4);
    Owned target({1}, DType::i32), logp({1}, DType::f32), stats({1, 4}, DType::f32);
    const Logp a{.logits = logits.tensor,
                 .target = target.tensor,
                 .logp = logp.tensor,
                 .stats = stats.tensor,
                 .ignore_index = -1};
    std::memset(target.bytes.data(), 0, 4);
    REQUIRE(rlk::logp(a, kReplay));
    const Problem p = rlk::lse128::problem_of(a);
    auto states = room(p);
    for (std::int64_t many : {0, 1 << 20}) same_on_warps({&logp, &stats}, [&] { sum(p, states, many); });
  }
}

TEST_CASE("logp by Hopper's exponential: parts of a vocabulary merge to the bits of one call") {
  std::mt19937 random(23);
  for (std::int64_t vocab : {40, 3001, 40000}) {
    CAPTURE(vocab);
    const std::int64_t rows = 3, leaf = 16 * ((vocab + 127) / 128);
    Drawn d(rows, vocab, 0, DType::bf16, DType::bf16, random);
    d.heated = d.masked = false, d.softcap = 0, d.bends = true;
    const Logp whole = d.forward();
    REQUIRE(rlk::logp(whole, kReplay));
    for (std::int64_t parts : {2, 8}) {
      Owned partials({parts, rows, 4}, DType::f32), logp({rows}, DType::f32), entropy({rows}, DType::f32),
          stats({rows, 4}, DType::f32);
      for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t first = part * (8 / parts), begin = std::min(vocab, first * leaf),
                           end = std::min(vocab, (first + 8 / parts) * leaf);
        const rlk::Tensor logits(d.logits.bytes.data() + 2 * begin, {rows, end - begin}, DType::bf16,
                                 {kDLCPU, 0}, {vocab, 1}),
            of_part(partials.bytes.data() + 16 * rows * part, {rows, 4}, DType::f32);
        Logp a = d.given<Logp>();
        a.logits = logits, a.stats = of_part;
        a.vocab_start = begin, a.leaf_first = first, a.leaf_count = 8 / parts;
        const rlk::Status ran = rlk::logp(a, kReplay);
        REQUIRE_MESSAGE(ran, std::string(ran.message()));
      }
      REQUIRE(rlk::logp_merge({.partials = partials.tensor,
                               .logp = logp.tensor,
                               .entropy = entropy.tensor,
                               .stats = stats.tensor}));
      CHECK(logp.bytes == d.logp.bytes);
      CHECK(entropy.bytes == d.entropy.bytes);
      CHECK(stats.bytes == d.stats.bytes);
    }
  }
}

TEST_CASE("logp by Hopper's exponential is never above zero, and as close to golden as its page says") {
  std::mt19937 random(24);
  const auto number = [](const Owned& t, std::int64_t i) {
    float x = 0;
    std::memcpy(&x, t.bytes.data() + 4 * i, 4);
    return x;
  };
  double worst = 0;
  for (std::int64_t vocab : {1, 3, 1000, 32000, 262144})
    for (double deviation : {1e-3, 1.0, 8.0, 300.0, 1e4}) {
      const std::int64_t rows = 3;
      Owned logits({rows, vocab}, DType::f32, random, deviation), target({rows}, DType::i64);
      for (std::int64_t n = 0; n < rows; ++n) {
        const auto* z = reinterpret_cast<const float*>(logits.bytes.data()) + n * vocab;
        const std::int64_t id = n == 0 ? std::max_element(z, z + vocab) - z
                                       : static_cast<std::int64_t>(random() % static_cast<unsigned>(vocab));
        std::memcpy(target.bytes.data() + 8 * n, &id, 8);
      }
      Owned got[3] = {{{rows}, DType::f32}, {{rows}, DType::f32}, {{rows}, DType::f32}};
      Owned want[3] = {{{rows}, DType::f32}, {{rows}, DType::f32}, {{rows}, DType::f32}};
      const auto call = [&](Owned(&to)[3], const rlk::Options& how) {
        REQUIRE(rlk::logp({.logits = logits.tensor,
                           .target = target.tensor,
                           .logp = to[0].tensor,
                           .lse = to[1].tensor,
                           .entropy = to[2].tensor,
                           .temperature = 0.9},
                          how));
      };
      call(got, kReplay);
      call(want, {.backend = "native.golden"});
      for (std::int64_t n = 0; n < rows; ++n) {
        CHECK(number(got[0], n) <= 0);
        for (int i = 0; i < 3; ++i) {
          const float x = number(got[i], n), y = number(want[i], n);
          const double ulp = std::nextafter(std::fabs(y), INFINITY) - std::fabs(y);
          const double bound = 3e-6 + 2 * ulp, error = std::fabs(double{x} - double{y});
          CHECK(error <= bound);
          worst = std::max(worst, error / bound);
        }
      }
    }
  MESSAGE("worst: " << worst << " of the bound");
}
