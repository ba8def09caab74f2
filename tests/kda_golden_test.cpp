// labels: conformance
// Every golden case of KDA, forward and backward, by every native implementation, in every dtype.
#include <doctest/doctest.h>

#include "kda_case.hpp"

namespace {

using namespace kda_test;

const char* const kCases[] = {"base_t64",
                              "bf16_d128_t130",
                              "causal_first6",
                              "gate_lower_bound",
                              "gate_lower_bound_noA",
                              "gate_softplus",
                              "gate_softplus_nobias",
                              "gva_h2_hv4",
                              "internals_d64",
                              "kimi_like_d128",
                              "l2norm_sigmoid_neg",
                              "masked_gates",
                              "one_token",
                              "slow_gates_collinear",
                              "strong_gates",
                              "tail_t100_kv",
                              "varlen",
                              "varlen_empty_seq",
                              "zero_gate_beta_edge"};

Golden golden(const std::string& name) { return read_golden(RLK_TEST_DATA "/kda/" + name + ".safetensors"); }

// The bounds of registry/kda/README.md for 16-bit operands.
double bound16(const std::string& result) {
  if (result == "o" || result == "ht") return 0.005;
  if (result == "dg" || result == "dbeta") return 0.02;
  return result == "dA_log" ? 0.003 : 0.008;
}

void check_cases(const char* implementation, Float type, double bound32) {
  for (const char* name : kCases) {
    CAPTURE(name);
    Case c = from_golden(golden(name), type);
    const rlk::Status status = run(c, implementation);
    REQUIRE_MESSAGE(status, status.message());
    for (const auto& [result, truth] : c.truth) {
      CAPTURE(result);
      CHECK(rms_ratio(c.out.at(result), truth) <= (type == Float::f32 ? bound32 : bound16(result)));
    }
  }
}

}  // namespace

TEST_CASE("kda golden files: the recurrent form in fp32 is within 1e-6") {
  check_cases("native.golden", Float::f32, 1e-6);
}

TEST_CASE("kda golden files: the chunked form in fp32 is within 1e-4") {
  check_cases("native.fma32", Float::f32, 1e-4);
}

TEST_CASE("kda golden files: 16-bit data stays within the bounds of the page") {
  for (Float type : {Float::bf16, Float::f16}) {
    check_cases("native.golden", type, 0);
    check_cases("native.fma32", type, 0);
  }
}

TEST_CASE("kda causality is exact: gradients after the last token with an output gradient are zero") {
  for (const char* implementation : {"native.golden", "native.fma32"}) {
    CAPTURE(implementation);
    Case c = from_golden(golden("causal_first6"));
    REQUIRE(run(c, implementation));
    const auto H = std::size_t(c.p.heads), K = std::size_t(c.p.k_dim);
    for (const char* result : {"dq", "dk", "dv", "dg", "dbeta"}) {
      const Buffer& d = c.out.at(result);
      const std::size_t per_token = std::string(result) == "dbeta" ? H : H * K;
      bool some = false;
      for (std::size_t i = 0; i < d.size(); ++i) {
        if (i / per_token < 6) some = some || d[i] != 0;
        if (i / per_token >= 6) REQUIRE(d[i] == 0.0f);
      }
      CHECK(some);
    }
  }
}
