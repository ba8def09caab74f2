// labels: conformance
// kda_step gives a token the bits that kda_fwd gives it, by every instruction set; and what a call of it may be.
#include <doctest/doctest.h>

#include <string>

#include "kda_steps.hpp"
#include "native/kda/chunk.hpp"
#include "native/kda/recurrent.hpp"
#include "rlk/rlk.hpp"

namespace {

using namespace kda_test;
using rlk::kda::Gate;
using rlk::native::Isa;
namespace native = rlk::native::kda;

// 64-byte aligned memory full of NaN.
struct Scratch {
  std::vector<float> memory;
  explicit Scratch(std::size_t bytes) : memory(bytes / 4 + 32, NAN) {}
  float* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
  }
};

Run prefill_by(const native::Engine& engine) {
  return [&engine](Case& c) {
    Scratch scratch(native::forward_scratch_bytes(c.p));
    for (std::int64_t i = 0; i < native::forward_task_count(c.p); ++i) engine.forward(c.p, i, scratch.data());
  };
}
RunStep step_by(const native::Engine& engine) {
  return [&engine](const Step& p) {
    Scratch scratch(native::step_scratch_bytes(p));
    for (std::int64_t i = 0; i < native::forward_task_count(p); ++i) engine.step(p, i, scratch.data());
  };
}

void golden_step(const Step& p) {
  Scratch scratch(native::recurrent::step_scratch(p));
  for (std::int64_t i = 0; i < native::forward_task_count(p); ++i)
    native::recurrent::step(p, i, scratch.data());
}

template <class Check>
void by_every_engine(Check check) {
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (isa > rlk::native::widest(rlk_cpu_level())) continue;
    CAPTURE(rlk::native::kIsaWords[int(isa)]);
    check(native::engine_for(isa));
  }
}

// All of out.
std::vector<float> token_by_token(Decoded& d, const RunStep& step) {
  const Problem& p = d.all.p;
  const std::int64_t width = std::int64_t(p.value_heads) * p.v_dim;
  std::vector<float> out(std::size_t(p.batch * p.tokens * width));
  const std::vector<std::int64_t> one(std::size_t(p.batch), 1);
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    Case c = d.next(one, one, false);
    d.run(c, step);
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t j = 0; j < width; ++j)
        out[std::size_t((b * p.tokens + t) * width + j)] = c.out.at("o")[std::size_t(b * width + j)];
      d.rows[std::size_t(b)] += 1, d.at[std::size_t(b)] += 1;
    }
  }
  return out;
}

// One sequence and head of K = V = 16 as a call of the library.
struct Call {
  std::vector<float> x = std::vector<float>(64 * 16, 0.1f), g = std::vector<float>(64 * 16, -0.1f),
                     beta = std::vector<float>(64, 0.5f), state = std::vector<float>(256, 1),
                     out = std::vector<float>(64 * 16), cache;
  std::vector<std::int64_t> rows{0};
  rlk::Tensor q, gate, strength, s, o, r, kept;
  rlk::KdaStep args;

  explicit Call(std::int64_t tokens)
      : q(x.data(), {1, tokens, 1, 16}, rlk::DType::f32),
        gate(g.data(), {1, tokens, 1, 16}, rlk::DType::f32),
        strength(beta.data(), {1, tokens, 1}, rlk::DType::f32),
        s(state.data(), {1, 1, 16, 16}, rlk::DType::f32),
        o(out.data(), {1, tokens, 1, 16}, rlk::DType::f32),
        r(rows.data(), {1}, rlk::DType::i64),
        args{.q = q, .k = q, .v = q, .g = gate, .beta = strength, .rows = r, .state = s, .out = o} {}
  void keep() {
    const auto found = rlk::check(rlk::infer(args, "cache"));
    cache.assign(std::size_t(found.shape[2]), 0);
    kept = rlk::Tensor(cache.data(), {1, 1, found.shape[2]}, rlk::DType::f32);
    args.cache = kept;
  }
  std::string run() {
    const rlk::Status status = rlk::kda_step(args);
    return status ? "" : std::string(status.message());
  }
};

}  // namespace

TEST_CASE("kda_step: tokens in any pieces, with refused drafts, have the bits of a prefill") {
  const Shape shapes[] = {
      {.tokens = 192, .value_heads = 2},
      {.tokens = 130, .heads = 2, .value_heads = 4, .k = 60, .v = 48, .v_first = true},
      {.tokens = 128,
       .k = 48,
       .v = 16,
       .gate = Gate::bounded,
       .v_first = true,
       .norm = true,
       .sigmoid = true},
      {.tokens = 96, .gate = Gate::softplus, .norm = true, .negative = true, .chunk = 32},
      {.tokens = 65, .masked = 0.1},
      {.tokens = 70, .gate_scale = 0.005f, .collinear = true},
  };
  by_every_engine([&](const native::Engine& engine) {
    for (Shape shape : shapes)
      for (Float type : {Float::f32, Float::bf16, Float::f16}) {
        CAPTURE(shape.tokens);
        shape.type = type;
        check_steps(shape, false, prefill_by(engine), step_by(engine));
      }
  });
}

TEST_CASE("kda_step: sequences of a batch go on at their own pace, packed or side by side") {
  by_every_engine([&](const native::Engine& engine) {
    for (bool packed : {false, true})
      check_steps({.batch = 3, .tokens = 128, .value_heads = 2, .k = 16, .v = 20}, packed, prefill_by(engine),
                  step_by(engine));
  });
}

TEST_CASE("kda_step: what a decoder must not do shows") {
  by_every_engine([&](const native::Engine& engine) {
    check_step_errors({.tokens = 130}, prefill_by(engine), step_by(engine));
  });
}

TEST_CASE("kda_step: golden vectors token by token") {
  const RunStep forms[] = {step_by(native::engine_for(rlk::native::widest(rlk_cpu_level()))), golden_step};
  for (const char* name :
       {"base_t64", "bf16_d128_t130", "gate_lower_bound", "gate_softplus", "gva_h2_hv4", "kimi_like_d128",
        "l2norm_sigmoid_neg", "masked_gates", "strong_gates", "slow_gates_collinear", "tail_t100_kv"})
    for (const RunStep& step : forms) {
      CAPTURE(name);
      const bool golden = &step == &forms[1];
      CAPTURE(golden);
      Case from = from_golden(read_golden(std::string(RLK_TEST_DATA) + "/kda/" + name + ".safetensors"));
      const Problem& p = from.p;
      Decoded d({.batch = p.batch,
                 .tokens = p.tokens,
                 .heads = p.heads,
                 .value_heads = p.value_heads,
                 .k = p.k_dim,
                 .v = p.v_dim},
                1);
      d.all = std::move(from);
      const std::size_t matrix = d.state.size();
      d.state = d.all.in.count("h0") ? d.all.in.at("h0") : Buffer(Float::f32, std::vector<float>(matrix, 0));
      CHECK(rms_ratio(Buffer(Float::f32, token_by_token(d, step)), d.all.truth.at("o")) <
            (golden ? 2e-7 : 2e-6));
    }
}

TEST_CASE("kda_step names rows that are not in the chunk, and tokens for which there is no room") {
  Call c(4);
  CHECK(c.run() == "");  // without a cache a call starts at its chunk's first row
  c.rows[0] = 1;
  CHECK(c.run() == "kda_step: rows[0] is 1, expected 0 without a cache");
  c.keep();
  CHECK(c.cache.size() == std::size_t(64 * (4 * 16 + 64) + 16 * 64 + 2 * 4 * 16));
  c.rows[0] = 60;
  CHECK(c.run() == "");
  c.rows[0] = 61;
  CHECK(c.run() == "kda_step: rows[0] is 61 and 4 tokens follow, the chunk has room for 3");
  c.rows[0] = 65;
  CHECK(c.run() == "kda_step: rows[0] is 65, expected 0 to 64");
  c.rows[0] = -1;
  CHECK(c.run() == "kda_step: rows[0] is -1, expected 0 to 64");
  c.rows[0] = 64;
  CHECK(c.run() == "");
  c.args.chunk_size = 32;
  c.rows[0] = 0;
  CHECK(c.run() == "kda_step: cache is [1, 1, 9344], expected [1, 1, 3648]");
  std::vector<float> many(65 * 16), few(65);
  const rlk::Tensor x(many.data(), {1, 65, 1, 16}, rlk::DType::f32),
      b(few.data(), {1, 65, 1}, rlk::DType::f32);
  c.args.q = c.args.k = c.args.v = c.args.g = x;
  c.args.beta = b, c.args.chunk_size = 64;
  CHECK(c.run() == "kda_step: q has T=65 tokens, a chunk has 64 rows");
}
