// labels: conformance
// fma32/kda/seg4096: what segments promise of their bits and their accuracy, by every instruction set that runs.
#include "kda_segments.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

namespace {

using namespace kda_test;
using rlk::kda::Gate;

void forward(Case& c, std::string_view implementation, std::int32_t threads = 0) {
  Views views(c);
  rlk::Options options;
  options.backend = implementation;
  options.threads = threads;
  const rlk::Status status = views.forward(options);
  REQUIRE_MESSAGE(status, status.message());
}
void segments(Case& c) { forward(c, "native.seg4096"); }

void both(Case& c, std::string_view implementation = "native.seg4096", std::int32_t threads = 0,
          const std::set<std::string>& without = {}) {
  Views views(c);
  rlk::Options options;
  options.backend = implementation;
  options.threads = threads;
  for (const rlk::Status& status : {views.forward(options), views.backward(options, without)})
    REQUIRE_MESSAGE(status, status.message());
}

// Near 1, parallel, masked, and gates inside.
const Shape kHardShapes[] = {
    {.k = 32, .v = 32},
    {.k = 32, .v = 32, .collinear = true},
    {.k = 32, .v = 32, .masked = 0.001},
    {.k = 32, .v = 32, .gate = Gate::bounded, .norm = true, .sigmoid = true},
    {.k = 32, .v = 32, .gate = Gate::softplus, .norm = true, .sigmoid = true, .negative = true}};

// Of a forward alone.
Case lasting_forward(const Shape& s, std::uint32_t seed) {
  Case c = lasting(s, seed);
  c.in.erase("do");
  c.bind();
  return c;
}

Case part_of(const Case& all, std::int64_t from, std::int64_t to, const Buffer* state = nullptr) {
  Case c = cut(all, from, to, 0);
  if (state) c.in["h0"] = *state;
  c.bind();
  return c;
}

}  // namespace

TEST_CASE(
    "kda segments: on request; below a segment the bits are those of fma32/kda, behind one they are not") {
  const Shape shape{.tokens = kSegment + 70, .k = 16, .v = 16};
  Case all = lasting_forward(shape, 1), chain = lasting_forward(shape, 1), usual = lasting_forward(shape, 1);
  {
    Views views(all);
    rlk::Options options;
    options.arithmetic = "fma32/kda/seg4096";
    const rlk::Status status = views.forward(options);
    REQUIRE_MESSAGE(status, status.message());
  }
  forward(usual, "native");
  forward(chain, "native.fma32");
  CHECK(part(all, "o", 0, kSegment, 0) == part(chain, "o", 0, kSegment, 0));
  CHECK(part(all, "o", kSegment, kSegment + 70, 0) != part(chain, "o", kSegment, kSegment + 70, 0));
  CHECK(all.out.at("ht") != chain.out.at("ht"));
  CHECK(usual.out.at("o") == chain.out.at("o"));
  Case below = part_of(all, 0, kSegment - 1), plain = part_of(all, 0, kSegment - 1);
  segments(below);
  forward(plain, "native.fma32");
  CHECK(below.out.at("o") == plain.out.at("o"));
  CHECK(below.out.at("ht") == plain.out.at("ht"));
}

TEST_CASE("kda segments: a prefill cut where a segment begins equals one call, bit for bit") {
  for (std::int64_t tail : {0, 1, 70})
    for (bool v_first : {false, true})
      for (int chunk : {64, 32}) {
        CAPTURE(tail);
        CAPTURE(chunk);
        const std::int64_t tokens = 2 * kSegment + tail;
        Case all = lasting_forward(
            {.tokens = tokens, .value_heads = 2, .k = 20, .v = 12, .v_first = v_first, .chunk = chunk}, 2);
        segments(all);
        for (std::int64_t at : {kSegment, 2 * kSegment}) {
          if (at == tokens) continue;
          CAPTURE(at);
          Case head = part_of(all, 0, at);
          segments(head);
          Case rest = part_of(all, at, tokens, &head.out.at("ht"));
          segments(rest);
          CHECK(part(head, "o", 0, at, 0) == part(all, "o", 0, at, 0));
          CHECK(part(rest, "o", 0, tokens - at, 0) == part(all, "o", at, tokens, 0));
          CHECK(rest.out.at("ht") == all.out.at("ht"));
        }
      }
}

TEST_CASE("kda segments: inside the open segment fma32/kda goes on with the bits of a longer prefill") {
  const std::int64_t tokens = kSegment + 300;
  Case all = lasting_forward({.tokens = tokens, .k = 16, .v = 16}, 9);
  segments(all);
  for (std::int64_t at : {kSegment, kSegment + 64, kSegment + 256}) {
    CAPTURE(at);
    Case head = part_of(all, 0, at);
    segments(head);
    Case rest = part_of(all, at, tokens, &head.out.at("ht"));
    forward(rest, "native.fma32");
    CHECK(part(rest, "o", 0, tokens - at, 0) == part(all, "o", at, tokens, 0));
  }
}

TEST_CASE("kda segments: a final state that nobody wants changes no output") {
  for (std::int64_t tokens : {2 * kSegment, 2 * kSegment + 1}) {
    Case all = lasting_forward({.tokens = tokens, .k = 16, .v = 16}, 10);
    segments(all);
    const Buffer out = all.out.at("o");
    rlk::KdaFwd a;
    const auto of = [&](const char* name, std::vector<std::int64_t> shape) {
      return rlk::Tensor(all.in.at(name).bytes.data(), shape, rlk::DType::f32);
    };
    const rlk::Tensor q = of("q", {1, tokens, 1, 16}), k = of("k", {1, tokens, 1, 16}),
                      v = of("v", {1, tokens, 1, 16}), g = of("g", {1, tokens, 1, 16}),
                      beta = of("beta", {1, tokens, 1}), h0 = of("h0", {1, 1, 16, 16}),
                      o(all.out.at("o").bytes.data(), {1, tokens, 1, 16}, rlk::DType::f32);
    a.q = q, a.k = k, a.v = v, a.g = g, a.beta = beta, a.initial_state = h0, a.out = o;
    std::fill(all.out.at("o").bytes.begin(), all.out.at("o").bytes.end(), std::uint8_t{0xff});
    const rlk::Status status = rlk::kda_fwd(a, {.arithmetic = "fma32/kda/seg4096"});
    REQUIRE_MESSAGE(status, status.message());
    CHECK(all.out.at("o") == out);
  }
}

TEST_CASE("kda segments: a rank's map comes of plain calls, and one product and a sum join it") {
  constexpr int K = 24, V = 16;
  Case all = lasting_forward({.tokens = 2 * kSegment, .k = K, .v = V, .v_first = true}, 3);
  segments(all);
  Buffer state = all.in.at("h0");
  for (std::int64_t at : {std::int64_t{0}, kSegment}) {
    // U: no state before it. T: the unit matrix before it, and no values.
    Case u = cut(all, at, at + kSegment, 0), t = cut(all, at, at + kSegment, 0);
    u.in.erase("h0");
    u.bind();
    forward(u, "native.fma32");
    t.p.v_dim = K;
    t.in["v"] = Buffer(Float::f32, std::vector<float>(std::size_t(kSegment) * K));
    std::vector<float> unit(K * K);
    for (std::size_t d = 0; d < K; ++d) unit[d * K + d] = 1;
    t.in["h0"] = Buffer(Float::f32, unit);
    t.bind();
    forward(t, "native.fma32");
    // [V, K] states are rows of hidden states, and T [K, K], turned back, the weight of lm_head.
    std::vector<float> rows = state.values(), turned = t.out.at("ht").values(), weight(K * K), moved(V * K),
                       sum(V * K);
    for (std::size_t d = 0; d < K; ++d)
      for (std::size_t m = 0; m < K; ++m) weight[d * K + m] = turned[m * K + d];
    rlk::LmHead join;
    const rlk::Tensor hidden(rows.data(), {V, K}, rlk::DType::f32),
        matrix(weight.data(), {K, K}, rlk::DType::f32), out(moved.data(), {V, K}, rlk::DType::f32);
    join.hidden = hidden, join.weight = matrix, join.out = out;
    rlk::Options options;
    options.arithmetic = "fma32/kb1024";
    const rlk::Status status = rlk::lm_head(join, options);
    REQUIRE_MESSAGE(status, status.message());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = moved[i] + u.out.at("ht")[i];
    state = Buffer(Float::f32, sum);
  }
  CHECK(state == all.out.at("ht"));
}

TEST_CASE("kda segments: bits do not depend on batch, heads, neighbours, threads or later tokens") {
  const Shape shape{.batch = 2, .tokens = kSegment + 33, .heads = 1, .value_heads = 2, .k = 16, .v = 16};
  Case all = lasting_forward(shape, 4);
  segments(all);
  for (std::int64_t n = 0; n < 2; ++n) {
    Case one = cut(all, n * shape.tokens, (n + 1) * shape.tokens, n);
    segments(one);
    CHECK(part(one, "o", 0, shape.tokens, 0) == part(all, "o", n * shape.tokens, (n + 1) * shape.tokens, n));
    CHECK(part(one, "ht", 0, 0, 0) == part(all, "ht", 0, 0, n));
  }
  for (std::int32_t threads : {1, 3, 16}) {
    Case again = lasting_forward(shape, 4);
    forward(again, "native.seg4096", threads);
    CHECK(again.out.at("o") == all.out.at("o"));
    CHECK(again.out.at("ht") == all.out.at("ht"));
  }
  Case spoiled = lasting_forward({.tokens = kSegment + 33, .k = 16, .v = 16}, 5),
       sound = lasting_forward({.tokens = kSegment + 33, .k = 16, .v = 16}, 5);
  segments(sound);
  poison(spoiled, kSegment + 5, kSegment + 33);
  segments(spoiled);
  CHECK(part(spoiled, "o", 0, kSegment + 5, 0) == part(sound, "o", 0, kSegment + 5, 0));
}

TEST_CASE("kda segments: packed sequences of any length are those sequences alone") {
  const std::int64_t S = kSegment;
  const std::vector<std::int64_t> bounds{0, 0, 100, S - 1, 2 * S - 1, 2 * S - 1, 4 * S + 6, 4 * S + 7};
  Case all =
      lasting_forward({.tokens = bounds.back(), .value_heads = 2, .k = 16, .v = 16, .bounds = bounds}, 6);
  segments(all);
  for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
    CAPTURE(n);
    Case one = cut(all, bounds[n], bounds[n + 1], std::int64_t(n));
    if (one.p.tokens == 0) {
      CHECK(part(all, "ht", 0, 0, std::int64_t(n)) == one.in.at("h0").bytes);
      continue;
    }
    segments(one);
    CHECK(part(one, "o", 0, one.p.tokens, 0) == part(all, "o", bounds[n], bounds[n + 1], std::int64_t(n)));
    CHECK(part(one, "ht", 0, 0, 0) == part(all, "ht", 0, 0, std::int64_t(n)));
  }
}

TEST_CASE("kda segments: every instruction set has the same bits") {
  for (Float type : {Float::f32, Float::bf16, Float::f16}) {
    const Shape shape{.tokens = 2 * kSegment + 40,
                      .k = 24,
                      .v = 20,
                      .gate = Gate::bounded,
                      .norm = true,
                      .sigmoid = true,
                      .type = type};
    Case first = lasting_forward(shape, 7);
    forward(first, "native.seg4096.scalar");
    for (const char* level : {"native.seg4096.avx2", "native.seg4096.avx512"}) {
      Case other = lasting_forward(shape, 7);
      Views views(other);
      rlk::Options options;
      options.backend = level;
      if (const rlk::Status status = views.forward(options); !status) {
        MESSAGE(status.message());  // this processor, or RLK_CPU, has less
        continue;
      }
      CHECK(other.out.at("o") == first.out.at("o"));
      CHECK(other.out.at("ht") == first.out.at("ht"));
    }
  }
}

TEST_CASE(
    "kda segments: five seeds of lasting, parallel, masked and gated data keep the bounds of fma32/kda") {
  for (Shape shape : kHardShapes)
    for (Float type : {Float::f32, Float::bf16})
      for (std::uint32_t seed : {11, 12, 13, 14, 15}) {
        CAPTURE(seed);
        CAPTURE(int(shape.gate));
        CAPTURE(shape.collinear);
        shape.tokens = 2 * kSegment + 100;
        shape.type = type;
        // Faint writes on odd seeds, full ones on even ones.
        const auto make = [&] {
          if (seed % 2) return lasting_forward(shape, seed);
          Shape s = shape;
          s.gate_scale = 1e-4f;
          return random_case(s, seed);
        };
        Case c = make(), truth = make();
        for (auto& [name, b] : truth.out) b = Buffer(Float::f32, b.size());
        segments(c);
        forward(truth, "native.golden");
        for (const char* name : {"o", "ht"}) {
          CAPTURE(name);
          CHECK(rms_ratio(c.out.at(name), truth.out.at(name).values()) <=
                (type == Float::f32 ? 1e-4 : 0.005));
        }
      }
}

TEST_CASE("kda segments back: every gradient is of plain calls, and before a segment their join") {
  const std::int64_t bounds[] = {0, kSegment, 2 * kSegment, 2 * kSegment + 100};
  for (std::size_t pieces : {2, 3})
    for (Gate gate : {Gate::none, Gate::bounded})
      for (bool v_first : {false, true})
        for (int chunk : {64, 32}) {
          CAPTURE(pieces);
          CAPTURE(v_first);
          CAPTURE(chunk);
          Case all = lasting({.tokens = bounds[pieces],
                              .k = 20,
                              .v = 12,
                              .gate = gate,
                              .v_first = v_first,
                              .norm = gate != Gate::none,
                              .chunk = chunk},
                             31);
          const auto given = all.in;
          both(all);
          CHECK(all.in == given);
          check_gradients_of_parts(
              all, std::span(bounds).first(pieces + 1), segments, [](Case& c) { forward(c, "native.fma32"); },
              [](Case& c) { both(c, "native.fma32"); });
        }
}

TEST_CASE("kda segments back: below a segment the bits of fma32/kda, behind one others") {
  for (Gate gate : {Gate::none, Gate::softplus}) {
    Shape shape{.tokens = kSegment - 1, .heads = 2, .value_heads = 4, .k = 16, .v = 16, .gate = gate};
    Case below = lasting(shape, 32), chain = lasting(shape, 32);
    both(below), both(chain, "native.fma32");
    for (const auto& [name, b] : chain.out) {
      CAPTURE(name);
      CHECK(below.out.at(name) == b);
    }
  }
  const Shape shape{.tokens = kSegment + 70, .k = 16, .v = 16};
  Case all = lasting(shape, 33), chain = lasting(shape, 33);
  both(all), both(chain, "native.fma32");
  CHECK(part(all, "dv", kSegment, shape.tokens, 0) == part(chain, "dv", kSegment, shape.tokens, 0));
  CHECK(all.out.at("dh0") != chain.out.at("dh0"));
}

TEST_CASE("kda segments back: batch, heads, threads, packing and neighbours change no bit") {
  const Run run = [](Case& c) { both(c); };
  check_batch({.batch = 2,
               .tokens = kSegment + 33,
               .heads = 2,
               .value_heads = 4,
               .k = 16,
               .v = 16,
               .gate_scale = 1e-4f},
              run);
  const std::int64_t S = kSegment;
  check_neighbours({.tokens = 4 * S + 108,
                    .value_heads = 2,
                    .k = 16,
                    .v = 16,
                    .bounds = {0, 0, 100, S - 1, 2 * S - 1, 2 * S - 1, 4 * S + 107, 4 * S + 108},
                    .gate_scale = 1e-4f},
                   run);
  const Shape shape{.batch = 2, .tokens = S + 33, .value_heads = 2, .k = 16, .v = 16, .gate = Gate::softplus};
  Case all = lasting(shape, 34);
  both(all);
  for (std::int32_t threads : {1, 3, 16}) {
    Case again = lasting(shape, 34);
    both(again, "native.seg4096", threads);
    for (const auto& [name, b] : all.out) {
      CAPTURE(name);
      CHECK(again.out.at(name) == b);
    }
  }
}

TEST_CASE("kda segments back: kept states and a gradient that nobody wants change no bit") {
  for (std::int64_t tail : {0, 70}) {
    CAPTURE(tail);
    const Shape shape{.tokens = 2 * kSegment + tail, .k = 16, .v = 16};
    Case all = lasting(shape, 35), kept = lasting(shape, 35), fewer = lasting(shape, 35);
    both(all);
    kept.out["chunk_states"] = Buffer(Float::f32, std::size_t(kept.p.slots()) * 256);
    both(kept);
    both(fewer, "native.seg4096", 0, {"dh0"});
    for (const auto& [name, b] : all.out) {
      CAPTURE(name);
      CHECK(kept.out.at(name) == b);
      if (name != "dh0") CHECK(fewer.out.at(name) == b);
    }
  }
}

TEST_CASE("kda segments back: every instruction set has the same bits") {
  const Shape shape{.tokens = 2 * kSegment + 40,
                    .value_heads = 2,
                    .k = 24,
                    .v = 20,
                    .gate = Gate::bounded,
                    .norm = true,
                    .sigmoid = true,
                    .type = Float::bf16};
  Case first = lasting(shape, 36);
  both(first, "native.seg4096.scalar");
  for (const char* level : {"native.seg4096.avx2", "native.seg4096.avx512"}) {
    Case other = lasting(shape, 36);
    if (const rlk::Status status = run(other, level); !status) {
      MESSAGE(status.message());  // this processor, or RLK_CPU, has less
      continue;
    }
    for (const auto& [name, b] : first.out) {
      CAPTURE(name);
      CHECK(other.out.at(name) == b);
    }
  }
}

TEST_CASE("kda segments back: five seeds of lasting, parallel, masked and gated data keep every bound") {
  for (Shape shape : kHardShapes)
    for (Float type : {Float::f32, Float::bf16})
      for (std::uint32_t seed : {11, 12, 13, 14, 15}) {
        CAPTURE(seed);
        CAPTURE(int(shape.gate));
        CAPTURE(int(type));
        CAPTURE(shape.collinear);
        shape.tokens = 2 * kSegment + 100;
        shape.type = type, shape.gate_scale = 1e-4f;
        const auto make = [&] { return seed % 2 ? lasting(shape, seed) : random_case(shape, seed); };
        Case c = make(), truth = make();
        for (auto& [name, b] : truth.out) b = Buffer(Float::f32, b.size());
        both(c);
        both(truth, "native.golden");
        for (const auto& [name, error] : errors_of(c, truth)) {
          CAPTURE(name);
          CHECK(error <= (type == Float::f32 ? 1e-4 : bound16(name)));
        }
      }
}
