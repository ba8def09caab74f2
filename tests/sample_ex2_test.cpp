// labels: conformance fibers
// sample with log-probabilities by Hopper's exponential (sample/philox-g1/ex2/lse2048/l8): the tokens and sets of
// sample/philox-g1 and the log-probabilities of logp under sm90/ex2/lse2048/l8; the written rule, its replay and the GPU's kernels
// on fibers have the same bits, of parts of a vocabulary, too.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "arithmetic/sample/bind.hpp"
#include "cuda/logp/kernels.hpp"
#include "cuda/sample/kernels.hpp"
#include "fiber_rows.hpp"
#include "registry/op.hpp"
#include "simt/sample/kernels.hpp"

namespace {

using namespace fiberrows;
using rlk::Sample;
using rlk::SamplePart;
using rlk::SampleVerify;
using rlk::Tensor;
using rlk::sampling::Problem;

constexpr const char* kArithmetic = "sample/philox-g1/ex2/lse2048/l8";
const rlk::Options kReplay{.backend = "native.replay_sm90_ex2"};

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> list) {
  return *(list.begin() + random() % list.size());
}
template <class T>
T get(const Owned& from, std::int64_t at) {
  T x;
  std::memcpy(&x, from.bytes.data() + static_cast<std::size_t>(at) * sizeof x, sizeof x);
  return x;
}
template <class T>
void put(Owned& to, std::int64_t at, T x) {
  std::memcpy(to.bytes.data() + static_cast<std::size_t>(at) * sizeof x, &x, sizeof x);
}
void put_logit(Owned& to, DType t, std::int64_t at, float x) {
  if (t == DType::f32) return put(to, at, x);
  put(to, at, t == DType::bf16 ? rlk::float_to_bf16(x) : rlk::double_to_f16(double{x}));
}

// A drawn call and its results.
struct Drawn {
  std::int64_t rows, vocab, padding;
  DType type;
  bool heated, filtered, min_p_first, raw_temperature;
  float softcap;
  int round;
  Owned logits, temperature, top_k, top_p, min_p, seed, position;
  Owned token, logp, raw, count, keep, bad, status;

  Drawn(std::int64_t n, std::int64_t v, std::int64_t more, DType t, std::mt19937& random)
      : rows(n),
        vocab(v),
        padding(more),
        type(t),
        heated(random() % 2 != 0),
        filtered(random() % 2 != 0),
        min_p_first(random() % 2 != 0),
        raw_temperature(random() % 2 != 0),
        softcap(random() % 4 == 0 ? 9.0f : 0.0f),
        round(static_cast<int>(random() % 6)),
        logits({n, v + more}, t, random, one_of(random, {0.1, 3.0, 20.0})),
        temperature({n}, DType::f32),
        top_k({n}, DType::i32),
        top_p({n}, DType::f32),
        min_p({n}, DType::f32),
        seed({n}, DType::i64),
        position({n}, DType::i64),
        token({n}, DType::i64),
        logp({n}, DType::f32),
        raw({n}, DType::f32),
        count({n}, DType::i32),
        keep({n, (v + 31) / 32}, DType::i32),
        bad({1}, DType::i32),
        status({n}, DType::i32) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = [&] {
        return i * (v + more) + static_cast<std::int64_t>(random() % static_cast<unsigned>(v));
      };
      if (random() % 8 == 0) put_logit(logits, t, at(), one_of(random, {NAN, INFINITY}));
      if (random() % 3 == 0)
        for (std::int64_t c = 0; c < v; ++c)
          if (random() % 2 != 0) put_logit(logits, t, i * (v + more) + c, -INFINITY);
      put(temperature, i, one_of(random, {0.7f, 1.0f, 1.3f, 0.0f, 3.0f, NAN}));
      put(top_k, i, one_of<std::int32_t>(random, {0, 1, 5, 40, static_cast<std::int32_t>(v)}));
      put(top_p, i, one_of(random, {1.0f, 0.9f, 0.4f, 0.0f}));
      put(min_p, i, one_of(random, {0.0f, 0.01f, 0.2f}));
      put(seed, i, static_cast<std::int64_t>(random()));
      put(position, i, static_cast<std::int64_t>(random()));
    }
  }

  template <class Args>
  void options(Args& a) const {
    if (heated) a.temperature = temperature.tensor;
    a.raw_temperature = raw_temperature;
    if (filtered) a.top_k = top_k.tensor, a.top_p = top_p.tensor;
  }
  template <class Args>
  Args inputs() const {
    Args a{.logits = logits.tensor, .seed = seed.tensor, .position = position.tensor};
    options(a);
    if (filtered) a.min_p = min_p.tensor;
    if (filtered && min_p_first) a.filter_order = Args::FilterOrder::min_p_first;
    a.softcap = softcap, a.vocab = vocab;
    if (round == 0) a.logits_round = Args::LogitsRound::bf16;
    if (round == 1) a.logits_round = Args::LogitsRound::fp16;
    return a;
  }
  Sample draw() const {
    Sample a = inputs<Sample>();
    a.token = token.tensor, a.logp = logp.tensor, a.logp_raw = raw.tensor;
    a.count = count.tensor, a.keep = keep.tensor, a.bad_count = bad.tensor;
    return a;
  }
  // Of what is recorded there.
  SampleVerify verify() const {
    SampleVerify a = inputs<SampleVerify>();
    a.token = token.tensor, a.logp = logp.tensor, a.logp_raw = raw.tensor, a.status = status.tensor;
    return a;
  }
  std::vector<Owned*> results() { return {&token, &logp, &raw, &count, &keep, &bad}; }
};

Drawn drawn(std::mt19937& random, std::initializer_list<std::int64_t> vocabularies) {
  const auto vocab = one_of(random, vocabularies);
  return {vocab > 5000 ? 2 : 5, vocab, one_of<std::int64_t>(random, {0, 0, 8, 5}),
          one_of(random, {DType::f32, DType::bf16, DType::f16}), random};
}

template <class Args>
void run_rule(const char* op, const Args& a) {
  REQUIRE(rlk::registry::find(op)->rule({reinterpret_cast<const rlk_slot*>(&a), kArithmetic, {}}));
}

// A record with errors in some of its log-probabilities.
void spoil(Drawn& d, std::mt19937& random) {
  for (std::int64_t i = 0; i < d.rows; ++i) {
    if (random() % 4 == 0) put(d.logp, i, std::nextafter(get<float>(d.logp, i), 1.0f));
    if (random() % 4 == 0) put(d.raw, i, std::nextafter(get<float>(d.raw, i), 1.0f));
    if (random() % 8 == 0) put(d.token, i, std::int64_t{0});
  }
}

}  // namespace

TEST_CASE(
    "sample by Hopper's exponential: the replay has the bits of the written rule, and takes its own "
    "records") {
  std::mt19937 random(51);
  std::int64_t seen[5] = {};
  for (int i = 0; i < 100; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random, {1, 7, 130, 1000, 2049, 17000});
    run_rule("sample", d.draw());
    const auto want = copies(d.results());
    REQUIRE(rlk::sample(d.draw(), kReplay));
    CHECK(copies(d.results()) == want);
    REQUIRE(rlk::sample_verify(d.verify(), kReplay));
    for (std::int64_t row = 0; row < d.rows; ++row) CHECK(get<std::int32_t>(d.status, row) == 0);
    spoil(d, random);
    run_rule("sample_verify", d.verify());
    const auto status = d.status.bytes;
    REQUIRE(rlk::sample_verify(d.verify(), kReplay));
    CHECK(d.status.bytes == status);
    for (std::int64_t row = 0; row < d.rows; ++row) ++seen[get<std::int32_t>(d.status, row)];
  }
  for (const std::int64_t n : seen) CHECK(n > 0);
}

TEST_CASE(
    "sample by Hopper's exponential: tokens and sets of sample, log-probabilities of logp over what stays") {
  std::mt19937 random(52);
  int compared = 0, differ = 0;
  for (int i = 0; i < 100; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random, {7, 130, 1000, 2049, 17000});
    REQUIRE(rlk::sample(d.draw(), {.backend = "native.rows"}));
    const auto other = copies(d.results());
    REQUIRE(rlk::sample(d.draw(), kReplay));
    for (const std::size_t same : {0, 3, 4, 5}) CHECK(d.results()[same]->bytes == other[same]);
    differ += d.logp.bytes != other[1];
    // Rows without a token are left out, and the largest entry is taken at temperature 1.
    Owned temperature({d.rows}, DType::f32), one({d.rows}, DType::f32), logp({d.rows}, DType::f32);
    for (std::int64_t row = 0; row < d.rows; ++row) {
      const auto t = get<float>(d.temperature, row);
      put(temperature, row, d.heated && t > 0 ? t : 1.0f), put(one, row, 1.0f);
    }
    for (const bool raw : {false, true}) {
      rlk::Logp a{.logits = d.logits.tensor, .target = d.token.tensor, .logp = logp.tensor};
      a.temperatures = raw && !d.raw_temperature ? one.tensor : temperature.tensor;
      if (!raw) a.keep = d.keep.tensor;
      a.softcap = d.softcap, a.vocab = d.vocab;
      a.logits_round = static_cast<rlk::Logp::LogitsRound>(d.draw().logits_round);
      REQUIRE(rlk::logp(a, kReplay));
      for (std::int64_t row = 0; row < d.rows; ++row) {
        if (get<std::int64_t>(d.token, row) < 0) continue;
        CHECK(get<std::uint32_t>(raw ? d.raw : d.logp, row) == get<std::uint32_t>(logp, row));
        ++compared;
      }
    }
  }
  CHECK(compared > 200);
  CHECK(differ > 10);
}

namespace {

// All steps of a call over `parts` parts: part(a) is each part's. The state and all partials on the way, and what merging gives.
template <class RunPart>
std::vector<std::vector<std::byte>> in_parts(Drawn& d, std::int64_t parts, RunPart part) {
  using Step = SamplePart::Step;
  const std::int64_t leaf = 16 * ((d.vocab + 127) / 128), each = 8 / parts, n = d.rows;
  std::vector<std::vector<std::byte>> seen;
  Owned state({n, 24}, DType::i64), next({n, 24}, DType::i64);
  const auto step = [&](Step which, std::int64_t digit) {
    constexpr std::int64_t kWidths[] = {1, 2048, 2048, 8};
    const std::int64_t width = kWidths[static_cast<int>(which)];
    Owned partials({parts, n, width}, DType::i64);
    for (std::int64_t i = 0; i < parts; ++i) {
      const std::int64_t begin = std::min(d.vocab, i * each * leaf),
                         end = std::min(d.vocab, (i + 1) * each * leaf);
      auto* const data = static_cast<std::byte*>(d.logits.tensor.dl().data) + begin * rlk::size_of(d.type);
      const Tensor mine(data, {n, end - begin}, d.type, {kDLCPU, 0}, {d.vocab + d.padding, 1}),
          to(partials.bytes.data() + 8 * i * n * width, {n, width}, DType::i64);
      Owned bits({n, (end - begin + 31) / 32}, DType::i32);
      SamplePart a = d.inputs<SamplePart>();
      a.logits = mine, a.partials = to;
      if (which != Step::largest) a.state = state.tensor;
      if (which == Step::token && i % 2 == 0) a.keep = bits.tensor;
      a.vocab_start = begin, a.leaf_first = i * each, a.leaf_count = each;
      a.step = which, a.digit = digit;
      part(a);
      seen.push_back(bits.bytes);
    }
    rlk::SampleMerge b{.partials = partials.tensor};
    d.options(b);
    if (which != Step::largest) b.state = state.tensor;
    if (which == Step::token)
      b.token = d.token.tensor, b.logp = d.logp.tensor, b.logp_raw = d.raw.tensor, b.count = d.count.tensor,
      b.bad_count = d.bad.tensor;
    else
      b.next = next.tensor;
    b.step = static_cast<rlk::SampleMerge::Step>(which), b.digit = digit;
    const rlk::Status merged = rlk::sample_merge(b);
    REQUIRE_MESSAGE(merged, std::string(merged.message()));
    if (which != Step::token)
      state.bytes = next.bytes, state.tensor = Tensor(state.bytes.data(), {n, 24}, DType::i64);
    seen.push_back(partials.bytes);
  };
  step(Step::largest, 0);
  for (const Step filter : {Step::top_k, Step::top_p})
    for (std::int64_t digit = 0; d.filtered && digit < 3; ++digit) step(filter, digit);
  step(Step::token, 0);
  return seen;
}

}  // namespace

TEST_CASE(
    "sample by Hopper's exponential: parts have the bits of their rule and merge to those of one call") {
  std::mt19937 random(53);
  for (int i = 0; i < 40; ++i)
    for (const std::int64_t parts : {1, 2, 8}) {
      CAPTURE(i);
      CAPTURE(parts);
      Drawn d = drawn(random, {7, 130, 1000, 17000});
      REQUIRE(rlk::sample(d.draw(), kReplay));
      const auto whole = copies(d.results());
      const auto seen = in_parts(d, parts, [](const SamplePart& a) {
        const rlk::Status ran = rlk::sample_part(a, kReplay);
        REQUIRE_MESSAGE(ran, std::string(ran.message()));
      });
      CHECK(copies(d.results()) == whole);
      CHECK(in_parts(d, parts, [](const SamplePart& a) { run_rule("sample_part", a); }) == seen);
    }
}

namespace {

struct OnFibers {
  std::int64_t many = 0;  // leaves that have a warp each
  static const char* draw(const Problem& p, void* rooms) {
    rlk::simt::sample::launch(p, static_cast<rlk::simt::sample::RowRoom*>(rooms), nullptr);
    return nullptr;
  }
  static const char* part(const Problem& p) {
    rlk::simt::sample::launch_part(p, nullptr);
    return nullptr;
  }
  static const char* note(const Problem& p, const rlk::cuda::sample::Sums& sums) {
    rlk::cuda::sample::launch_note(p, sums, nullptr);
    return nullptr;
  }
  const char* fold(const rlk::lse128::Problem& p, rlk::lse128::State* states) const {
    rlk::cuda::logp::launch_fold(p, rlk::simt::logp::whole(p), p.count, states, nullptr, nullptr, many);
    return nullptr;
  }
  static const char* finish(const Problem& p, const rlk::cuda::sample::Sums& sums) {
    rlk::cuda::sample::launch_finish(p, sums, nullptr);
    return nullptr;
  }
};

// In a workspace that holds garbage; `leaves`: a block for each leaf of a row.
template <class Args>
void run_on_fibers(const Args& a, bool leaves, std::int64_t many) {
  const Problem p = rlk::sampling::problem_of(a);
  const std::int64_t drawing =
      leaves ? p.rows * static_cast<std::int64_t>(sizeof(rlk::simt::sample::RowRoom)) : 0;
  std::vector<std::byte> room(static_cast<std::size_t>(rlk::cuda::sample::workspace_bytes(p, drawing)) + 64,
                              std::byte{0x7f});
  auto* const at =
      reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(room.data()) + 63) / 64 * 64);
  rlk::cuda::sample::Sums sums(p, drawing, at);
  if (!leaves) sums.draw = nullptr;
  CHECK(rlk::cuda::sample::run(p, sums, OnFibers{many}) == nullptr);
}

}  // namespace

TEST_CASE("sample by Hopper's exponential: kernels on fibers have the replay's tokens, sets and bits") {
  std::mt19937 random(54);
  for (int i = 0; i < 40; ++i) {
    CAPTURE(i);
    Drawn d = drawn(random, {1, 7, 1000, 1104, 3000, 17000});
    rlk_fiber::wave_size = 32;
    rlk_fiber::order = i % 2 == 0 ? rlk_fiber::Order::shuffled : rlk_fiber::Order::descending;
    Sample a = d.draw();
    // Results that not every call has: a set, one of the two log-probabilities.
    if (i % 3 == 0) a.keep = {};
    if (i % 5 == 1) a.logp = {};
    if (i % 5 == 2) a.logp_raw = {};
    REQUIRE(rlk::sample(a, kReplay));
    const auto want = copies(d.results());
    for (Owned* r : d.results())
      if (a.keep || r != &d.keep) std::fill(r->bytes.begin(), r->bytes.end() - 1, std::byte{0x7f});
    run_on_fibers(a, d.vocab > 5000 || i % 2 == 0, i % 4 < 2 ? 0 : 1 << 20);
    CHECK(copies(d.results()) == want);
    REQUIRE(rlk::sample(d.draw(), kReplay));
    spoil(d, random);
    REQUIRE(rlk::sample_verify(d.verify(), kReplay));
    const auto status = d.status.bytes;
    run_on_fibers(d.verify(), i % 2 == 0, 0);
    CHECK(d.status.bytes == status);
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE, rlk_fiber::order = rlk_fiber::Order::ascending;
}

TEST_CASE("sample by Hopper's exponential: parts on fibers are the replay's") {
  std::mt19937 random(55);
  for (int i = 0; i < 20; ++i)
    for (const std::int64_t parts : {1, 2, 8}) {
      CAPTURE(i);
      CAPTURE(parts);
      Drawn d = drawn(random, {7, 130, 1000, 3000});
      const auto want =
          in_parts(d, parts, [](const SamplePart& a) { REQUIRE(rlk::sample_part(a, kReplay)); });
      rlk_fiber::wave_size = 32;
      CHECK(in_parts(d, parts, [&](const SamplePart& a) {
              run_on_fibers(a, false, i % 2 == 0 ? 0 : 1 << 20);
            }) == want);
      rlk_fiber::wave_size = RLK_FIBER_WAVE;
    }
}
