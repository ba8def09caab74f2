// labels: conformance
// kda_decode continues a prefill, in place or not, in both layouts; kda_gate and kda_gate_bwd are the gate of
// kda_fwd.
#include <doctest/doctest.h>

#include "kda_case.hpp"

namespace {

using namespace kda_test;
using rlk::kda::Gate;

struct DecodeCall {
  std::vector<float> q, k, v, g, beta, a_log, dt_bias, state, state_out, out;
};

// Decodes token t of a one-sequence fp32 case.
rlk::Status decode(Case& c, std::int64_t t, std::vector<float>& state, std::vector<float>& out,
                   std::string_view implementation, bool in_place) {
  const Problem& p = c.p;
  const std::int64_t H = p.heads, HV = p.value_heads, K = p.k_dim, V = p.v_dim;
  const auto row = [&](const char* name, std::int64_t width) {
    return reinterpret_cast<float*>(c.in.at(name).bytes.data()) + t * width;
  };
  std::vector<float> next(state.size(), NAN);
  out.assign(std::size_t(HV * V), NAN);
  const std::int64_t first = p.v_first ? V : K, second = p.v_first ? K : V;
  const rlk::Tensor q(row("q", H * K), {1, H, K}, rlk::DType::f32),
      k(row("k", H * K), {1, H, K}, rlk::DType::f32), v(row("v", HV * V), {1, HV, V}, rlk::DType::f32),
      g(row("g", HV * K), {1, HV, K}, rlk::DType::f32), beta(row("beta", HV), {1, HV}, rlk::DType::f32),
      before(state.data(), {1, HV, first, second}, rlk::DType::f32),
      after(in_place ? state.data() : next.data(), {1, HV, first, second}, rlk::DType::f32),
      o(out.data(), {1, HV, V}, rlk::DType::f32);
  rlk::Tensor a_log(c.a_log.data(), {HV}, rlk::DType::f32),
      dt_bias(c.dt_bias.data(), {HV, K}, rlk::DType::f32);
  rlk::KdaDecode a{
      .q = q, .k = k, .v = v, .g = g, .beta = beta, .state = before, .out = o, .state_out = after};
  if (!c.a_log.empty()) a.a_log = a_log;
  if (!c.dt_bias.empty()) a.dt_bias = dt_bias;
  a.state_v_first = p.v_first;
  a.qk_l2norm = p.l2norm;
  a.beta_sigmoid = p.beta_sigmoid;
  a.gate = static_cast<rlk::KdaDecode::Gate>(p.gate);
  rlk::Options options;
  options.backend = implementation;
  const rlk::Status status = rlk::kda_decode(a, options);
  if (!in_place) state = next;
  return status;
}

}  // namespace

TEST_CASE("kda_decode after a prefill gives what one call over all tokens gives") {
  for (const char* implementation : {"native.golden", "native.fma32"}) {
    for (bool v_first : {false, true}) {
      const Shape shape{.tokens = 80,
                        .heads = 1,
                        .value_heads = 2,
                        .k = 100,
                        .v = 60,
                        .gate = v_first ? Gate::bounded : Gate::softplus,
                        .v_first = v_first,
                        .norm = true,
                        .sigmoid = true};
      Case all = random_case(shape, 21), head = random_case(shape, 21);
      REQUIRE(run(all, "native.golden"));
      // The first 70 tokens as a packed call of one sequence would need other strides: cut by tokens instead.
      Case prefix = random_case(shape, 21);
      prefix.p.tokens = 70;
      prefix.bind();
      REQUIRE(run(prefix, implementation));
      std::vector<float> state = prefix.out.at("ht").values(), out;
      const auto width = std::size_t(2 * 60);
      for (std::int64_t t = 70; t < 80; ++t) {
        const rlk::Status status = decode(all, t, state, out, implementation, t % 2 == 0);
        REQUIRE_MESSAGE(status, status.message());
        const std::vector<float> whole = all.out.at("o").values();
        const std::vector<float> want(whole.begin() + t * std::int64_t(width),
                                      whole.begin() + (t + 1) * std::int64_t(width));
        CHECK(rms_ratio(Buffer(Float::f32, out), want) < 1e-5);
      }
      CHECK(rms_ratio(Buffer(Float::f32, state), all.out.at("ht").values()) < 1e-5);
    }
  }
}

TEST_CASE("kda_decode in place and out of place give the same bits") {
  for (bool v_first : {false, true}) {
    Case c = random_case({.tokens = 1, .value_heads = 3, .k = 128, .v = 129, .v_first = v_first}, 22);
    std::vector<float> here = c.in.at("h0").values(), there = here, out_here, out_there;
    REQUIRE(decode(c, 0, here, out_here, "native.fma32", true));
    REQUIRE(decode(c, 0, there, out_there, "native.fma32", false));
    CHECK(std::memcmp(here.data(), there.data(), here.size() * 4) == 0);
    CHECK(std::memcmp(out_here.data(), out_there.data(), out_here.size() * 4) == 0);
  }
}

TEST_CASE("kda_gate is the gate inside kda_fwd, and kda_gate_bwd its gradient") {
  for (Gate gate : {Gate::softplus, Gate::bounded}) {
    CAPTURE(int(gate));
    const Shape shape{.tokens = 65, .value_heads = 2, .k = 30, .gate = gate};
    Case inside = random_case(shape, 23), outside = random_case(shape, 23);
    const std::int64_t n = 65, HV = 2, K = 30;
    for (const char* implementation : {"native.golden", "native.fma32"}) {
      rlk::Options options;
      options.backend = implementation;
      REQUIRE(run(inside, implementation));
      std::vector<float> raw = inside.in.at("g").values(), decay(raw.size(), NAN);
      const rlk::Tensor g(raw.data(), {1, n, HV, K}, rlk::DType::f32),
          y(decay.data(), {1, n, HV, K}, rlk::DType::f32), a_log(inside.a_log.data(), {HV}, rlk::DType::f32),
          dt_bias(inside.dt_bias.data(), {HV, K}, rlk::DType::f32);
      rlk::KdaGate forward{.g = g, .a_log = a_log, .dt_bias = dt_bias, .out = y};
      forward.gate = static_cast<rlk::KdaGate::Gate>(gate);
      REQUIRE(rlk::kda_gate(forward, options));

      outside = random_case(shape, 23);
      outside.p.gate = Gate::none;
      outside.a_log.clear();
      outside.dt_bias.clear();
      outside.in["g"] = Buffer(Float::f32, decay);
      outside.bind();
      REQUIRE(run(outside, implementation));
      CHECK(rms_ratio(outside.out.at("o"), inside.out.at("o").values()) < 1e-6);

      std::vector<float> d_decay = outside.out.at("dg").values(), d_raw(raw.size(), NAN), d_a_log(2, NAN),
                         d_bias(60, NAN);
      const rlk::Tensor dy(d_decay.data(), {1, n, HV, K}, rlk::DType::f32),
          dx(d_raw.data(), {1, n, HV, K}, rlk::DType::f32), da(d_a_log.data(), {HV}, rlk::DType::f32),
          db(d_bias.data(), {HV, K}, rlk::DType::f32);
      rlk::KdaGateBwd backward{
          .g = g, .a_log = a_log, .dt_bias = dt_bias, .d_out = dy, .d_g = dx, .d_a_log = da, .d_dt_bias = db};
      backward.gate = static_cast<rlk::KdaGateBwd::Gate>(gate);
      REQUIRE(rlk::kda_gate_bwd(backward, options));
      CHECK(rms_ratio(Buffer(Float::f32, d_raw), inside.out.at("dg").values()) < 1e-5);
      CHECK(rms_ratio(Buffer(Float::f32, d_bias), inside.d_dt_bias) < 1e-4);
      CHECK(rms_ratio(Buffer(Float::f32, d_a_log), inside.d_a_log) < 1e-4);
    }
  }
}
