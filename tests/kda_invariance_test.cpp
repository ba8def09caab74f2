// labels: conformance
// What a KDA result may not depend on, bit for bit: the batch, neighbours, later tokens, threads, the cut of
// a prefill. And what it must agree with: the golden form on every tail, width and grouping; the other
// layout; decode.
#include <doctest/doctest.h>

#include <algorithm>

#include "kda_case.hpp"

namespace {

using namespace kda_test;
using rlk::kda::Gate;

const char* const kResults[] = {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"};

// The part of a result that belongs to tokens [from, to) of batch row b, or to sequence n of a state.
std::vector<std::uint8_t> part(const Case& c, const std::string& name, std::int64_t from, std::int64_t to,
                               std::int64_t n) {
  const Buffer& b = c.out.at(name);
  const bool state = name == "ht" || name == "dh0";
  const std::int64_t rows = state ? c.p.sequences : c.p.batch * c.p.tokens;
  const auto row = std::int64_t(b.bytes.size()) / rows;
  const std::int64_t first = state ? n : from, last = state ? n + 1 : to;
  return {b.bytes.begin() + first * row, b.bytes.begin() + last * row};
}

// A case made of tokens [from, to) of row-flattened inputs and state n of c.
Case cut(const Case& c, std::int64_t from, std::int64_t to, std::int64_t n) {
  Case out;
  out.p = c.p;
  out.p.batch = out.p.sequences = 1;
  out.p.tokens = to - from;
  out.a_log = c.a_log;
  out.dt_bias = c.dt_bias;
  for (const auto& [name, b] : c.in) {
    const bool state = name == "h0" || name == "dht";
    const std::int64_t rows = state ? c.p.sequences : c.p.batch * c.p.tokens;
    const auto row = std::int64_t(b.bytes.size()) / rows;
    Buffer piece;
    piece.type = b.type;
    piece.bytes.assign(b.bytes.begin() + (state ? n : from) * row,
                       b.bytes.begin() + (state ? n + 1 : to) * row);
    out.in[name] = piece;
  }
  out.bind();
  return out;
}

void poison(Case& c, std::int64_t from, std::int64_t to) {
  for (auto& [name, b] : c.in) {
    if (name == "h0" || name == "dht") continue;
    const auto row = std::int64_t(b.bytes.size()) / (c.p.batch * c.p.tokens);
    std::fill(b.bytes.begin() + from * row, b.bytes.begin() + to * row, std::uint8_t{0xff});
  }
}

}  // namespace

TEST_CASE("kda chunked: every tail, width and grouping agrees with the golden form") {
  const Shape shapes[] = {{.tokens = 1, .k = 60, .v = 64},
                          {.tokens = 63, .k = 64, .v = 60},
                          {.batch = 2, .tokens = 64, .heads = 2, .value_heads = 4, .k = 64, .v = 100},
                          {.tokens = 65, .value_heads = 4, .k = 100, .v = 32},
                          {.tokens = 100, .heads = 2, .value_heads = 2, .k = 128, .v = 128},
                          {.tokens = 130, .k = 256, .v = 64},
                          {.tokens = 130, .k = 64, .v = 256},
                          {.tokens = 130, .k = 17, .v = 5},
                          {.tokens = 130, .masked = 0.1},
                          {.tokens = 130, .gate_scale = 5},
                          {.tokens = 130, .gate_scale = 0},
                          {.tokens = 130, .gate_scale = 0.005f, .collinear = true},
                          {.tokens = 130, .gate = Gate::softplus},
                          {.tokens = 130, .value_heads = 2, .gate = Gate::bounded, .norm = true},
                          {.tokens = 130, .norm = true, .sigmoid = true, .negative = true},
                          {.tokens = 130, .value_heads = 2, .v_first = true},
                          {.tokens = 100, .chunk = 32},
                          {.tokens = 97, .value_heads = 2, .bounds = {0, 0, 7, 7, 71, 97, 97}}};
  std::uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (Type type : {Type::f32, Type::bf16, Type::f16}) {
      CAPTURE(seed);
      Shape typed = shape;
      typed.type = type;
      Case golden = random_case(typed, seed), chunked = random_case(typed, seed);
      ++seed;
      REQUIRE(run(golden, "native.golden"));
      const rlk::Status status = run(chunked, "native.fma32");
      REQUIRE_MESSAGE(status, status.message());
      for (const auto& [name, truth] : golden.out) {
        CAPTURE(name);
        // fp32 results of 16-bit data owe nothing to rounding; 16-bit ones may differ by an ulp here and
        // there.
        const double bound = chunked.out.at(name).type == Type::f32 ? 1e-4 : 2e-3;
        CHECK(rms_ratio(chunked.out.at(name), truth.values()) <= bound);
      }
    }
  }
}

TEST_CASE("kda chunked: the scale default, 32-token chunks and 64-token chunks mean the same") {
  Case a = random_case({.tokens = 130}, 7), b = random_case({.tokens = 130, .chunk = 32}, 7);
  a.p.scale = 0;
  REQUIRE(run(a, "native.fma32"));
  REQUIRE(run(b, "native.fma32"));
  for (const char* name : kResults) CHECK(rms_ratio(a.out.at(name), b.out.at(name).values()) < 1e-5);
}

TEST_CASE("kda chunked: a sequence's bits do not depend on the batch or its place in it") {
  const Shape shape{
      .batch = 3, .tokens = 130, .heads = 2, .value_heads = 4, .k = 60, .v = 64, .gate = Gate::softplus};
  Case all = random_case(shape, 11);
  REQUIRE(run(all, "native.fma32"));
  for (std::int64_t n = 0; n < 3; ++n) {
    Case one = cut(all, n * 130, (n + 1) * 130, n);
    REQUIRE(run(one, "native.fma32"));
    for (const char* name : kResults) {
      CAPTURE(name);
      CHECK(part(one, name, 0, 130, 0) == part(all, name, n * 130, (n + 1) * 130, n));
    }
  }
}

TEST_CASE("kda chunked: a packed sequence's bits do not depend on its neighbours, be they NaN") {
  const std::vector<std::int64_t> bounds{0, 15, 79, 79, 209};
  for (bool poisoned : {false, true}) {
    Case all = random_case({.tokens = 209, .value_heads = 2, .bounds = bounds}, 12);
    if (poisoned) poison(all, 0, 15);
    REQUIRE(run(all, "native.fma32"));
    for (std::size_t n = 1; n + 1 < bounds.size(); ++n) {
      if (bounds[n] == bounds[n + 1]) continue;
      Case one = cut(all, bounds[n], bounds[n + 1], std::int64_t(n));
      REQUIRE(run(one, "native.fma32"));
      for (const char* name : kResults) {
        CAPTURE(name);
        CHECK(part(one, name, 0, one.p.tokens, 0) ==
              part(all, name, bounds[n], bounds[n + 1], std::int64_t(n)));
      }
    }
  }
}

TEST_CASE("kda chunked: an empty sequence keeps its state and passes its gradient through") {
  Case c = random_case({.tokens = 20, .bounds = {0, 0, 20, 20}}, 13);
  REQUIRE(run(c, "native.fma32"));
  const auto state = c.states() / 3;
  for (std::size_t n : {std::size_t{0}, std::size_t{2}}) {
    for (std::size_t i = n * state; i < (n + 1) * state; ++i) {
      REQUIRE(c.out.at("ht")[i] == c.in.at("h0")[i]);
      REQUIRE(c.out.at("dh0")[i] == c.in.at("dht")[i]);
    }
  }
}

TEST_CASE("kda chunked: outputs do not depend on later tokens, be they NaN") {
  Case all = random_case({.tokens = 130, .k = 60, .v = 48}, 14),
       spoiled = random_case({.tokens = 130, .k = 60, .v = 48}, 14);
  REQUIRE(run(all, "native.fma32"));
  for (std::int64_t from : {1, 5, 16, 40, 63, 64, 65, 129}) {
    CAPTURE(from);
    poison(spoiled, from, 130);
    Case again = cut(spoiled, 0, 130, 0);
    REQUIRE(run(again, "native.fma32"));
    CHECK(part(again, "o", 0, from, 0) == part(all, "o", 0, from, 0));
    Case prefix = cut(all, 0, from, 0);
    REQUIRE(run(prefix, "native.fma32"));
    CHECK(part(prefix, "o", 0, from, 0) == part(all, "o", 0, from, 0));
    spoiled = random_case({.tokens = 130, .k = 60, .v = 48}, 14);
  }
}

TEST_CASE("kda chunked: a prefill cut at a chunk boundary equals one call, bit for bit") {
  for (int chunk : {64, 32}) {
    for (bool v_first : {false, true}) {
      Case all = random_case({.tokens = 200, .value_heads = 2, .v_first = v_first, .chunk = chunk}, 15);
      REQUIRE(run(all, "native.fma32"));
      for (std::int64_t at : {std::int64_t(chunk), std::int64_t(2 * chunk)}) {
        Case head = cut(all, 0, at, 0), tail = cut(all, at, 200, 0);
        REQUIRE(run(head, "native.fma32"));
        tail.in["h0"] = head.out.at("ht");
        tail.bind();
        REQUIRE(run(tail, "native.fma32"));
        CHECK(part(head, "o", 0, at, 0) == part(all, "o", 0, at, 0));
        CHECK(part(tail, "o", 0, 200 - at, 0) == part(all, "o", at, 200, 0));
        CHECK(tail.out.at("ht") == all.out.at("ht"));
        // The backward of the tail hands its d_initial_state to the head.
        head.in["dht"] = tail.out.at("dh0");
        head.bind();
        REQUIRE(run(head, "native.fma32"));
        for (const char* name : {"dq", "dk", "dv", "dg", "dbeta"}) {
          CAPTURE(name);
          CHECK(part(head, name, 0, at, 0) == part(all, name, 0, at, 0));
        }
        CHECK(head.out.at("dh0") == all.out.at("dh0"));
      }
    }
  }
}

TEST_CASE("kda: the number of threads changes no bit") {
  for (const char* implementation : {"native.golden", "native.fma32"}) {
    const Shape shape{.batch = 3, .tokens = 70, .heads = 2, .value_heads = 4, .gate = Gate::bounded};
    Case first = random_case(shape, 16);
    REQUIRE(run(first, implementation, 1));
    for (std::int32_t threads : {2, 3, 7, 16}) {
      Case again = random_case(shape, 16);
      REQUIRE(run(again, implementation, threads));
      for (const auto& [name, b] : first.out) {
        CAPTURE(name);
        CHECK(again.out.at(name) == b);
      }
    }
  }
}

TEST_CASE("kda chunked: states kept by the forward give the same bits as states computed again") {
  for (bool v_first : {false, true}) {
    const Shape shape{.tokens = 150, .value_heads = 2, .v_first = v_first, .bounds = {0, 70, 70, 150}};
    Case recomputed = random_case(shape, 17), kept = random_case(shape, 17);
    REQUIRE(run(recomputed, "native.fma32"));
    const auto matrix = std::size_t(kept.p.k_dim * kept.p.v_dim * kept.p.value_heads);
    kept.out["chunk_states"] = Buffer(Type::f32, std::size_t(kept.p.slots()) * matrix);
    kept.out["chunk_inverses"] = Buffer(Type::f32, kept.tokens() * 2 * 64);
    REQUIRE(run(kept, "native.fma32"));
    for (const auto& [name, b] : recomputed.out) {
      CAPTURE(name);
      CHECK(kept.out.at(name) == b);
    }
    // Row 0 of the first chunk's inverse is (1, 0, 0, ..).
    CHECK(kept.out.at("chunk_inverses")[0] == 1.0f);
    CHECK(kept.out.at("chunk_inverses")[1] == 0.0f);
  }
}

TEST_CASE("kda: the two state layouts agree") {
  const auto turn = [](Buffer& b, std::size_t rows, std::size_t columns) {
    const std::vector<float> from = b.values();
    std::vector<float> to(from.size());
    for (std::size_t m = 0; m < from.size(); m += rows * columns) {
      for (std::size_t i = 0; i < rows; ++i) {
        for (std::size_t j = 0; j < columns; ++j) to[m + j * rows + i] = from[m + i * columns + j];
      }
    }
    b = Buffer(Type::f32, to);
  };
  for (const char* implementation : {"native.golden", "native.fma32"}) {
    Case a = random_case({.tokens = 90, .value_heads = 2, .k = 60, .v = 48}, 18);
    Case b = random_case({.tokens = 90, .value_heads = 2, .k = 60, .v = 48, .v_first = true}, 18);
    turn(b.in["h0"], 60, 48);
    turn(b.in["dht"], 60, 48);
    b.bind();
    REQUIRE(run(a, implementation));
    REQUIRE(run(b, implementation));
    turn(b.out["ht"], 48, 60);
    turn(b.out["dh0"], 48, 60);
    for (const char* name : kResults) {
      CAPTURE(name);
      CHECK(a.out.at(name) == b.out.at(name));
    }
  }
}

TEST_CASE("kda refuses packed bounds that do not cover the tokens in order") {
  for (std::vector<std::int64_t> bounds :
       {std::vector<std::int64_t>{0, 12, 7, 20}, {1, 20}, {0, 19}, {0, 21}}) {
    Case c = random_case({.tokens = 20, .bounds = bounds}, 19);
    const rlk::Status status = run(c, "native.fma32");
    CHECK(!status);
    CHECK(std::string(status.message()).find("cu_seqlens") != std::string::npos);
  }
}
