// labels: conformance fibers
// The portable GPU kernels of sample and sample_verify on fibers: native's tokens and bits, at both wave sizes and in any
// thread order.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "arithmetic/sample/bind.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "simt/sample/kernels.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

// Everything of a call, which both sides compute.
struct Results {
  std::vector<int64_t> token;
  std::vector<float> logp, raw;
  std::vector<int32_t> count, keep, bad, status;
  Results(std::size_t n, std::size_t v)
      : token(n, 7),
        logp(n, 7),
        raw(n, 7),
        count(n, 7),
        keep(n * ((v + 31) / 32), 7),
        bad(1, 7),
        status(n, 7) {}
  bool operator==(const Results& o) const {
    return token == o.token && same(logp, o.logp) && same(raw, o.raw) && count == o.count && keep == o.keep &&
           bad == o.bad && status == o.status;
  }
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
      return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
    });
  }
};

struct Inputs {
  int64_t n, v;
  DType type;
  std::vector<uint16_t> halves;
  std::vector<float> logits, temperature, top_p, min_p;
  std::vector<int32_t> top_k, stream;
  std::vector<int64_t> seed, position, token;

  Inputs(int64_t rows, int64_t columns, DType t, uint32_t seed_of) : n(rows), v(columns), type(t) {
    std::mt19937 random(seed_of);
    std::normal_distribution<float> normal(0, 2);
    for (int64_t i = 0; i < n * v; ++i) {
      // Ties, absent entries, and in the last row a NaN.
      float z = i % 7 == 3 ? std::round(normal(random)) : normal(random);
      if (i % 31 == 5) z = -INFINITY;
      if (i == n * v - 1 && n > 3) z = NAN;
      logits.push_back(z);
      halves.push_back(t == DType::bf16 ? rlk::float_to_bf16(z) : rlk::float_to_f16(z));
    }
    for (int64_t m = 0; m < n; ++m) {
      temperature.push_back(m % 5 == 2 ? 0.0f : 0.5f + 0.3f * static_cast<float>(m));
      top_p.push_back(m % 4 == 1 ? 1.0f : 0.9f - 0.2f * static_cast<float>(m % 3));
      min_p.push_back(m % 3 == 0 ? 0.0f : 0.01f);
      top_k.push_back(m % 3 == 1 ? 0 : static_cast<int32_t>(v / 2 + m));
      stream.push_back(static_cast<int32_t>(m));
      seed.push_back(0x123456789abcdef * m);
      position.push_back((int64_t{1} << 31) * m);
      token.push_back(m);
    }
  }
  Tensor rows() {
    return {type == DType::f32 ? static_cast<void*>(logits.data()) : halves.data(), {n, v}, type};
  }
};

template <class T>
Tensor view(std::vector<T>& x, DType t) {
  return {x.data(), {static_cast<int64_t>(x.size())}, t};
}

// sample(a) and sample_verify(b) over the same inputs.
template <class Run>
void both(Inputs& in, Results& out, bool filters, bool min_p_first, Run run) {
  const Tensor z = in.rows(), t = view(in.temperature, DType::f32), p = view(in.top_p, DType::f32),
               m = view(in.min_p, DType::f32), k = view(in.top_k, DType::i32),
               st = view(in.stream, DType::i32), s = view(in.seed, DType::i64),
               at = view(in.position, DType::i64), token = view(out.token, DType::i64),
               logp = view(out.logp, DType::f32), raw = view(out.raw, DType::f32),
               count = view(out.count, DType::i32), bad = view(out.bad, DType::i32),
               keep(out.keep.data(), {in.n, (in.v + 31) / 32}, DType::i32),
               recorded = view(in.token, DType::i64), status = view(out.status, DType::i32);
  rlk::Sample a{.logits = z, .temperature = t, .seed = s, .stream = st, .position = at, .token = token};
  a.logp = logp, a.logp_raw = raw, a.count = count, a.keep = keep, a.bad_count = bad;
  rlk::SampleVerify b{
      .logits = z, .temperature = t, .seed = s, .stream = st, .position = at, .token = recorded};
  b.logp = logp, b.logp_raw = raw, b.status = status;
  if (filters) a.top_k = b.top_k = k, a.top_p = b.top_p = p, a.min_p = b.min_p = m;
  if (min_p_first) {
    a.filter_order = b.filter_order = rlk::Sample::FilterOrder::min_p_first;
    a.softcap = b.softcap = 3;
    a.logits_round = b.logits_round = rlk::Sample::LogitsRound::bf16;
    a.raw_temperature = b.raw_temperature = false;
  }
  run(a, b);
}

}  // namespace

namespace {

// Every step of a call of sample over `parts` parts of its vocabulary: part(a) and merge(a) run one call each. Returns all
// numbers on the way.
template <class RunPart, class RunMerge>
std::vector<int64_t> in_parts(Inputs& in, int64_t parts, bool filters, bool min_p_first, Results& out,
                              RunPart part, RunMerge merge) {
  using Step = rlk::SamplePart::Step;
  constexpr int64_t kWidths[] = {1, 2048, 2048, 8};
  const int64_t leaf = 16 * ((in.v + 127) / 128), count = 8 / parts, size = rlk::size_of(in.type);
  std::vector<int64_t> state(static_cast<std::size_t>(in.n) * 24), next(state.size()), seen;
  const Tensor t = view(in.temperature, DType::f32), p = view(in.top_p, DType::f32),
               m = view(in.min_p, DType::f32), k = view(in.top_k, DType::i32),
               st = view(in.stream, DType::i32), s = view(in.seed, DType::i64),
               at = view(in.position, DType::i64), before(state.data(), {in.n, 24}, DType::i64),
               after(next.data(), {in.n, 24}, DType::i64);
  char* const whole = in.type == DType::f32 ? reinterpret_cast<char*>(in.logits.data())
                                            : reinterpret_cast<char*>(in.halves.data());
  const auto step = [&](Step which, int64_t digit) {
    const int64_t width = kWidths[static_cast<int>(which)];
    std::vector<int64_t> partials(static_cast<std::size_t>(parts * in.n * width), 99);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t start = std::min(in.v, i * count * leaf), end = std::min(in.v, (i + 1) * count * leaf);
      const Tensor z(whole + start * size, {in.n, end - start}, in.type, {kDLCPU, 0}, {in.v, 1}),
          to(partials.data() + i * in.n * width, {in.n, width}, DType::i64);
      const int64_t words = (end - start + 31) / 32;
      std::vector<int32_t> bits(static_cast<std::size_t>(in.n * words), 7);
      const Tensor keep(bits.data(), {in.n, words}, DType::i32);
      rlk::SamplePart a{
          .logits = z, .temperature = t, .seed = s, .stream = st, .position = at, .partials = to};
      if (filters) a.top_k = k, a.top_p = p, a.min_p = m;
      if (which != Step::largest) a.state = before;
      if (which == Step::token) a.keep = keep;
      if (min_p_first) {
        a.filter_order = rlk::SamplePart::FilterOrder::min_p_first;
        a.softcap = 3, a.logits_round = rlk::SamplePart::LogitsRound::bf16, a.raw_temperature = false;
      }
      a.vocab = in.v, a.vocab_start = start, a.leaf_first = i * count, a.leaf_count = count;
      a.step = which, a.digit = digit;
      part(a);
      seen.insert(seen.end(), bits.begin(), bits.end());
      for (int64_t row = 0; which == Step::token && row < in.n; ++row)
        for (int64_t id = start; id < end; ++id) {
          const int32_t word = bits[static_cast<std::size_t>(row * words + (id - start) / 32)];
          auto& to_word = out.keep[static_cast<std::size_t>(row * ((in.v + 31) / 32) + id / 32)];
          const auto bit = uint32_t{1} << (id % 32);
          to_word =
              static_cast<int32_t>((static_cast<uint32_t>(to_word) & ~bit) |
                                   (static_cast<uint32_t>(word) >> ((id - start) % 32) & 1) << (id % 32));
        }
    }
    const Tensor all(partials.data(), {parts, in.n, width}, DType::i64),
        token = view(out.token, DType::i64), logp = view(out.logp, DType::f32),
        raw = view(out.raw, DType::f32), n = view(out.count, DType::i32), bad = view(out.bad, DType::i32);
    rlk::SampleMerge b{.partials = all, .temperature = t};
    if (filters) b.top_k = k, b.top_p = p;
    if (which != Step::largest) b.state = before;
    if (which == Step::token)
      b.token = token, b.logp = logp, b.logp_raw = raw, b.count = n, b.bad_count = bad;
    else
      b.next = after;
    b.step = static_cast<rlk::SampleMerge::Step>(which), b.digit = digit;
    b.raw_temperature = !min_p_first;
    merge(b);
    if (which != Step::token) state = next;
    seen.insert(seen.end(), partials.begin(), partials.end());
    seen.insert(seen.end(), state.begin(), state.end());
  };
  std::fill(out.keep.begin(), out.keep.end(), 0);
  step(Step::largest, 0);
  for (int64_t d = 0; filters && d < 3; ++d) step(Step::top_k, d);
  for (int64_t d = 0; filters && d < 3; ++d) step(Step::top_p, d);
  step(Step::token, 0);
  return seen;
}

}  // namespace

TEST_CASE("a vocabulary in 1, 2, 4 or 8 parts gives sample's tokens, sets and bits, on fibers too") {
  const std::pair<int64_t, int64_t> shapes[] = {{6, 70}, {7, 1500}, {2, 3000}, {3, 5}, {2, 1}};
  for (const auto& [n, v] : shapes)
    for (int form = 0; form < 3; ++form)
      for (int64_t parts : {1, 2, 4, 8}) {
        const DType t = form == 0 ? DType::f32 : form == 1 ? DType::bf16 : DType::f16;
        CAPTURE(n);
        CAPTURE(v);
        CAPTURE(form);
        CAPTURE(parts);
        Inputs in(n, v, t, static_cast<uint32_t>(v + form));
        const auto rows = static_cast<std::size_t>(n), columns = static_cast<std::size_t>(v);
        Results whole(rows, columns), native(rows, columns);
        both(in, whole, form > 0, form == 2, [](const rlk::Sample& a, const rlk::SampleVerify&) {
          REQUIRE(rlk::sample(a, {.backend = "native.rows"}));
        });
        const auto seen = in_parts(
            in, parts, form > 0, form == 2, native,
            [](const rlk::SamplePart& a) {
              const rlk::Status status = rlk::sample_part(a, {.backend = "native.rows"});
              REQUIRE_MESSAGE(status, status.message());
            },
            [](const rlk::SampleMerge& a) {
              const rlk::Status status = rlk::sample_merge(a, {.backend = "native.rows"});
              REQUIRE_MESSAGE(status, status.message());
            });
        CHECK(native == whole);
        for (int wave : {32, 64}) {
          if (v > 2000 && wave == 32) continue;
          rlk_fiber::wave_size = wave;
          rlk_fiber::order = wave == 32 ? rlk_fiber::Order::ascending : rlk_fiber::Order::shuffled;
          Results device(rows, columns);
          const auto too = in_parts(
              in, parts, form > 0, form == 2, device,
              [](const rlk::SamplePart& a) {
                rlk::simt::sample::launch_part(rlk::sampling::problem_of(a), nullptr);
              },
              [](const rlk::SampleMerge& a) {
                rlk::simt::sample::launch_merge(rlk::sampling::problem_of(a), nullptr);
              });
          CAPTURE(wave);
          CHECK(too == seen);
          CHECK(device == whole);
        }
      }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

namespace {

// sample and sample_verify give on fibers what native gives.
void like_native(Inputs& in, bool filters, bool min_p_first) {
  const auto rows = static_cast<std::size_t>(in.n), columns = static_cast<std::size_t>(in.v);
  Results native(rows, columns);
  both(in, native, filters, min_p_first, [](const rlk::Sample& a, const rlk::SampleVerify& b) {
    REQUIRE(rlk::sample(a, {.backend = "native.rows"}));
    REQUIRE(rlk::sample_verify(b, {.backend = "native.rows"}));
  });
  if (in.v > 1) in.token = native.token;  // verified where it is what was drawn, too
  for (int wave : {32, 64})
    for (auto order : {rlk_fiber::Order::ascending, rlk_fiber::Order::shuffled}) {
      rlk_fiber::wave_size = wave;
      rlk_fiber::order = order;
      both(in, native, filters, min_p_first, [](const rlk::Sample&, const rlk::SampleVerify& b) {
        REQUIRE(rlk::sample_verify(b, {.backend = "native.rows"}));
      });
      for (bool leaves : {false, true}) {
        if (leaves && (wave == 32) != (order == rlk_fiber::Order::ascending)) continue;
        if (leaves && wave == 64 && in.v > 2000) continue;
        std::vector<rlk::simt::sample::RowRoom> rooms(rows);
        std::memset(static_cast<void*>(rooms.data()), 0x7f, rows * sizeof rooms[0]);
        Results device(rows, columns);
        both(in, device, filters, min_p_first, [&](const rlk::Sample& a, const rlk::SampleVerify& b) {
          rlk::simt::sample::launch(rlk::sampling::problem_of(a), leaves ? rooms.data() : nullptr, nullptr);
          rlk::simt::sample::launch(rlk::sampling::problem_of(b), leaves ? rooms.data() : nullptr, nullptr);
        });
        CAPTURE(wave);
        CAPTURE(leaves);
        CHECK(device == native);
      }
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE("sample and sample_verify on fibers are native's tokens and bits") {
  const std::pair<int64_t, int64_t> shapes[] = {{6, 70}, {4, 1500}, {4, 1504}, {2, 17000},
                                                {2, 5},  {3, 1},    {2, 0}};
  for (const auto& [n, v] : shapes)
    for (int form = 0; form < 3; ++form) {
      CAPTURE(n);
      CAPTURE(v);
      CAPTURE(form);
      Inputs in(n, v,
                form == 0   ? DType::f32
                : form == 1 ? DType::bf16
                            : DType::f16,
                static_cast<uint32_t>(v));
      like_native(in, form > 0, form == 2);
    }
}

// A filter lists what may be its last entry; here that is one of few, of too many to be listed, or where its histogram has no
// bins.
TEST_CASE("filters that end among few, many, equal or negative entries keep on fibers what native keeps") {
  const auto number = [](int kind, int64_t i, float x) {
    if (kind == 0) return 0.0f;                            // all are equal
    if (kind == 1) return std::round(x);                   // few numbers
    if (kind == 2) return i == 700 ? 0.001f : -4 - x / 8;  // most of the mass is below 0
    if (kind == 3) return i % 500 == 3 ? x : -INFINITY;    // few entries
    return i == 700 ? 1.0f : -1 - std::abs(x) / 8;         // mass below 0 that a histogram counts
  };
  for (int kind = 0; kind < 5; ++kind)
    for (bool min_p_first : {false, true})
      for (DType t : {DType::bf16, DType::f32}) {
        CAPTURE(kind);
        CAPTURE(min_p_first);
        Inputs in(4, t == DType::bf16 ? 1504 : 1500, t, 3);
        std::mt19937 random(5);
        std::normal_distribution<float> normal(0, 2);
        for (std::size_t i = 0; i < in.logits.size(); ++i) {
          in.logits[i] = number(kind, static_cast<int64_t>(i) % in.v, normal(random));
          in.halves[i] = rlk::float_to_bf16(in.logits[i]);
        }
        in.temperature.assign(4, 1.25f);
        in.top_k = {3, 600, 0, 40};
        in.top_p = {1, 0.9f, 0.7f, 0.5f};
        in.min_p = {0.3f, 0, 0.0001f, 0.5f};
        like_native(in, true, min_p_first);
      }
}

TEST_CASE("sample on fibers gives a row the same token and bits among one to 33 rows") {
  constexpr int64_t most = 33, v = 700;
  const Inputs all(most, v, DType::f32, 5);
  Inputs whole = all;
  Results want(most, v);
  both(whole, want, true, false, [](const rlk::Sample& a, const rlk::SampleVerify&) {
    REQUIRE(rlk::sample(a, {.backend = "native.rows"}));
  });
  for (int64_t n : {1, 2, 7, 8, 9, 16, 17, 33}) {
    CAPTURE(n);
    Inputs in = all;
    in.n = n;
    const auto rows = static_cast<std::size_t>(n);
    for (auto* x : {&in.temperature, &in.top_p, &in.min_p}) x->resize(rows);
    for (auto* x : {&in.top_k, &in.stream}) x->resize(rows);
    for (auto* x : {&in.seed, &in.position, &in.token}) x->resize(rows);
    Results got(rows, v);
    both(in, got, true, false, [](const rlk::Sample& a, const rlk::SampleVerify&) {
      rlk::simt::sample::launch(rlk::sampling::problem_of(a), nullptr, nullptr);
    });
    const auto first = [](const auto& part, const auto& whole_of) {
      return std::memcmp(part.data(), whole_of.data(), part.size() * sizeof(part[0])) == 0;
    };
    CHECK(first(got.token, want.token));
    CHECK(first(got.logp, want.logp));
    CHECK(first(got.raw, want.raw));
    CHECK(first(got.count, want.count));
    CHECK(first(got.keep, want.keep));
  }
}
