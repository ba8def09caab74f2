// Calls whose results are little beside what they are made of, which random sizes hit once in some thousand.
#include "calls.hpp"

namespace differential {
namespace {

Call call_of(const char* op) { return Call(*rlk::registry::find(op)); }

// Of rows of one element no gradient is left but what eps leaves.
Call kda_of_one_channel(int64_t value_width, int64_t gate) {
  const int64_t tokens = 38, heads = 2;
  Call c = call_of("kda_bwd");
  for (const char* row : {"q", "k"}) c.read(row, {1, tokens, heads, 1}, DType::f32);
  for (const char* row : {"v", "d_out"}) c.read(row, {1, tokens, heads, value_width}, DType::f32);
  c.read("g", {1, tokens, heads, 1}, DType::f32);
  c.read("beta", {1, tokens, heads}, DType::f32);
  c.read("a_log", {heads}, DType::f32, {Values::uniform, -1, 1});
  c.read("dt_bias", {heads}, DType::f32);
  c.set("qk_l2norm", 1), c.set("beta_sigmoid", 1), c.set("allow_neg_eigval", 1), c.set("gate", gate);
  for (const char* result : {"d_q", "d_k", "d_v", "d_g", "d_beta", "d_a_log", "d_dt_bias"})
    c.write(result, DType::f32);
  return c;
}

// Growth in place of decay: gradients beyond fp16.
Call kda_that_grows() {
  Call c = call_of("kda_bwd");
  for (const char* row : {"q", "k"}) c.read(row, {1, 37, 2, 8}, DType::f16, {Values::normal, 0, 0.35});
  for (const char* row : {"v", "d_out"}) c.read(row, {1, 37, 2, 1}, DType::f16);
  c.read("g", {1, 37, 2, 8}, DType::f32, {Values::uniform, 0, 1});
  c.read("beta", {1, 37, 2}, DType::f32, {Values::uniform, 0, 1});
  for (const char* result : {"d_q", "d_k", "d_v"}) c.write(result, DType::f16);
  return c;
}

// Every row a peak of its own.
Call swiglu_near_its_least() {
  Call c = call_of("swiglu_bwd");
  for (const char* row : {"d_out", "up"}) c.read(row, {300, 1}, DType::f32, {Values::normal, 0, 4});
  c.read("gate", {300, 1}, DType::f32, {Values::normal, -1.2785, 1e-3});
  for (const char* result : {"d_gate", "d_up"}) c.write(result, DType::f32);
  return c;
}
Call opposite_terms() {
  Call c = call_of("ratio_kl_bwd");
  for (const char* row : {"logp", "old_logp", "ref_logp"})
    c.read(row, {1000, 1}, DType::f32, {Values::normal, -1.5, 0.5});
  c.read("d_ratio", {1000, 1}, DType::f32, {Values::uniform, 0.9, 1.1});
  c.read("d_kl", {1000, 1}, DType::f32, {Values::uniform, -1.1, -0.9});
  c.set("estimator", 0);
  c.write("d_logp", DType::f32);
  return c;
}

Call rounded_early() {
  Call c = call_of("rms_norm");
  c.read("x", {60, 1024}, DType::f16);
  c.read("weight", {1024}, DType::f16);
  c.set("cast", 1);
  c.write("y", DType::f16);
  return c;
}

// All entries alike: what the target gains the others lose.
Call equal_rows() {
  Call c = call_of("linear_logp_bwd");
  c.read("hidden", {6, 8}, DType::f16);
  c.read("weight", {1030, 8}, DType::f16, {Values::uniform, 0.5, 0.5});
  c.read("target", {6}, DType::i32, {Values::integers, 0, 1030});
  c.read("d_logp", {6}, DType::f32, {Values::normal, 0, 4});
  for (const char* result : {"d_hidden", "d_weight"}) c.write(result, DType::f32);
  return c;
}

// Products of an fp32 and an fp16 operand, rounded to fp32 and then to fp16.
Call rounded_twice() {
  Call c = call_of("lm_head_bwd");
  c.read("d_out", {64}, DType::f32);
  c.read("hidden", {300}, DType::f16);
  c.read("weight", {64, 300}, DType::f16);
  c.write("d_weight", DType::f16);
  return c;
}

// Rows of no sequence are left as they are.
Call rows_of_none() {
  Call c = call_of("attention");
  c.read("q", {7, 2, 32}, DType::f32);
  c.read("cu_q", {3}, DType::i64, {Values::list, 0, 0, {0, 2, 5}});
  c.read("k", {2, 40, 1, 32}, DType::f32);
  c.read("v", {2, 40, 1, 16}, DType::f32);
  for (const char* result : {"out", "lse"}) c.write(result, DType::f32);
  return c;
}

// The widest window there is.
Call window_of_all() {
  Call c = call_of("attention_bwd");
  for (const char* rows : {"q", "k", "v", "out", "d_out"}) c.read(rows, {1, 9, 2, 16}, DType::f32);
  c.read("lse", {1, 9, 2}, DType::f32, {Values::uniform, 2, 3});
  c.set("causal", 1), c.set("window", INT64_MAX);
  for (const char* result : {"d_q", "d_k", "d_v"}) c.write(result, DType::f32);
  return c;
}

}  // namespace

std::vector<Call> hard_calls() {
  return {kda_of_one_channel(32, 2),
          kda_of_one_channel(1, 1),
          kda_that_grows(),
          swiglu_near_its_least(),
          opposite_terms(),
          rounded_early(),
          equal_rows(),
          rounded_twice(),
          rows_of_none(),
          window_of_all()};
}

}  // namespace differential
