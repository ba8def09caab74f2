// labels: conformance
// What a KDA result may not depend on, bit for bit: the batch, neighbours, later tokens, threads, the cut of
// a prefill. And what it must agree with: the golden form on every tail, width and grouping; the other
// layout; decode.
#include <doctest/doctest.h>

#include "kda_promises.hpp"

namespace {

using namespace kda_test;
using rlk::kda::Gate;

void native(Case& c) {
  const rlk::Status status = run(c, "native.fma32");
  REQUIRE_MESSAGE(status, status.message());
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
    for (Float type : {Float::f32, Float::bf16, Float::f16}) {
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
        const double bound = chunked.out.at(name).type == Float::f32 ? 1e-4 : 2e-3;
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
  check_batch(
      {.batch = 3, .tokens = 130, .heads = 2, .value_heads = 4, .k = 60, .v = 64, .gate = Gate::softplus},
      native);
}

TEST_CASE("kda chunked: a packed sequence's bits do not depend on its neighbours, be they NaN") {
  check_neighbours({.tokens = 209, .value_heads = 2, .bounds = {0, 15, 79, 79, 209}}, native);
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

TEST_CASE("kda chunked: outputs do not depend on later tokens, be they NaN or infinite") {
  check_later_tokens({.tokens = 130, .k = 60, .v = 48}, native);
}

TEST_CASE("kda chunked: a token from the open chunk's start has the bits of a prefill") {
  const Shape shapes[] = {
      {.tokens = 195, .value_heads = 2},
      {.tokens = 130, .k = 60, .v = 48, .v_first = true},
      {.tokens = 130, .gate = Gate::bounded, .norm = true, .sigmoid = true},
      {.tokens = 130, .gate = Gate::softplus, .norm = true, .chunk = 32},
      {.tokens = 65, .masked = 0.1},
  };
  for (Shape shape : shapes)
    for (Float type : {Float::f32, Float::bf16, Float::f16}) {
      CAPTURE(shape.tokens);
      shape.type = type;
      check_open_chunks(shape, native);
    }
}

TEST_CASE("kda chunked: a prefill cut at a chunk boundary equals one call, bit for bit") {
  for (int chunk : {64, 32}) {
    for (bool v_first : {false, true}) {
      check_cut_prefill({.tokens = 200, .value_heads = 2, .v_first = v_first, .chunk = chunk}, native);
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
    kept.out["chunk_states"] = Buffer(Float::f32, std::size_t(kept.p.slots()) * matrix);
    kept.out["chunk_inverses"] = Buffer(Float::f32, kept.tokens() * 2 * 64);
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

TEST_CASE("kda: chunk_records belong to one arithmetic, the others say so; their size is the schema's") {
  Case c = random_case({.tokens = 130, .value_heads = 2, .bounds = {0, 65, 65, 130}}, 20);
  c.keep_records(c.record_bytes());
  for (const char* implementation : {"native.golden", "native.fma32", "native"}) {
    CAPTURE(implementation);
    Views views(c);
    for (const rlk::Status& status :
         {views.forward({.backend = implementation}), views.backward({.backend = implementation})}) {
      CHECK(status.code() == RLK_NO_IMPLEMENTATION);
      CHECK_MESSAGE(std::string(status.message()).find("chunk_records is given") != std::string::npos,
                    status.message());
    }
  }
  c.keep_records(c.record_bytes() - 16);
  Views views(c);
  const rlk::Status forward = views.forward({}), backward = views.backward({});
  CHECK(forward.message() == "kda_fwd: chunk_records is [5, 2, 29680], expected [5, 2, 29696]");
  CHECK(backward.message() == "kda_bwd: chunk_records has size 29680 in dimension 2, expected 29696");
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
    b = Buffer(Float::f32, to);
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
